"""Embeddings as they are asked for, and as openai's client reads them."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import orjson
import pytest
from openai.types import CreateEmbeddingResponse

from fastserve.api.embeddings import EmbeddingDialect, parse_embeddings
from fastserve.api.prompts import INPUTS_MAX
from fastserve.api.responses import Choice, Usage
from fastserve.errors import InvalidRequest
from fastserve.generation import FinishReason, embedding_values, packed_embedding

SIZE, VOCAB_SIZE = 4, 100
VECTORS = [[0.5, -0.5, 0.5, 0.5], [0.0, 1.0, 0.0, 0.0]]


def parse(**fields: Any) -> Any:
    return parse_embeddings(orjson.dumps(fields), size=SIZE, vocab_size=VOCAB_SIZE)


def answered(*, packed: bool) -> Any:
    choices = [
        Choice(text="", finish_reason=FinishReason.STOP, embedding=packed_embedding(vector))
        for vector in VECTORS
    ]
    usage = Usage(prompt_tokens=5, completion_tokens=0, cached_tokens=0)
    return orjson.loads(
        EmbeddingDialect(packed=packed).whole(
            choices, completion_id="embd-1", created=1, model="m", usage=usage
        )
    )


@pytest.mark.parametrize(
    ("sent", "inputs"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
        (["a", [3]], ("a", [3])),
        (["a"] * INPUTS_MAX, ("a",) * INPUTS_MAX),
    ],
)
def test_every_form_of_an_input_becomes_one(sent: object, inputs: tuple[object, ...]) -> None:
    assert parse(input=sent).inputs == inputs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [VOCAB_SIZE]}, "input"),
        ({"input": [[1], [VOCAB_SIZE]]}, "input"),
        ({"input": ["a"] * (INPUTS_MAX + 1)}, "input"),
        ({"input": "a", "dimensions": SIZE - 1}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": "a", "sim": 1}, "sim"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse(**fields)
    assert (refusal.value.param or "").startswith(param)


def test_a_user_is_ignored_and_what_nobody_knows_is_told() -> None:
    request = parse(input="a", user="me", dimensions=SIZE, colour="red")
    assert request.unknown_fields == ("colour",)
    assert request.as_completion().unknown_fields == ("colour",)


def test_numbers_are_told_in_order() -> None:
    answer = answered(packed=False)
    assert answer == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": VECTORS[0]},
            {"object": "embedding", "index": 1, "embedding": VECTORS[1]},
        ],
        "model": "m",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    CreateEmbeddingResponse.model_validate(answer, strict=True)


def test_packed_they_are_the_same_as_32_bit_floats() -> None:
    for item, vector in zip(answered(packed=True)["data"], VECTORS, strict=True):
        assert array("f", base64.b64decode(item["embedding"])).tolist() == vector


def test_packing_loses_what_32_bits_do_not_hold_and_no_more() -> None:
    values = [1 / 3, -2e-9, 1.0]
    assert embedding_values(packed_embedding(values)) == array("f", values).tolist()
