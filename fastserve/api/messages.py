"""Chat messages as a template wants them: plain dicts whose content is one string.

The parts of a content list are joined by a newline, as vLLM joins them. Nulls are left out, because
a template asks whether a field "is defined". What a message has beyond role and content goes to
the template as it came, but for the arguments of tool calls: OpenAI carries them as a JSON string,
templates dump them themselves and so need the object.

Knows nothing of templates or tokens.
"""

from __future__ import annotations

from fastserve.api.body import check_nesting, load_value, missing, wrong_type
from fastserve.errors import InvalidRequest

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

_TEXT_KINDS = frozenset({"text"})

# OpenAI's limit is 2048. Templates loop over messages, so the number must end somewhere.
MESSAGES_MAX = 4096


def read_messages(value: object) -> list[dict[str, object]]:
    """The `messages` of a chat request. Raises InvalidRequest naming the message and the field."""
    if value is None:
        raise missing("messages")
    if not isinstance(value, list):
        raise wrong_type("messages", want="an array", got=value)
    if not value:
        raise InvalidRequest("'messages' must not be empty.", param="messages", code="empty_array")
    if len(value) > MESSAGES_MAX:
        raise InvalidRequest(
            f"'messages' must have at most {MESSAGES_MAX} items.",
            param="messages",
            code="array_above_max_length",
        )
    return [_read_message(message, index) for index, message in enumerate(value)]


def _read_message(message: object, index: int) -> dict[str, object]:
    if not isinstance(message, dict):
        raise wrong_type(f"messages[{index}]", want="an object", got=message)
    role = message.get("role")
    if type(role) is not str or role not in ROLES:
        raise _bad_role(role, param=f"messages[{index}].role")
    content = message.get("content")
    if type(content) is str and len(message) == 2:
        return message
    param = f"messages[{index}]"
    read = {name: value for name, value in message.items() if value is not None}
    read["content"] = read_content(content, role=role, param=f"{param}.content")
    if "reasoning" in read:
        # vLLM's newer name for what templates, and DeepSeek, call reasoning_content.
        read.setdefault("reasoning_content", read.pop("reasoning"))
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(read.get(name, ""), str):
            raise wrong_type(f"{param}.{name}", want="a string", got=read[name])
    for name, value in read.items():
        check_nesting(value, param=f"{param}.{name}")
    if "tool_calls" in read:
        read["tool_calls"] = _tool_calls(read["tool_calls"], param=f"{param}.tool_calls")
    return read


def _bad_role(role: object, *, param: str) -> InvalidRequest:
    if role is None:
        return missing(param)
    if not isinstance(role, str):
        return wrong_type(param, want="a string", got=role)
    return InvalidRequest(
        f"'{param}' must be one of {', '.join(sorted(ROLES))}.", param=param, code="invalid_value"
    )


def read_content(
    content: object, *, role: str, param: str, kinds: frozenset[str] = _TEXT_KINDS
) -> str:
    """The one string that a message's content is, whose parts may be of these `kinds`.

    Raises InvalidRequest naming the part.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            _part_text(part, param=f"{param}[{index}]", kinds=kinds)
            for index, part in enumerate(content)
        )
    if content is not None:
        raise wrong_type(param, want="a string or an array of parts", got=content)
    if role != "assistant":
        raise missing(param)
    # An assistant that only called tools has no content. Templates print what they are given, and
    # would print a null as the word None.
    return ""


def _part_text(part: object, *, param: str, kinds: frozenset[str]) -> str:
    if not isinstance(part, dict):
        raise wrong_type(param, want="an object", got=part)
    kind = part.get("type")
    if kind is None:
        raise missing(f"{param}.type")
    if type(kind) is not str or kind not in kinds:
        known = " or ".join(f"'{each}'" for each in sorted(kinds))
        raise InvalidRequest(
            f"'{param}.type': only parts of type {known} are supported.",
            param=f"{param}.type",
            code="unsupported_value",
        )
    text = part.get("text")
    if text is None:
        raise missing(f"{param}.text")
    if not isinstance(text, str):
        raise wrong_type(f"{param}.text", want="a string", got=text)
    return text


def _tool_calls(calls: object, *, param: str) -> list[dict[str, object]]:
    if not isinstance(calls, list):
        raise wrong_type(param, want="an array", got=calls)
    return [_tool_call(call, param=f"{param}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, *, param: str) -> dict[str, object]:
    if not isinstance(call, dict):
        raise wrong_type(param, want="an object", got=call)
    function = call.get("function")
    if function is None:
        raise missing(f"{param}.function")
    if not isinstance(function, dict):
        raise wrong_type(f"{param}.function", want="an object", got=function)
    if not isinstance(function.get("name"), str):
        raise wrong_type(f"{param}.function.name", want="a string", got=function.get("name"))
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    loaded = load_value(arguments)
    if not isinstance(loaded, dict):
        return call  # Some model wrote these; the next one may as well read what it wrote.
    check_nesting(loaded, param=f"{param}.function.arguments")
    return call | {"function": function | {"arguments": loaded}}
