"""The tools that a client offers, which of them must be called, and what a call is.

Tools go to the chat template as they came, for a template prints them as its model was trained to
read them. Where a call is asked for (`required`, or a function by its name), a JSON Schema says
what the whole answer must be; the model's own way to write calls has no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from fastserve.api.body import check_nesting, convert, wrong_type
from fastserve.errors import InvalidRequest
from fastserve.generation import Grammar, GrammarKind

# OpenAI's limits (API reference, "tools"). Anthropic's names may have 128 characters.
TOOLS_MAX = 128
NAME_PATTERN = "^[a-zA-Z0-9_-]{1,64}$"
LONG_NAME_PATTERN = "^[a-zA-Z0-9_-]{1,128}$"

_NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class Function(msgspec.Struct, frozen=True):
    """A function that may be called. Its `parameters` are a JSON Schema of an object.

    `strict` holds where a call is asked for; else the model is trusted to keep to the schema.
    """

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether tools are called: `auto` leaves it to the model, `named` is the function `name`."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """A tool by the name of its function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(msgspec.Struct, frozen=True):
    """OpenAI's `allowed_tools`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call in an answer. `arguments` are JSON text, or what a model took for it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What a model thought before it answered."""

    text: str


# What a chat's answer is made of; a string is text.
Part = str | Thought | Call


def read_tools(fields: dict[str, Any]) -> None:
    """Bring `tools` and `tool_choice` of a chat to the form of the request. Raises InvalidRequest.

    Where none may be called there are none: the model need not hear of them.
    """
    if "tools" not in fields and "tool_choice" not in fields:
        return
    tools = check_tools(fields.pop("tools", []), Tool)
    choice, names = _read_choice(fields.pop("tool_choice", "auto"))
    if choice.mode == "none":
        tools = []
    elif not tools and (choice.mode != "auto" or names is not None):
        raise InvalidRequest(
            "'tool_choice' needs 'tools'.", param="tool_choice", code="invalid_value"
        )
    functions = [tool["function"]["name"] for tool in tools]
    check_names(functions)
    for name in names or ([] if choice.name is None else [choice.name]):
        if name not in functions:
            raise InvalidRequest(
                f"'tool_choice' names '{name[:64]}', which is none of the tools.",
                param="tool_choice",
                code="invalid_value",
            )
    if names is not None:
        tools = [tool for tool in tools if tool["function"]["name"] in names]
    if tools:
        fields["tools"] = tools
        fields["tool_choice"] = msgspec.to_builtins(choice)


def check_tools(
    value: object, of: type[msgspec.Struct], *, kinds: tuple[str, ...] = ("function",)
) -> list[dict[str, Any]]:
    """The tools of a request, each of that declaration, without nulls. Raises InvalidRequest.

    `kinds`: the types that are supported.
    """
    if not isinstance(value, list):
        raise wrong_type("tools", want="an array", got=value)
    if len(value) > TOOLS_MAX:
        raise InvalidRequest(
            f"'tools' must have at most {TOOLS_MAX} items.",
            param="tools",
            code="array_above_max_length",
        )
    return [
        _read_tool(tool, of, kinds=kinds, param=f"tools[{index}]")
        for index, tool in enumerate(value)
    ]


def check_names(names: list[str]) -> None:
    """Raise InvalidRequest if two tools have one name: a call of it would be a call of which?"""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(
            f"'tools' has two functions named '{twice}'.", param="tools", code="invalid_value"
        )


def check_parameters(schema: object, *, param: str) -> None:
    """Raise InvalidRequest if a function's parameters are no schema of an object."""
    if isinstance(schema, dict) and schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"'{param}.type' must be 'object'.", param=f"{param}.type", code="invalid_value"
        )


def grammar_of(tools: list[dict[str, Any]], choice: ToolChoice, *, parallel: bool) -> Grammar:
    """What an answer must be in which a call is asked for.

    For a named function it is the function's arguments alone; else an array of
    `{"name": ..., "parameters": ...}`, of one if calls may not be parallel.
    """
    if choice.mode == "named":
        [tool] = [each for each in tools if each["function"]["name"] == choice.name]
        return _json_schema(_parameters(tool))
    definitions: dict[str, Any] = {}
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(tool, definitions) for tool in tools]},
    }
    if not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return _json_schema(schema)


def _call_schema(tool: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    name, parameters = tool["function"]["name"], _parameters(tool)
    if _has_references(parameters):
        # References lead from the root of a document, which this schema no longer is.
        definitions[name] = _moved(parameters, to=f"#/$defs/{name}")
        parameters = {"$ref": f"#/$defs/{name}"}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] | None = tool["function"].get("parameters")
    return _NO_PARAMETERS if parameters is None else {"type": "object"} | parameters


def _json_schema(schema: dict[str, Any]) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=orjson.dumps(schema).decode())


def _has_references(value: object) -> bool:
    if isinstance(value, dict):
        return "$ref" in value or any(map(_has_references, value.values()))
    return isinstance(value, list) and any(map(_has_references, value))


def _moved(value: object, *, to: str) -> Any:  # noqa: ANN401 (a part of a schema has any type)
    """A copy of a schema for another place: references into it lead there."""
    if isinstance(value, list):
        return [_moved(item, to=to) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(item, to=to) for key, item in value.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def _read_tool(
    tool: object, of: type[msgspec.Struct], *, kinds: tuple[str, ...], param: str
) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong_type(param, want="an object", got=tool)
    check_nesting(tool, param=param)
    read = _without_nulls(tool)
    if isinstance(kind := read.get("type"), str) and kind not in kinds:
        raise InvalidRequest(
            f"'{param}.type': only tools of type '{kinds[0]}' are supported.",
            param=f"{param}.type",
            code="unsupported_value",
        )
    _convert(read, of, param=param)
    function, where = read, param
    if "function" in read:
        function, where = read["function"], f"{param}.function"
    for name in ("parameters", "input_schema"):
        check_parameters(function.get(name), param=f"{where}.{name}")
    return read


def _without_nulls(tool: dict[str, Any]) -> dict[str, Any]:
    read = {name: value for name, value in tool.items() if value is not None}
    if isinstance(function := read.get("function"), dict):
        read["function"] = {name: value for name, value in function.items() if value is not None}
    return read


def _convert(value: dict[str, Any], into: type[msgspec.Struct], *, param: str) -> msgspec.Struct:
    """Check a part of a body. Raises InvalidRequest naming where in the body it is wrong."""
    try:
        return convert(value, into)
    except InvalidRequest as error:
        inner = error.param or ""
        place = f"{param}.{inner}" if inner else param
        message = error.message.replace(f"'{inner}'", f"'{place}'", 1)
        raise InvalidRequest(message, param=place, code=error.code) from None


def _read_choice(value: object) -> tuple[ToolChoice, list[str] | None]:
    """The choice, and the names of the only tools that are allowed, if not all are."""
    if value in ("none", "auto", "required"):
        assert isinstance(value, str)
        return convert({"mode": value}, ToolChoice), None
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind == "function":
        named = _convert(value, NamedTool, param="tool_choice")
        assert isinstance(named, NamedTool)
        return ToolChoice(mode="named", name=named.function.name), None
    if isinstance(value, dict) and kind == "allowed_tools":
        try:
            allowed = convert(value, AllowedToolsChoice).allowed_tools
        except InvalidRequest as error:
            raise InvalidRequest(
                f"'tool_choice': {error.message}", param="tool_choice", code=error.code
            ) from None
        return ToolChoice(mode=allowed.mode), [tool.function.name for tool in allowed.tools]
    raise InvalidRequest(
        "'tool_choice' must be 'none', 'auto', 'required', a function by its name, or allowed "
        "tools.",
        param="tool_choice",
        code="invalid_value",
    )
