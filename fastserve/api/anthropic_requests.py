"""What a client of Anthropic's Messages API may ask for, read into a chat request.

A chat is a chat: past this file the two dialects differ in how answers look and in nothing else.
What we cannot do is refused by name, as in OpenAI's dialect (unsupported.py).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fastserve.api.body import (
    INT64_MAX,
    check_nesting,
    convert,
    load_object,
    missing,
    wrong_type,
)
from fastserve.api.messages import MESSAGES_MAX, read_content
from fastserve.api.requests import STOPS_MAX, ChatRequest, Stop
from fastserve.api.unsupported import sort_out
from fastserve.errors import InvalidRequest

# They label or advise. What can be cached is cached, whether or not a client marks it.
ACCEPTED = frozenset({"cache_control", "metadata", "service_tier", "user_profile_id"})

# Field -> the values that ask for nothing (Anthropic API reference, "Create a Message").
HARMLESS: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "prefill": (),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
}

_ROLES = ("user", "assistant")


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens. `messages` are ready for a chat template.

    The system prompt is the first of them; turns in a row of one role are one turn.
    """

    messages: list[dict[str, object]]
    model: str | None = None
    unknown_fields: tuple[str, ...] = ()

    def as_chat(self) -> ChatRequest:
        """The chat whose prompt it is."""
        return ChatRequest(messages=self.messages, model=self.model)


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages. The ranges are the API's; `sim` is for the simulated engine."""

    max_tokens: Annotated[int, Meta(ge=1, le=INT64_MAX)]
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    stop_sequences: Annotated[tuple[Stop, ...], Meta(max_length=STOPS_MAX)] = ()
    sim: dict[str, object] | None = None

    def as_chat(self, *, max_tokens: int | None = None) -> ChatRequest:
        """The chat that it is, with as many tokens as there is room for."""
        return ChatRequest(
            messages=self.messages,
            model=self.model,
            stream=self.stream,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            sim=self.sim,
            unknown_fields=self.unknown_fields,
        )


def parse_messages(body: bytes) -> MessagesRequest:
    """Read a request of POST /v1/messages. Raises InvalidRequest."""
    fields = _read(body, ours=_MESSAGES_FIELDS)
    if "max_tokens" not in fields:
        raise missing("max_tokens")
    if "sim" in fields:
        check_nesting(fields["sim"], param="sim")
    return convert(fields, MessagesRequest)


def parse_count(body: bytes) -> CountRequest:
    """Read a request of POST /v1/messages/count_tokens. Raises InvalidRequest."""
    return convert(_read(body, ours=_COUNT_FIELDS), CountRequest)


def _read(body: bytes, *, ours: frozenset[str]) -> dict[str, Any]:
    fields = load_object(body)
    if fields.get("tool_choice") == {"type": "none"}:
        fields.pop("tools", None)  # the model must not call any, so it need not hear of them
    fields["unknown_fields"] = sort_out(fields, ours=ours, accepted=ACCEPTED, harmless=HARMLESS)
    fields["messages"] = _read_turns(fields.pop("system", None), fields.get("messages"))
    return fields


def _read_turns(system: object, messages: object) -> list[dict[str, object]]:
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
    turns: list[tuple[str, list[str]]] = []
    if system is not None:
        turns.append(("system", [read_content(system, role="system", param="system")]))
    for index, message in enumerate(messages):
        role, content = _read_turn(message, param=f"messages[{index}]")
        if turns and turns[-1][0] == role:
            turns[-1][1].append(content)
        else:
            turns.append((role, [content]))
    if turns[-1][0] == "assistant":
        raise InvalidRequest(
            "The last message must be the user's: to continue an assistant's is not supported.",
            param="messages",
            code="unsupported_value",
        )
    return [{"role": role, "content": "\n".join(contents)} for role, contents in turns]


def _read_turn(message: object, *, param: str) -> tuple[str, str]:
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
    return role, read_content(content, role=role, param=f"{param}.content")


_COUNT_FIELDS = frozenset({*CountRequest.__struct_fields__, "system"}) - {"unknown_fields"}
_MESSAGES_FIELDS = frozenset({*MessagesRequest.__struct_fields__, "system"}) - {"unknown_fields"}
