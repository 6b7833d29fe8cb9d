"""From bodies to token ids and parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from fastserve.api.dialect import ChatDialect, CompletionDialect
from fastserve.errors import ContextLengthExceeded, InvalidRequest
from fastserve.frontend.model import Model
from fastserve.frontend.prepare import prepare_chat, prepare_completion
from tests.frontend.stage import END, MAX_SEQ_LEN, USER, VOCAB_SIZE

if TYPE_CHECKING:
    from fastserve.frontend.prepare import Prepared
    from fastserve.generation import ModelCard


@pytest.fixture(scope="module")
def model(card: ModelCard) -> Model:
    return Model(card, template_bytes_max=1000)


def completion(model: Model, **fields: Any) -> Prepared:
    return prepare_completion(orjson.dumps(fields), model)


def chat(model: Model, *contents: str, **fields: Any) -> Prepared:
    messages = [{"role": "user", "content": content} for content in contents]
    return prepare_chat(orjson.dumps({"messages": messages} | fields), model)


def test_a_chat_is_templated_and_tokenized(model: Model) -> None:
    prepared = chat(model, "hi", "you")
    assert isinstance(prepared.dialect, ChatDialect)
    [prompt] = prepared.prompts
    assert prompt.token_ids == [USER, *b"hi", USER, *b"you"]


def test_what_reads_as_a_control_token_is_text_in_a_chat(model: Model) -> None:
    [prompt] = chat(model, "a<|end|>").prompts
    assert prompt.token_ids == [USER, *b"a<|end|>"]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        pytest.param("ab", [[97, 98]], id="a text"),
        pytest.param("a<|end|>", [[97, END]], id="a text with a control token"),
        pytest.param([97, END], [[97, END]], id="ids"),
        pytest.param(["ab", "c"], [[97, 98], [99]], id="texts"),
        pytest.param([[97], [98, 99]], [[97], [98, 99]], id="lists of ids"),
    ],
)
def test_a_prompt_has_many_forms(model: Model, prompt: Any, ids: list[list[int]]) -> None:
    prepared = completion(model, prompt=prompt)
    assert isinstance(prepared.dialect, CompletionDialect)
    assert [each.token_ids for each in prepared.prompts] == ids
    assert [each.echo for each in prepared.prompts] == [""] * len(ids)


@pytest.mark.parametrize(
    ("prompt", "more", "echo"),
    [
        ("a<|end|>b", {}, "a<|end|>b"),
        ([97, END, 98], {}, "ab"),
        ([97, END, 98], {"skip_special_tokens": False}, "a<|end|>b"),
    ],
)
def test_echo_is_the_text_of_the_prompt(
    model: Model, prompt: Any, more: dict[str, Any], echo: str
) -> None:
    [prepared] = completion(model, prompt=prompt, echo=True, **more).prompts
    assert prepared.echo == echo


def test_choices_are_numbered_prompt_by_prompt(model: Model) -> None:
    prepared = completion(model, prompt=["a", "b"], n=2, seed=7, max_tokens=3)
    choices = list(prepared.choices())
    assert [prompt.token_ids for prompt, _ in choices] == [[97], [97], [98], [98]]
    assert [sampling.seed for _, sampling in choices] == [7, 8, 7, 8]
    assert {sampling.max_tokens for _, sampling in choices} == {3}


def test_a_chat_may_fill_the_context(model: Model) -> None:
    [(prompt, sampling)] = chat(model, "hi").choices()
    assert len(prompt.token_ids) + sampling.max_tokens == MAX_SEQ_LEN


@pytest.mark.parametrize("n", [1, 3])
def test_one_prompt_too_long_is_too_long(model: Model, n: int) -> None:
    prepared = completion(model, prompt=["a", "b" * MAX_SEQ_LEN], n=n)
    with pytest.raises(ContextLengthExceeded):
        list(prepared.choices())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [[1], [VOCAB_SIZE]]}, "prompt"),
        ({"prompt": "a", "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"prompt": "a", "logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({}, "prompt"),
    ],
)
def test_what_the_model_has_not_is_refused(
    model: Model, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(model, **fields)
    assert caught.value.param == param


def test_a_template_that_says_nothing_is_refused(card: ModelCard) -> None:
    silent = Model(replace(card, chat_template="{# nothing #}"), template_bytes_max=1000)
    with pytest.raises(InvalidRequest, match="empty prompt"):
        chat(silent, "hi")


def test_a_model_without_a_template_cannot_chat(card: ModelCard) -> None:
    mute = Model(replace(card, chat_template=None), template_bytes_max=1000)
    with pytest.raises(InvalidRequest, match="no chat template"):
        chat(mute, "hi")
