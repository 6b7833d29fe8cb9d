"""What a client of OpenAI's Responses API may ask for, read into a chat request.

What is of this API alone is checked here; the fields that it shares with chats, and the common
extensions, are checked as a chat's. What we cannot do is refused by name (unsupported.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fastserve.api import unsupported
from fastserve.api.body import convert, load_object, missing
from fastserve.api.requests import ChatRequest, parse_chat_fields
from fastserve.api.response_input import chat_tools, read_input
from fastserve.api.structured import (
    FIELDS,
    TextConfig,
    grammar_of_text,
    only_one,
    read_grammar,
)
from fastserve.errors import InvalidRequest
from fastserve.generation import LOGPROBS_MAX, Grammar

# OpenAI's.
METADATA_MAX = 16

# Fields that mean the same in a chat. The first are of the API, the others are extensions.
SHARED = frozenset(
    {
        "model", "stream", "temperature", "top_p",
        "chat_template_kwargs", "frequency_penalty", "ignore_eos", "include_stop_str_in_output",
        "logit_bias", "min_p", "min_tokens", "presence_penalty", "priority", "repetition_penalty",
        "seed", "sim", "skip_special_tokens", "stop", "stop_token_ids", "top_k",
    }
)  # fmt: skip

# What an answer must match: the API's own word for it is `text`, the others are extensions.
STRUCTURED = FIELDS - {"response_format"}

# Field -> the values that ask for nothing (OpenAI API reference, "Create a model response").
HARMLESS: dict[str, tuple[object, ...]] = unsupported.HARMLESS | {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "logprobs": (),
    "max_completion_tokens": (),
    "max_tokens": (),
    "max_tool_calls": (),
    "messages": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "response_format": ({"type": "text"},),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}
HARMLESS.pop("store")

Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
_LOGPROBS = "message.output_text.logprobs"


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How hard to think: only templates know what to do about it, each in its own way.

    There is no summary of thoughts.
    """

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of POST /v1/responses that a chat has not.

    `include` may name what an answer of ours never has; only logprobs are ever there. `store` None:
    as the server likes it, which is to store where it can.
    """

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: tuple[Includable, ...] = ()
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] = 0
    metadata: Annotated[
        dict[
            Annotated[str, Meta(max_length=64)],
            Annotated[str, Meta(max_length=512)],
        ],
        Meta(max_length=METADATA_MAX),
    ] = msgspec.field(default_factory=dict)
    reasoning: Reasoning = msgspec.field(default_factory=Reasoning)
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = msgspec.field(default_factory=TextConfig)


class ResponseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it was asked, and the turns that it adds to its conversation."""

    fields: ResponseFields
    shared: dict[str, Any]
    grammar: Grammar | None
    turns: list[dict[str, object]]
    unknown_fields: tuple[str, ...]

    def as_chat(self, earlier: list[dict[str, object]]) -> ChatRequest:
        """The chat that it is, after the turns of its conversation so far.

        Instructions are of this response alone, and come first. Raises InvalidRequest.
        """
        asked = self.fields
        messages = [*earlier, *self.turns]
        if asked.instructions is not None:
            messages.insert(0, {"role": "system", "content": asked.instructions})
        chat: dict[str, Any] = self.shared | {"messages": messages}
        if asked.max_output_tokens is not None:
            chat["max_completion_tokens"] = asked.max_output_tokens
        if asked.reasoning.effort is not None:
            chat["reasoning_effort"] = asked.reasoning.effort
        if _LOGPROBS in asked.include:
            chat |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
        chat |= chat_tools(asked.tools, asked.tool_choice)
        chat["parallel_tool_calls"] = asked.parallel_tool_calls
        request = parse_chat_fields(chat)
        return msgspec.structs.replace(
            request, grammar=self.grammar, unknown_fields=self.unknown_fields
        )


def parse_response(body: bytes) -> ResponseRequest:
    """Read a request of POST /v1/responses. Raises InvalidRequest."""
    fields = load_object(body)
    unknown = unsupported.sort_out(fields, ours=_OURS, harmless=HARMLESS)
    if "input" not in fields:
        raise missing("input")
    own = convert({name: fields[name] for name in _OWN & fields.keys()}, ResponseFields)
    if own.top_logprobs and _LOGPROBS not in own.include:
        raise InvalidRequest(
            f"'top_logprobs' needs '{_LOGPROBS}' in 'include'.",
            param="top_logprobs",
            code="invalid_value",
        )
    return ResponseRequest(
        fields=own,
        shared={name: fields[name] for name in SHARED & fields.keys()},
        grammar=only_one(
            grammar_of_text(own.text),
            read_grammar({name: fields[name] for name in STRUCTURED & fields.keys()}),
        ),
        turns=read_input(own.input),
        unknown_fields=unknown,
    )


_OWN = frozenset(ResponseFields.__struct_fields__)
_OURS = _OWN | SHARED | STRUCTURED
