"""The API as an OpenAPI 3.1 document, made of the declarations that validate requests.

A field that the parser reads in more forms than its Struct has (a stop that may be one string) is
declared here in the form in which it is sent; every other one is the Struct's own. A field that is
refused is there with the values that are not. So a body that does not fit its schema is refused by
the server, while one that fits may still be refused for what no schema can say.

Knows nothing of handlers: a test holds the two together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from fastserve.api import anthropic_requests, response_requests, unsupported
from fastserve.api.messages import MESSAGES_MAX
from fastserve.api.requests import (
    PROMPTS_MAX,
    STOPS_MAX,
    ChatRequest,
    CompletionRequest,
    Count,
    Stop,
)
from fastserve.api.tokenizing import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"

_REF = "#/components/schemas/{name}"

# ---- what is sent in other forms than the parsed ones


class TextPart(msgspec.Struct):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct):
    """A turn of a chat. Whatever else it has goes to the model's template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Turn(msgspec.Struct):
    """A turn of a conversation of the Messages API."""

    role: Literal["user", "assistant"]
    content: str | list[TextPart]


class InputPart(msgspec.Struct):
    """A part of an item's content."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputItem(msgspec.Struct):
    """An item of a response's input: a message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    type: Literal["message"] = "message"


ChatMessages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
Turns = Annotated[list[Turn], Meta(min_length=1, max_length=MESSAGES_MAX)]
Items = Annotated[list[InputItem], Meta(min_length=1, max_length=MESSAGES_MAX)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=STOPS_MAX)]
Prompts = (
    Annotated[str, Meta(min_length=1)]
    | Annotated[
        list[Annotated[str, Meta(min_length=1)] | Count | Annotated[list[Count], Meta(min_length=1)]],
        Meta(min_length=1),
    ]
)


class ErrorObject(msgspec.Struct):
    """What went wrong. `param` is the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """OpenAI's form of an error."""

    error: ErrorObject


class MessagesErrorObject(msgspec.Struct):
    """What went wrong, in the words of the Messages API."""

    type: str
    message: str
    details: dict[str, str] = msgspec.field(default_factory=dict)


class MessagesError(msgspec.Struct):
    """Anthropic's form of an error."""

    type: Literal["error"]
    error: MessagesErrorObject


def _sent(name: str, *parsed: type[msgspec.Struct], only: frozenset[str] | None = None, **forms: Any) -> Any:  # noqa: ANN401 (a type form)
    """The declaration of a body as it is sent: the fields of `parsed`, some in other `forms`."""
    fields: list[Any] = []
    for struct in parsed:
        for field in msgspec.structs.fields(struct):
            known = only is None or struct is not ChatRequest or field.encode_name in only
            if field.name == "unknown_fields" or not known or field.encode_name in forms:
                continue
            fields.append((field.encode_name, field.type, _default_of(field)))
    fields += [(field, form, ...) if isinstance(form, _Needed) else (field, form, None) for field, form in forms.items()]
    return fields
