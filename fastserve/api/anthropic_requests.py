"""What a client of Anthropic's Messages API may ask for, read into a chat request.

A chat is a chat: past this file the two dialects differ in how answers look and in nothing else.
What we cannot do is refused by name, as in OpenAI's dialect (unsupported.py).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fastserve.api.anthropic_turns import read_tools, read_turns
from fastserve.api.body import (
    INT64_MAX,
    check_nesting,
    convert,
    load_object,
    missing,
)
from fastserve.api.requests import OUR_OWN, STOPS_MAX, ChatRequest, Stop
from fastserve.api.structured import OUTPUT_FIELDS, read_output
from fastserve.api.tools import ToolChoice
from fastserve.api.unsupported import sort_out
from fastserve.generation import Grammar  # noqa: TC001 (the Struct needs it)

# They label or advise. What can be cached is cached, whether or not a client marks it.
ACCEPTED = frozenset({"cache_control", "metadata", "service_tier", "user_profile_id"})

# Field -> the values that ask for nothing (Anthropic API reference, "Create a Message").
HARMLESS: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "prefill": (),
    "speed": ("standard",),
    # Where the client leaves it to the model, or wants none; how much, no template can be told.
    "thinking": ({"type": "adaptive"}, {"type": "disabled"}),
}


# What templates look at: Qwen's and GLM's, and DeepSeek's and Granite's.
_NO_THINKING = {"enable_thinking": False, "thinking": False}


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens. `messages` are ready for a chat template.

    The system prompt is the first of them; turns in a row of one role are one turn. `tools` are
    those that may be called, in a chat's form.
    """

    messages: list[dict[str, object]]
    model: str | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    template_kwargs: dict[str, object] = msgspec.field(default_factory=dict)
    grammar: Grammar | None = None
    unknown_fields: tuple[str, ...] = ()

    def as_chat(self) -> ChatRequest:
        """The chat whose prompt it is."""
        return ChatRequest(
            messages=self.messages,
            model=self.model,
            tools=self.tools,
            template_kwargs=self.template_kwargs,
        )


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
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            template_kwargs=self.template_kwargs,
            grammar=self.grammar,
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
    fields["unknown_fields"] = sort_out(fields, ours=ours, accepted=ACCEPTED, harmless=HARMLESS)
    fields["grammar"] = read_output(fields)
    fields["messages"] = read_turns(fields.pop("system", None), fields.get("messages"))
    read_tools(fields)
    disabled = fields.get("thinking") == {"type": "disabled"}
    fields["template_kwargs"] = _NO_THINKING if disabled else {}
    return fields


_MORE = OUTPUT_FIELDS | {"system"}
_NOT_SENT = OUR_OWN | {"parallel_tool_calls", "template_kwargs"}
_COUNT_FIELDS = frozenset(CountRequest.__struct_fields__) - _NOT_SENT | _MORE
_MESSAGES_FIELDS = frozenset(MessagesRequest.__struct_fields__) - _NOT_SENT | _MORE
