"""What a body of the Responses API means as a chat."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from fastserve.api.requests import ChatRequest
from fastserve.api.response_requests import METADATA_MAX, parse_response
from fastserve.errors import InvalidRequest

HELLO: Any = [{"role": "user", "content": "Hello"}]
EARLIER: Any = [*HELLO, {"role": "assistant", "content": "Hi"}]
LOGPROBS = "message.output_text.logprobs"


def read(earlier: Any = (), **fields: Any) -> ChatRequest:
    return parse_response(orjson.dumps({"input": "Hello"} | fields)).as_chat(list(earlier))


def test_a_response_of_nothing_but_an_input_has_the_apis_defaults() -> None:
    request = parse_response(b'{"input":"Hello"}')
    assert request.as_chat([]) == ChatRequest(messages=HELLO)
    assert request.fields.store is None


def test_every_field_arrives() -> None:
    assert read(
        model="m", stream=True, temperature=0.5, top_p=0.9, max_output_tokens=7, include=[LOGPROBS],
        top_logprobs=2, reasoning={"effort": "low", "summary": None}, top_k=4, seed=5, stop="x",
        sim={"fail_at": 1}, logit_bias={"9": -1}, stop_token_ids=[3],
    ) == ChatRequest(
        messages=HELLO, model="m", stream=True, temperature=0.5, top_p=0.9,
        max_completion_tokens=7, wants_logprobs=True, top_logprobs=2,
        template_kwargs={"reasoning_effort": "low"}, reasoning_effort="low", top_k=4, seed=5,
        stop=("x",), sim={"fail_at": 1}, logit_bias={9: -1.0}, stop_token_ids=(3,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "turns"),
    [
        pytest.param({"input": "Hello"}, ["user: Hello"], id="a string"),
        pytest.param(
            {"input": [
                {"role": "developer", "content": "Be brief."},
                {"type": "message", "role": "user", "content": [
                    {"type": "input_text", "text": "He"}, {"type": "input_text", "text": "llo"},
                ]},
                {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                 "content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
                {"role": "user", "content": "?"},
            ]},
            ["developer: Be brief.", "user: He\nllo", "assistant: Hi", "user: ?"],
            id="items, also such as an answer has",
        ),
        pytest.param(
            {"input": "?", "instructions": "Be brief.", "earlier": EARLIER},
            ["system: Be brief.", "user: Hello", "assistant: Hi", "user: ?"],
            id="a conversation that goes on",
        ),
    ],
)  # fmt: skip
def test_a_conversation_is_read(fields: dict[str, Any], turns: list[str]) -> None:
    chat = read(**fields)
    assert [f"{turn['role']}: {turn['content']}" for turn in chat.messages] == turns


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"input": None}, "input", id="no input"),
        pytest.param({"input": []}, "input", id="an empty input"),
        pytest.param({"input": 3}, "input", id="a number"),
        pytest.param({"input": ["Hello"]}, "input[0]", id="an item that is a text"),
        pytest.param({"input": [{"type": "web_search_call"}]}, "input[0].type", id="a search"),
        pytest.param({"input": [{"content": "x"}]}, "input[0].role", id="nobody's message"),
        pytest.param(
            {"input": [{"role": "tool", "content": "x"}]}, "input[0].role", id="a tool's message"
        ),
        pytest.param({"input": [{"role": "user"}]}, "input[0].content", id="no content"),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            id="an image",
        ),
        pytest.param({"max_output_tokens": 0}, "max_output_tokens", id="a limit of nothing"),
        pytest.param({"temperature": 3}, "temperature", id="too hot"),
        pytest.param({"top_k": -2}, "top_k", id="an extension's range"),
        pytest.param({"top_logprobs": 2}, "top_logprobs", id="logprobs that are not included"),
        pytest.param({"include": ["everything"]}, "include", id="what cannot be included"),
        pytest.param({"instructions": [{}]}, "instructions", id="instructions in items"),
        pytest.param({"reasoning": {"summary": "auto"}}, "reasoning", id="a summary of thoughts"),
        pytest.param({"metadata": {"a": 1}}, "metadata", id="metadata that is a number"),
        pytest.param(
            {"metadata": {str(n): "" for n in range(METADATA_MAX + 1)}}, "metadata", id="too much"
        ),
        pytest.param({"tools": [{"type": "web_search"}]}, "tools", id="tools"),
        pytest.param({"tool_choice": "required"}, "tool_choice", id="a tool that must be"),
        pytest.param({"background": True}, "background", id="an answer for later"),
        pytest.param({"truncation": "auto"}, "truncation", id="truncation"),
        pytest.param({"text": {"format": {"type": "poem"}}}, "text", id="a format"),
        pytest.param({"text": {"verbosity": "low"}}, "text", id="verbosity"),
        pytest.param(
            {"response_format": {"type": "json_object"}}, "response_format", id="a chat's format"
        ),
        pytest.param({"conversation": "conv_1"}, "conversation", id="a conversation's id"),
        pytest.param({"prompt": {"id": "p"}}, "prompt", id="a prompt's id"),
        pytest.param({"n": 2}, "n", id="choices"),
        pytest.param({"max_tokens": 5}, "max_tokens", id="a chat's limit"),
        pytest.param({"messages": HELLO}, "messages", id="a chat's messages"),
        pytest.param({"logprobs": True}, "logprobs", id="a chat's logprobs"),
    ],
)
def test_what_we_cannot_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    found = caught.value.param
    assert found is not None
    assert found == param or found.startswith((f"{param}[", f"{param}."))


def test_what_asks_for_nothing_is_taken() -> None:
    assert read(
        metadata={"a": "b"}, user="u", service_tier="auto", tools=[], tool_choice="auto",
        parallel_tool_calls=True, truncation="disabled", background=False, reasoning={},
        text={"format": {"type": "text"}}, include=["reasoning.encrypted_content"],
        stream_options={"include_obfuscation": False}, prompt_cache_key="k",
    ) == ChatRequest(messages=HELLO)  # fmt: skip


def test_what_nobody_knows_is_told_apart() -> None:
    assert read(betas=1).unknown_fields == ("betas",)
