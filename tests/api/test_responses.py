"""Whole answers, as openai's client reads them."""

from __future__ import annotations

import math

import orjson
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion

from fastserve.api.logprobs import TokenText
from fastserve.api.responses import (
    Choice,
    Usage,
    chat_completion,
    completion,
    error_body,
    error_event,
    model,
    models,
    version,
)
from fastserve.errors import EngineDead, FastserveError, InvalidRequest, ModelNotFound, Overloaded
from fastserve.generation import FinishReason

USAGE = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)
TOKENS = [
    TokenText(token="Hi", raw=b"Hi", logprob=-0.25, top=(("Hi", b"Hi", -0.25), ("", b"\xf0", -2))),
    TokenText(token="", raw=b"\xf0\x9f", logprob=-math.inf),
]


def chat(*choices: Choice) -> bytes:
    return chat_completion(
        choices, completion_id="chatcmpl-7f", created=1700000000, model="m", usage=USAGE
    )


def text_completion(*choices: Choice) -> bytes:
    return completion(choices, completion_id="cmpl-7f", created=1700000000, model="m", usage=USAGE)


def test_a_chat_answers_like_this() -> None:
    assert orjson.loads(chat(Choice(text="Hi", finish_reason=FinishReason.STOP))) == {
        "id": "chatcmpl-7f",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_a_completion_answers_like_this() -> None:
    choice = Choice(text=" upon", finish_reason=FinishReason.LENGTH)
    assert orjson.loads(text_completion(choice)) == {
        "id": "cmpl-7f",
        "object": "text_completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": " upon",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_openais_client_reads_a_chat() -> None:
    body = chat(
        Choice(text="Hi", finish_reason=FinishReason.STOP, logprobs=TOKENS),
        Choice(text="", finish_reason=FinishReason.LENGTH),
    )
    answer = ChatCompletion.model_validate_json(body, strict=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert [choice.message.content for choice in answer.choices] == ["Hi", ""]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    hi, part = logprobs.content
    assert [(top.token, top.bytes, top.logprob) for top in hi.top_logprobs] == [
        ("Hi", [72, 105], -0.25),
        ("bytes:\\xf0", [0xF0], -2.0),
    ]
    assert (part.token, part.bytes, part.logprob) == ("bytes:\\xf0\\x9f", [0xF0, 0x9F], -9999.0)


def test_openais_client_reads_a_completion() -> None:
    body = text_completion(Choice(text="Hi", finish_reason=FinishReason.STOP, logprobs=TOKENS))
    answer = Completion.model_validate_json(body, strict=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hi", "bytes:\\xf0\\x9f"]
    assert logprobs.token_logprobs == [-0.25, -9999.0]
    assert logprobs.text_offset == [0, 2]
    assert logprobs.top_logprobs == [
        {"Hi": -0.25, "bytes:\\xf0": -2.0},
        {"bytes:\\xf0\\x9f": -9999.0},
    ]


def test_token_ids_are_where_vllm_has_them() -> None:
    choice = Choice(
        text="Hi",
        finish_reason=FinishReason.STOP,
        stop_reason=2,
        token_ids=(7, 2),
        prompt_token_ids=[1, 5],
    )
    answer = orjson.loads(chat(choice))
    assert answer["prompt_token_ids"] == [1, 5]
    assert answer["choices"][0]["token_ids"] == [7, 2]
    assert answer["choices"][0]["stop_reason"] == 2
    assert "prompt_token_ids" not in answer["choices"][0]
    told = orjson.loads(text_completion(choice))["choices"][0]
    assert (told["prompt_token_ids"], told["token_ids"]) == ([1, 5], [7, 2])


def test_an_engine_that_does_not_tell_of_its_cache_has_no_details() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=0)
    assert usage.as_json() == {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_failure_is_no_answer(reason: FinishReason) -> None:
    for render in (chat, text_completion):
        with pytest.raises(AssertionError):
            render(Choice(text="Hi", finish_reason=reason))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            InvalidRequest("No.", param="n", code="invalid_type"),
            ("No.", "invalid_request_error", "n", "invalid_type"),
        ),
        (
            ModelNotFound("No such model.", param="model"),
            ("No such model.", "invalid_request_error", "model", "model_not_found"),
        ),
        (Overloaded("Busy.", rejection="lane_full"), ("Busy.", "overloaded", None, "overloaded")),
        (EngineDead("Gone."), ("Gone.", "engine_dead", None, "engine_dead")),
        (FastserveError("Oh."), ("Oh.", "server_error", None, None)),
        (FastserveError("\udcff"), ("?", "server_error", None, None)),
    ],
)
def test_errors_are_nested_as_openais_are(
    error: FastserveError, told: tuple[str | None, ...]
) -> None:
    names = ("message", "type", "param", "code")
    body = error_body(error)
    assert orjson.loads(body) == {"error": dict(zip(names, told, strict=True))}
    assert error_event(error) == b"data: " + body + b"\n\n"


def test_openais_client_reads_the_models() -> None:
    listed = orjson.loads(models(["a", "b"], created=1700000000, max_seq_len=2048))
    assert listed["object"] == "list"
    assert listed["data"] == [
        orjson.loads(model(name, created=1700000000, max_seq_len=2048)) for name in ("a", "b")
    ]
    one = Model.model_validate_json(model("a", created=1700000000, max_seq_len=2048), strict=True)
    assert (one.id, one.object, one.created, one.owned_by) == (
        "a",
        "model",
        1700000000,
        "fastserve",
    )
    assert listed["data"][0]["max_model_len"] == 2048


def test_the_version_is_told() -> None:
    assert version("1.2.3") == b'{"version":"1.2.3"}'
