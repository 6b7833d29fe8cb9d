"""The input and the tools of the Responses API, as a chat has them.

An input is items: messages, thoughts, calls of functions and what those returned. The items of one
answer are one turn of a chat, as a template wants it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fastserve.api.body import missing, wrong_type
from fastserve.api.messages import MESSAGES_MAX, read_content
from fastserve.api.tools import Function, check_tools
from fastserve.errors import InvalidRequest

_KINDS = frozenset({"input_text", "output_text", "text"})
_ROLES = ("user", "assistant", "system", "developer")


class ResponseTool(Function, frozen=True, kw_only=True):
    """A function that may be called."""

    type: Literal["function"]


class NamedResponseTool(msgspec.Struct, frozen=True):
    """A function by its name."""

    type: Literal["function"]
    name: str


def chat_tools(tools: list[Any], choice: object) -> dict[str, Any]:
    """The fields of a chat for these `tools` and this `tool_choice`. Raises InvalidRequest."""
    read = check_tools(tools, ResponseTool)
    functions = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in read
    ]
    if isinstance(choice, dict) and choice.get("type") == "function":
        if not isinstance(choice.get("name"), str):
            raise wrong_type("tool_choice.name", want="a string", got=choice.get("name"))
        choice = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        named = [_named(tool) for tool in allowed] if isinstance(allowed, list) else allowed
        choice = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": named},
        }
    return {"tools": functions, "tool_choice": choice}


def _named(tool: object) -> object:
    """A tool of `allowed_tools`, as a chat names it."""
    if isinstance(tool, dict) and tool.get("type") == "function":
        return {"type": "function", "function": {"name": tool.get("name")}}
    return tool


def read_input(value: str | list[Any]) -> list[dict[str, object]]:
    """The turns that an input adds to its conversation. Raises InvalidRequest."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not 0 < len(value) <= MESSAGES_MAX:
        raise InvalidRequest(
            f"'input' must have 1 to {MESSAGES_MAX} items.", param="input", code="invalid_value"
        )
    turns: list[dict[str, object]] = []
    for index, item in enumerate(value):
        _add(turns, _read_item(item, param=f"input[{index}]"))
    return turns


def _read_item(item: object, *, param: str) -> dict[str, object]:
    if not isinstance(item, dict):
        raise wrong_type(param, want="an object", got=item)
    match item.get("type"):
        case None | "message":
            return _message(item, param=param)
        case "function_call":
            return {"role": "assistant", "content": "", "tool_calls": [_call(item, param=param)]}
        case "function_call_output":
            return {
                "role": "tool",
                "tool_call_id": _string(item, "call_id", param=param),
                "content": _content(item, "output", role="tool", param=param),
            }
        case "reasoning":
            return {"role": "assistant", "content": "", "reasoning_content": _thoughts(item, param)}
    raise InvalidRequest(
        f"'{param}.type': only items of type 'message', 'function_call', "
        "'function_call_output' and 'reasoning' are supported.",
        param=f"{param}.type",
        code="unsupported_value",
    )


def _message(item: dict[str, Any], *, param: str) -> dict[str, object]:
    role = item.get("role")
    if role is None:
        raise missing(f"{param}.role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"'{param}.role' must be one of {', '.join(_ROLES)}.",
            param=f"{param}.role",
            code="invalid_value",
        )
    return {"role": role, "content": _content(item, "content", role=role, param=param)}


def _content(item: dict[str, Any], name: str, *, role: str, param: str) -> str:
    content = item.get(name)
    if content is None:
        raise missing(f"{param}.{name}")
    return read_content(content, role=role, param=f"{param}.{name}", kinds=_KINDS)


def _call(item: dict[str, Any], *, param: str) -> dict[str, object]:
    function = {name: _string(item, name, param=param) for name in ("name", "arguments")}
    call_id = _string(item, "call_id", param=param)
    return {"id": call_id, "type": "function", "function": function}


def _thoughts(item: dict[str, Any], param: str) -> str:
    """What was thought; a summary stands for it where there is no more."""
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        if item.get(name):
            return read_content(
                item[name], role="assistant", param=f"{param}.{name}", kinds=frozenset({kind})
            )
    return ""


def _add(turns: list[dict[str, object]], turn: dict[str, object]) -> None:
    """Add a turn, to the last one if that is the same answer: thoughts, a text, then calls."""
    last = turns[-1] if turns else {}
    if turn["role"] != "assistant" or last.get("role") != "assistant" or _begins(turn, last):
        turns.append(turn)
        return
    calls = [*_list(last.get("tool_calls")), *_list(turn.get("tool_calls"))]
    turns[-1] = last | turn | {"content": str(last["content"]) + str(turn["content"])}
    if calls:
        turns[-1]["tool_calls"] = calls


def _begins(turn: dict[str, object], last: dict[str, object]) -> bool:
    """Whether an assistant's turn begins another answer than the one before."""
    if "reasoning_content" in turn:
        return True
    return bool(turn["content"]) and (bool(last["content"]) or "tool_calls" in last)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _string(item: dict[str, Any], name: str, *, param: str) -> str:
    value = item.get(name)
    if value is None:
        raise missing(f"{param}.{name}")
    if not isinstance(value, str):
        raise wrong_type(f"{param}.{name}", want="a string", got=value)
    return value
