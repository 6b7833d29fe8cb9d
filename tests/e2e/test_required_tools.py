"""Calls that must be made: the embedded model, which knows of no tools, is held to them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import openai

    from tests.e2e.harness import Server

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"$ref": "#/$defs/few"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 9}},
    },
}
TOOLS: Any = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
USER: Any = [{"role": "user", "content": "What will the weather be in Paris?"}]

STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


def ask(client: openai.OpenAI, *, stream: bool, **options: Any) -> Any:
    """The choice of a chat; the client puts a stream together."""
    asked: dict[str, Any] = {
        "model": client.models.list().data[0].id, "messages": USER, "tools": TOOLS,
        "max_tokens": 300, "seed": 7, "parallel_tool_calls": False,
    } | options  # fmt: skip
    if not stream:
        return client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0]


@STREAM_OR_WHOLE
@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_call_is_made_as_its_schema_wants_it(
    embedded: Server, choice: Any, finish: str, *, stream: bool
) -> None:
    with embedded.client() as client:
        answer = ask(client, stream=stream, tool_choice=choice)
    [call] = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "stop":
        assert arguments == {}
    else:
        assert call.function.name == "get_weather"
        assert arguments.keys() == {"city", "days"}
        assert 1 <= arguments["days"] <= 9
        assert len(arguments["city"]) <= 12
    assert answer.finish_reason == finish
    assert not answer.message.content


def test_an_answer_cannot_be_calls_and_match_a_grammar(embedded: Server) -> None:
    with embedded.client() as client, pytest.raises(Exception, match="grammar") as caught:
        ask(
            client, stream=False, tool_choice="required",
            response_format={"type": "json_object"},
        )  # fmt: skip
    assert getattr(caught.value, "param", None) == "tools"
