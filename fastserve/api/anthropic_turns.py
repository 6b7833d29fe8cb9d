"""The turns and tools of Anthropic's Messages API, as a chat template wants them.

A turn is blocks: texts, calls of tools (`tool_use`), their results (`tool_result`) and thoughts.
A template knows one message for the calls of a turn, and one for each result. Texts of one role in
a row are one message.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fastserve.api.body import check_nesting, convert, missing, wrong_type
from fastserve.api.messages import MESSAGES_MAX, read_content
from fastserve.api.tools import LONG_NAME_PATTERN, ToolChoice, check_names, check_tools
from fastserve.errors import InvalidRequest

_ROLES = ("user", "assistant")
_BLOCKS = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "tool_use"}),
}

ToolName = Annotated[str, Meta(pattern=LONG_NAME_PATTERN)]


class MessagesTool(msgspec.Struct, frozen=True):
    """A tool that the client runs. Its `input_schema` is a JSON Schema of an object."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, frozen=True):
    """Whether tools are called: `any` is one of them at least, `tool` is the one of `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


_MODES: dict[str, Literal["none", "auto", "required", "named"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}


def read_tools(fields: dict[str, Any]) -> None:
    """Bring `tools` and `tool_choice` to the form of a chat's. Raises InvalidRequest."""
    given = fields.pop("tools", [])
    tools = [_function(tool) for tool in check_tools(given, MessagesTool, kinds=("custom",))]
    choice = _choice(fields.pop("tool_choice", {"type": "auto"}))
    names = [tool["function"]["name"] for tool in tools]
    check_names(names)
    if not tools and choice.type in ("any", "tool"):
        raise InvalidRequest(
            "'tool_choice' needs 'tools'.", param="tool_choice", code="invalid_value"
        )
    if choice.type == "tool" and choice.name not in names:
        raise InvalidRequest(
            "'tool_choice.name' is none of the tools.", param="tool_choice.name",
            code="invalid_value",
        )  # fmt: skip
    # The model must not call any, so it need not hear of them.
    fields["tools"] = [] if choice.type == "none" else tools
    name = choice.name if choice.type == "tool" else None
    fields["tool_choice"] = ToolChoice(mode=_MODES[choice.type], name=name)
    fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use


def _choice(value: object) -> MessagesToolChoice:
    if not isinstance(value, dict):
        raise wrong_type("tool_choice", want="an object", got=value)
    try:
        present = {name: each for name, each in value.items() if each is not None}
        return convert(present, MessagesToolChoice)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"'tool_choice': {error.message}", param="tool_choice", code=error.code
        ) from None


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def read_turns(system: object, messages: object) -> list[dict[str, object]]:
    """The messages of a chat. The system prompt is the first of them. Raises InvalidRequest."""
    if messages is None:
        raise missing("messages")
    if not isinstance(messages, list):
        raise wrong_type("messages", want="an array", got=messages)
    if not 0 < len(messages) <= MESSAGES_MAX:
        raise InvalidRequest(
            f"'messages' must have 1 to {MESSAGES_MAX} items.",
            param="messages",
            code="invalid_value",
        )
    turns: list[dict[str, object]] = []
    if system is not None:
        content = read_content(system, role="system", param="system")
        turns.append({"role": "system", "content": content})
    for index, message in enumerate(messages):
        for turn in _read_turn(message, param=f"messages[{index}]"):
            _append(turns, turn)
    if turns[-1]["role"] == "assistant":
        raise InvalidRequest(
            "The last message must be the user's: to continue an assistant's is not supported.",
            param="messages",
            code="unsupported_value",
        )
    return turns


def _append(turns: list[dict[str, object]], turn: dict[str, object]) -> None:
    """Add a message, to the last one if both are text of one role."""
    last = turns[-1] if turns else {}
    if last.keys() == turn.keys() == {"role", "content"} and last["role"] == turn["role"]:
        turns[-1] = turn | {"content": f"{last['content']}\n{turn['content']}"}
    else:
        turns.append(turn)


def _read_turn(message: object, *, param: str) -> list[dict[str, object]]:
    if not isinstance(message, dict):
        raise wrong_type(param, want="an object", got=message)
    role = message.get("role")
    if role is None:
        raise missing(f"{param}.role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"'{param}.role' must be 'user' or 'assistant'.",
            param=f"{param}.role",
            code="invalid_value",
        )
    content = message.get("content")
    if content is None:
        raise missing(f"{param}.content")
    where = f"{param}.content"
    blocks = content if isinstance(content, list) else []
    # A type may be anything at all here, so it cannot be looked up.
    kinds = [block.get("type") for block in blocks if isinstance(block, dict)]
    if not any(kind in kinds for kind in ("thinking", "tool_result", "tool_use")):
        return [{"role": role, "content": read_content(content, role=role, param=where)}]
    read = [_block(block, role, param=f"{where}[{i}]") for i, block in enumerate(blocks)]
    return _of_assistant(read) if role == "assistant" else _of_user(read)


def _of_assistant(blocks: list[tuple[str, Any]]) -> list[dict[str, object]]:
    texts = [value for kind, value in blocks if kind == "text"]
    thoughts = [value for kind, value in blocks if kind == "thinking"]
    calls = [value for kind, value in blocks if kind == "tool_use"]
    turn: dict[str, object] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [turn]


def _of_user(blocks: list[tuple[str, Any]]) -> list[dict[str, object]]:
    turns: list[dict[str, object]] = []
    for kind, value in blocks:
        _append(turns, {"role": "user", "content": value} if kind == "text" else value)
    return turns


def _block(block: object, role: str, *, param: str) -> tuple[str, Any]:
    """A block's kind, and what there is of it in a chat."""
    if not isinstance(block, dict):
        raise wrong_type(param, want="an object", got=block)
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in _BLOCKS[role]:
        known = " or ".join(f"'{each}'" for each in sorted(_BLOCKS[role]))
        raise InvalidRequest(
            f"'{param}.type': only blocks of type {known} are supported here.",
            param=f"{param}.type",
            code="unsupported_value",
        )
    match kind:
        case "tool_use":
            return kind, _tool_use(block, param=param)
        case "tool_result":
            return kind, _tool_result(block, param=param)
    return kind, _string(block, kind, param=param)


def _tool_use(block: dict[str, Any], *, param: str) -> dict[str, object]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise wrong_type(f"{param}.input", want="an object", got=arguments)
    check_nesting(arguments, param=f"{param}.input")
    name = _string(block, "name", param=param)
    return {
        "id": _string(block, "id", param=param),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _tool_result(block: dict[str, Any], *, param: str) -> dict[str, object]:
    content = block.get("content")
    text = "" if content is None else read_content(content, role="tool", param=f"{param}.content")
    failed = block.get("is_error")
    if not isinstance(failed, bool | None):
        raise wrong_type(f"{param}.is_error", want="true or false", got=failed)
    # A template has no other place for it.
    text = f"Error: {text}" if failed else text
    return {
        "role": "tool",
        "tool_call_id": _string(block, "tool_use_id", param=param),
        "content": text,
    }


def _string(block: dict[str, Any], name: str, *, param: str) -> str:
    value = block.get(name)
    if value is None:
        raise missing(f"{param}.{name}")
    if not isinstance(value, str):
        raise wrong_type(f"{param}.{name}", want="a string", got=value)
    return value
