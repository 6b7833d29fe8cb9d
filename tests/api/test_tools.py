"""Tools and the choice among them, in each dialect: what is read, what is refused, what must be."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from fastserve.api.anthropic_requests import parse_messages
from fastserve.api.requests import ChatRequest, parse_chat
from fastserve.api.response_requests import parse_response
from fastserve.api.tools import TOOLS_MAX, ToolChoice
from fastserve.errors import InvalidRequest
from fastserve.generation import Grammar, GrammarKind

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(orjson.dumps({"messages": [USER]} | fields))


def messages(**fields: Any) -> ChatRequest:
    body = {"messages": [USER], "max_tokens": 5} | fields
    return parse_messages(orjson.dumps(body)).as_chat()


def response(**fields: Any) -> ChatRequest:
    return parse_response(orjson.dumps({"input": "Hi"} | fields)).as_chat([])


def grammar(request: ChatRequest) -> Any:
    """The schema of what the answer must be; None if it may be anything."""
    found = request.sampling(prompt_tokens=1, max_seq_len=100, choice=0).grammar
    if found is None:
        return None
    assert found == Grammar(kind=GrammarKind.JSON_SCHEMA, source=found.source)
    return orjson.loads(found.source)


# ---- what is read


def test_tools_go_to_the_template_as_they_came() -> None:
    given = [tool("g", parameters=SCHEMA, description="Do.", extra=1), tool("f")]
    request = chat(tools=given)
    assert request.tools == given
    assert list(request.tools[0]["function"]) == ["name", "parameters", "description", "extra"]
    assert request.tool_schemas == {"g": SCHEMA, "f": None}
    assert request.tool_choice == ToolChoice(mode="auto")
    assert not request.must_call


def test_a_null_is_absence() -> None:
    request = chat(tools=[tool(description=None, parameters=None, strict=None)], tool_choice=None)
    assert request.tools == [tool()]
    assert chat(tools=None, tool_choice=None, parallel_tool_calls=None) == chat()


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("auto", ToolChoice(mode="auto"), {"f", "g"}),
        ("required", ToolChoice(mode="required"), {"f", "g"}),
        (named("g"), ToolChoice(mode="named", name="g"), {"f", "g"}),
        (allowed("auto", "g"), ToolChoice(mode="auto"), {"g"}),
        (allowed("required", "f", "g"), ToolChoice(mode="required"), {"f", "g"}),
        ("none", ToolChoice(mode="auto"), set()),
    ],
)
def test_a_choice(choice: Any, expected: ToolChoice, names: set[str]) -> None:
    request = chat(tools=[tool("f"), tool("g")], tool_choice=choice)
    assert request.tool_choice == expected
    assert request.tool_schemas.keys() == names


@pytest.mark.parametrize(
    ("choice", "mode", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "f"}, "named", True),
    ],
)
def test_a_choice_of_messages(choice: Any, mode: str, *, parallel: bool) -> None:
    given = {"name": "f", "description": "Do.", "input_schema": SCHEMA, "cache_control": {}}
    request = messages(tools=[given], tool_choice=choice)
    assert request.tools == [tool("f", description="Do.", parameters=SCHEMA)]
    assert request.tool_choice.mode == mode
    assert request.parallel_tool_calls is parallel


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice(mode="auto")),
        ("required", ToolChoice(mode="required")),
        ({"type": "function", "name": "f"}, ToolChoice(mode="named", name="f")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [
                {"type": "function", "name": "f"}]},
            ToolChoice(mode="required"),
        ),
    ],
)  # fmt: skip
def test_a_choice_of_responses(choice: Any, expected: ToolChoice) -> None:
    given = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
    request = response(tools=[given], tool_choice=choice, parallel_tool_calls=False)
    assert request.tools == [tool("f", parameters=SCHEMA, strict=True)]
    assert request.tool_choice == expected
    assert not request.parallel_tool_calls


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [tool(), {"function": {"name": "g"}}]}, "tools[1].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "g"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(""), tool("f")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(description=1)]}, "tools[0].function.description"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools"),
        ({"tools": [tool(f"f{n}") for n in range(TOOLS_MAX + 1)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("f")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 3}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [tool()], "tool_choice": allowed("auto", "g")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": allowed("none", "f")}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"messages": [{"role": "assistant", "content": "", "reasoning": 1}]},
         "messages[0].reasoning_content"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert f"'{param}" in caught.value.message


def test_a_tool_that_nests_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"properties": {"a": schema}}
    with pytest.raises(InvalidRequest, match=r"'tools\[0\]' is nested"):
        chat(tools=[tool(parameters=schema)])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
         "tools[0].input_schema.type"),
        ({"tools": [{"name": "a" * 129, "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tools": [{"name": "f", "input_schema": {}}],
          "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "1", "name": "f", "input": "{}"}]}, USER]},
         "messages[0].content[0].input"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_messages(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]},
         "input[0].arguments"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_responses(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        response(**fields)
    assert caught.value.param == param


# ---- conversations with calls


CALLED = [
    USER,
    {
        "role": "assistant",
        "content": "Well.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "one"},
    {"role": "tool", "tool_call_id": "2", "content": "two"},
]


def test_a_chat_with_calls() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    turn = {"role": "assistant", "content": "Well.", "tool_calls": calls}
    for name in ("reasoning", "reasoning_content"):
        given = [USER, turn | {name: "Hm."}, *CALLED[2:]]
        assert chat(messages=given).messages == CALLED


def test_messages_with_calls() -> None:
    turn = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "2", "name": "g", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "two"}]},
    ]
    given = [USER, {"role": "assistant", "content": turn}, {"role": "user", "content": results}]
    assert messages(messages=given).messages == CALLED


def test_a_result_that_is_an_error_says_so_and_text_may_follow_it() -> None:
    given = [
        {"type": "tool_result", "tool_use_id": "1", "content": "gone", "is_error": True},
        {"type": "text", "text": "And"},
        {"type": "text", "text": "now?"},
    ]
    assert messages(messages=[{"role": "user", "content": given}, USER]).messages == [
        {"role": "tool", "tool_call_id": "1", "content": "Error: gone"},
        {"role": "user", "content": "And\nnow?\nHi"},
    ]


def test_responses_with_calls() -> None:
    given = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2",
         "output": [{"type": "input_text", "text": "two"}]},
    ]  # fmt: skip
    assert response(input=given).messages == CALLED


def test_two_answers_in_a_row_stay_two() -> None:
    given = [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "c"}]},
        USER,
    ]
    assert response(input=given).messages == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "", "reasoning_content": "c"},
        USER,
    ]


# ---- what an answer must be


def call_of(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("fields", [{}, {"tools": [tool()]}, {"tools": [tool()]} | {
    "tool_choice": "none"}])  # fmt: skip
def test_an_answer_may_be_anything(fields: dict[str, Any]) -> None:
    assert grammar(chat(**fields)) is None


def test_an_answer_must_be_the_arguments_of_the_function_that_was_named() -> None:
    tools = [tool("f", parameters=SCHEMA), tool("g")]
    assert grammar(chat(tools=tools, tool_choice=named("f"))) == SCHEMA
    assert grammar(chat(tools=tools, tool_choice=named("g"))) == NOTHING


def test_an_answer_must_be_calls() -> None:
    tools = [tool("f", parameters={"properties": {}}), tool("g")]
    several = {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                call_of("f", {"type": "object", "properties": {}}),
                call_of("g", NOTHING),
            ]
        },
    }
    assert grammar(chat(tools=tools, tool_choice="required")) == several
    one = chat(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert grammar(one) == several | {"maxItems": 1}


def test_references_in_a_schema_still_lead_where_they_led() -> None:
    item = {"type": "object", "properties": {"next": {"$ref": "#/$defs/item"}}}
    schema = {"properties": {"first": {"$ref": "#/$defs/item"}, "self": {"$ref": "#"}}}
    tools = [tool("f", parameters=schema | {"$defs": {"item": item}}), tool("g")]
    made = grammar(chat(tools=tools, tool_choice="required"))
    assert made["items"]["anyOf"][0] == call_of("f", {"$ref": "#/$defs/f"})
    moved = made["$defs"]["f"]
    assert moved["properties"] == {
        "first": {"$ref": "#/$defs/f/$defs/item"},
        "self": {"$ref": "#/$defs/f"},
    }
    assert moved["$defs"]["item"]["properties"] == {"next": {"$ref": "#/$defs/f/$defs/item"}}
