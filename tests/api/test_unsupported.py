"""What is refused rather than ignored, and what may be ignored."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from fastserve.api.requests import parse_chat, parse_completion
from fastserve.api.unsupported import ACCEPTED, HARMLESS, sort_out
from fastserve.errors import InvalidRequest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def parse(fields: dict[str, Any]) -> tuple[str, ...]:
    """The unknown fields of a chat with these fields."""
    messages = [{"role": "user", "content": "Hi"}]
    return parse_chat(orjson.dumps({"messages": messages} | fields)).unknown_fields


# Fields that only some dialects act on; a chat does.
OF_CHATS = {
    "include_reasoning", "parallel_tool_calls", "separate_reasoning", "tool_choice", "tools",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HARMLESS.keys() - OF_CHATS))
def test_a_field_that_would_change_the_answer_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sort_out({name: {"something": "asked for"}}, ours=frozenset())
    assert caught.value.param == name
    assert caught.value.code in {"unsupported_parameter", "unsupported_value"}
    assert f"'{name}' is not supported" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in sorted(HARMLESS) for value in HARMLESS[name]]
)
def test_a_value_that_asks_for_nothing_is_accepted(name: str, value: Any) -> None:
    assert sort_out({name: value}, ours=frozenset()) == ()


@pytest.mark.parametrize("name", sorted(ACCEPTED - OF_CHATS))
def test_a_field_that_only_tells_something_is_accepted(name: str) -> None:
    assert parse({name: {"any": "thing"}}) == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [TOOL], "tool_choice": "none"},
        {"best_of": 1},
        {"best_of": 3, "n": 3},
    ],
)
def test_requests_that_need_nothing_of_it(fields: dict[str, Any]) -> None:
    assert parse(fields) == ()


@pytest.mark.parametrize("name", ["tools", "tool_choice", "include_reasoning"])
def test_what_only_chats_have_is_refused_in_a_completion(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(orjson.dumps({"prompt": "Once", name: [TOOL]}))
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "the end"),
        ("prompt_logprobs", 0),
        ("prompt_token_ids", [1]),
        ("continue_final_message", True),
    ],
)
def test_what_is_refused_in_a_completion(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(orjson.dumps({"prompt": "Once", name: value}))
    assert caught.value.param == name
