"""What a chat template gets of the messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from fastserve.api.messages import MESSAGES_MAX, ROLES, read_messages
from fastserve.errors import InvalidRequest


def one(**message: Any) -> dict[str, object]:
    (read,) = read_messages([message])
    return read


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("role", sorted(ROLES))
def test_every_role_may_speak(role: str) -> None:
    assert one(role=role, content="Hi") == {"role": role, "content": "Hi"}


def test_parts_are_joined_by_newlines() -> None:
    message = one(role="user", content=[text_part("Hi"), text_part("there")])
    assert message == {"role": "user", "content": "Hi\nthere"}
    assert one(role="user", content=[]) == {"role": "user", "content": ""}


def test_an_assistant_without_content_says_nothing() -> None:
    assert one(role="assistant", content=None) == {"role": "assistant", "content": ""}
    assert one(role="assistant") == {"role": "assistant", "content": ""}


def test_nulls_are_left_out_and_other_fields_pass() -> None:
    message = one(role="user", content="Hi", name="Ann", tool_calls=None, refusal=None, mood="up")
    assert message == {"role": "user", "content": "Hi", "name": "Ann", "mood": "up"}


def test_a_template_gets_the_arguments_of_a_tool_call_as_an_object() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    message = one(role="assistant", content=None, tool_calls=[call])
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
    ]
    answer = one(role="tool", content="5", tool_call_id="c1")
    assert answer == {"role": "tool", "content": "5", "tool_call_id": "c1"}


@pytest.mark.parametrize("arguments", ["{not json", "5", "", None])
def test_arguments_that_are_no_object_pass_as_they_are(arguments: str | None) -> None:
    function = {"name": "f", "arguments": arguments}
    message = one(role="assistant", tool_calls=[{"function": function}])
    assert message["tool_calls"] == [{"function": function}]


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        (None, "messages", "missing_required_parameter"),
        ("Hi", "messages", "invalid_type"),
        ({}, "messages", "invalid_type"),
        ([], "messages", "empty_array"),
        (
            [{"role": "user", "content": ""}] * (MESSAGES_MAX + 1),
            "messages",
            "array_above_max_length",
        ),
        (["Hi"], "messages[0]", "invalid_type"),
        ([None], "messages[0]", "invalid_type"),
        ([{}], "messages[0].role", "missing_required_parameter"),
        ([{"content": "Hi"}], "messages[0].role", "missing_required_parameter"),
        ([{"role": 5, "content": "Hi"}], "messages[0].role", "invalid_type"),
        ([{"role": [], "content": "Hi"}], "messages[0].role", "invalid_type"),
        ([{"role": "robot", "content": "Hi"}], "messages[0].role", "invalid_value"),
        ([{"role": "user"}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "user", "content": None}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "user", "content": 5}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": {}}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]", "invalid_type"),
        (
            [{"role": "user", "content": [{"text": "Hi"}]}],
            "messages[0].content[0].type",
            "missing_required_parameter",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            "messages[0].content[0].text",
            "invalid_type",
        ),
        (
            [
                {"role": "user", "content": "Hi"},
                {"role": "user", "content": [text_part("a"), {"type": "image_url"}]},
            ],
            "messages[1].content[1].type",
            "unsupported_value",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            "messages[0].content[0].type",
            "unsupported_value",
        ),
        ([{"role": "user", "content": "", "name": 5}], "messages[0].name", "invalid_type"),
        (
            [{"role": "tool", "content": "", "tool_call_id": 5}],
            "messages[0].tool_call_id",
            "invalid_type",
        ),
        (
            [{"role": "assistant", "tool_calls": {}}],
            "messages[0].tool_calls",
            "invalid_type",
        ),
        (
            [{"role": "assistant", "tool_calls": [5]}],
            "messages[0].tool_calls[0]",
            "invalid_type",
        ),
        (
            [{"role": "assistant", "tool_calls": [{}]}],
            "messages[0].tool_calls[0].function",
            "missing_required_parameter",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": "f"}]}],
            "messages[0].tool_calls[0].function",
            "invalid_type",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name",
            "invalid_type",
        ),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "f", "arguments": '{"a":' * 99 + "1" + "}" * 99}}
                    ],
                }
            ],
            "messages[0].tool_calls[0].function.arguments",
            "invalid_value",
        ),
    ],
)
def test_messages_are_refused_for(messages: object, param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_messages(messages)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert f"'{param}" in caught.value.message
