"""From bodies to token ids and parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from fastserve.api.dialect import ChatDialect, CompletionDialect
from fastserve.errors import ContextLengthExceeded, InvalidRequest
from fastserve.frontend.model import Model
from fastserve.frontend.prepare import prepare_chat, prepare_completion
from fastserve.generation import Grammar, GrammarKind
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


# ---- prompts that are cut, continued, or there already


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"prompt": "abcd", "truncate_prompt_tokens": 2}, [*b"cd"]),
        ({"prompt": "abcd", "truncate_prompt_tokens": 2, "truncation_side": "right"}, [*b"ab"]),
        ({"prompt": [1, 2, 3], "truncate_prompt_tokens": 1}, [3]),
        # Far longer than the context, in tokens and in characters.
        ({"prompt": "x" * 99_999 + "yz", "truncate_prompt_tokens": 3}, [*b"xyz"]),
        ({"prompt": "y" * 99_999, "truncate_prompt_tokens": -1, "max_tokens": 60}, [*b"yyyy"]),
    ],
)
def test_a_prompt_is_cut_to_its_last_tokens(
    model: Model, fields: dict[str, Any], ids: list[int]
) -> None:
    prepared = completion(model, **fields)
    assert [prompt.token_ids for prompt, _ in prepared.choices()] == [ids]


def test_the_prompt_of_a_chat_is_cut_after_it_was_templated(model: Model) -> None:
    [prompt] = chat(model, "x" * 900, "hi", truncate_prompt_tokens=5).prompts
    assert prompt.token_ids == [*b"xx", USER, *b"hi"]


def test_a_prompt_that_was_cut_is_echoed_as_it_is_then(model: Model) -> None:
    [prompt] = completion(model, prompt="abcd", echo=True, truncate_prompt_tokens=2).prompts
    assert prompt.echo == "cd"


def test_token_ids_are_a_chat_of_their_own(model: Model) -> None:
    [prompt] = prepare_chat(b'{"prompt_token_ids":[5,6]}', model).prompts
    assert prompt.token_ids == [5, 6]
    [prompt] = chat(model, "hi", prompt_token_ids=[7], add_special_tokens=True).prompts
    assert prompt.token_ids == [7]
    with pytest.raises(InvalidRequest) as caught:
        chat(model, "hi", prompt_token_ids=[VOCAB_SIZE])
    assert caught.value.param == "prompt_token_ids"


ENDED_TURNS = (
    "{% for m in messages %}<|user|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>{% endif %}"
)


def continued(card: ModelCard, *contents: str, template: str = ENDED_TURNS) -> list[int]:
    model = Model(replace(card, chat_template=template), template_bytes_max=1000)
    [prompt] = chat(model, *contents, continue_final_message=True).prompts
    return list(prompt.token_ids)


@pytest.mark.parametrize(
    ("last", "ids"),
    [
        pytest.param("so ", [*b"so "], id="a space at its end is kept"),
        pytest.param(" so", [*b"so"], id="what the template does at its beginning is done"),
        pytest.param("", [], id="nothing"),
        pytest.param("a<|end|>", [*b"a<|end|>"], id="what reads as a control token is text"),
        pytest.param("a<|en", [*b"a<|en"], id="what reads as the beginning of one is text"),
        pytest.param(
            "x fastserveContinuesHere y", [*b"x fastserveContinuesHere y"], id="our own mark"
        ),
    ],
)
def test_a_message_that_is_continued_ends_the_prompt(
    card: ModelCard, last: str, ids: list[int]
) -> None:
    assert continued(card, "hi", last) == [USER, *b"hi", END, USER, *ids]


def test_a_message_that_the_template_leaves_out_cannot_be_continued(card: ModelCard) -> None:
    with pytest.raises(InvalidRequest) as caught:
        continued(card, "hi", template="<|user|>{{ messages | length }}")
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("role", "fields", "echo"),
    [
        ("assistant", {"echo": True}, "so"),
        ("assistant", {"echo": True, "continue_final_message": True}, "so"),
        ("assistant", {}, ""),
        ("user", {"echo": True}, ""),
    ],
)
def test_an_echo_in_a_chat_is_of_the_assistants_last_message(
    model: Model, role: str, fields: dict[str, Any], echo: str
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": "so"}]
    prepared = prepare_chat(orjson.dumps({"messages": messages} | fields), model)
    assert prepared.prompts[0].echo == echo


@pytest.mark.parametrize("stream", [True, False])
def test_a_grammar_goes_to_an_engine_that_can_follow_it(card: ModelCard, *, stream: bool) -> None:
    model = Model(replace(card, grammar_kinds=(GrammarKind.REGEX,)), template_bytes_max=1000)
    asked = {"max_tokens": 2, "n": 2, "stream": stream}
    grammar = Grammar(kind=GrammarKind.REGEX, source="a", param="regex")
    for prepared in (
        chat(model, "hi", regex="a", **asked),
        completion(model, prompt="hi", regex="a", **asked),
    ):
        assert [sampling.grammar for _, sampling in prepared.choices()] == [grammar] * 2
    for prepare in (partial(chat, model, "hi"), partial(completion, model, prompt="hi")):
        with pytest.raises(InvalidRequest, match="cannot follow a JSON schema") as caught:
            prepare(response_format={"type": "json_object"}, **asked)
        assert caught.value.param == "response_format"
