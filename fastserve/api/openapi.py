"""The API as an OpenAPI 3.1 document, made of the declarations that validate requests.

A field that the parser reads in more forms than its Struct has (a stop that may be one string) is
declared here in the form in which it is sent; every other one is the Struct's own. A field that is
refused is there with the values that are not. So a body that does not fit its schema is refused by
the server, while one that fits may still be refused for what no schema can say.

Knows nothing of handlers: a test holds the two together.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from fastserve.api import anthropic_requests, response_requests, unsupported
from fastserve.api.anthropic_turns import MessagesTool, MessagesToolChoice
from fastserve.api.embeddings import EmbeddingRequest
from fastserve.api.messages import MESSAGES_MAX
from fastserve.api.operations import OPERATIONS
from fastserve.api.prompts import Count
from fastserve.api.requests import (
    OUR_OWN,
    STOPS_MAX,
    ChatRequest,
    CompletionRequest,
    Stop,
)
from fastserve.api.response_input import NamedResponseTool, ResponseTool
from fastserve.api.structured import OutputFields, Source, StructuredFields
from fastserve.api.tokenizing import DetokenizeRequest, TokenIds, TokenizeRequest
from fastserve.api.tools import AllowedTools, NamedFunction, Tool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastserve.api.operations import Operation

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


class ToolChoiceObject(msgspec.Struct):
    """A function that must be called, or some of the tools that may be."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ResponseToolChoiceObject(msgspec.Struct):
    """A function that must be called, or some of the tools that may be."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedResponseTool] | None = None


class TextBlock(msgspec.Struct, tag="text", tag_field="type"):
    """A text in a turn."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking", tag_field="type"):
    """What an assistant thought before it answered."""

    thinking: str


class ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type"):
    """An assistant's call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag="tool_result", tag_field="type"):
    """What a tool returned, in a user's turn."""

    tool_use_id: str
    content: str | list[TextPart] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct):
    """A turn of a conversation of the Messages API."""

    role: Literal["user", "assistant"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class InputPart(msgspec.Struct):
    """A part of an item's content."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str


class InputItem(msgspec.Struct):
    """An item of a response's input, with the fields that its type needs."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


ChatMessages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
Turns = Annotated[list[Turn], Meta(min_length=1, max_length=MESSAGES_MAX)]
Items = Annotated[list[InputItem], Meta(min_length=1, max_length=MESSAGES_MAX)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=STOPS_MAX)]
Prompts = (
    Annotated[str, Meta(min_length=1)]
    | Annotated[
        list[
            Annotated[str, Meta(min_length=1)] | Count | Annotated[list[Count], Meta(min_length=1)]
        ],
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


def _sent(
    name: str,
    *parsed: type[msgspec.Struct],
    needs: Mapping[str, Any],
    forms: Mapping[str, Any] | None = None,
    leave_out: frozenset[str] = frozenset(),
) -> type[msgspec.Struct]:
    """The declaration of a body as it is sent: the fields of `parsed`, some in other `forms`.

    `needs` are the fields that must be there, in their forms. To the parser, null is absence.
    """
    given: dict[str, Any] = dict(forms or {})
    left_out = {*OUR_OWN, *needs, *given, *leave_out}
    fields: list[Any] = list(needs.items())
    for each in (each for struct in parsed for each in msgspec.structs.fields(struct)):
        if each.encode_name not in left_out:
            fields.append((each.encode_name, each.type | None, _default_of(each)))
    fields += [(name_given, form | None, None) for name_given, form in given.items()]
    return msgspec.defstruct(name, fields, kw_only=True)


def _default_of(info: msgspec.structs.FieldInfo) -> Any:  # noqa: ANN401 (a field's default has any type)
    if info.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=info.default_factory)
    return None if info.default is msgspec.NODEFAULT else info.default


def _names(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(struct))


# What is sent is a text; we have another thing by that name.
_GRAMMAR = {"grammar": Source}
_TOOL_WORDS = Literal["none", "auto", "required"]
_CHAT_TOOLS = {"tools": list[Tool], "tool_choice": _TOOL_WORDS | ToolChoiceObject}
_MESSAGES_TOOLS = {"tools": list[MessagesTool], "tool_choice": MessagesToolChoice}
_RESPONSE_TOOLS = {
    "tools": list[ResponseTool],
    "tool_choice": _TOOL_WORDS | ResponseToolChoiceObject,
}
_NOT_SENT = frozenset({"parallel_tool_calls", "template_kwargs"})
_SYSTEM = str | list[TextPart]
_RESPONSE_ONLY = _names(ChatRequest) - response_requests.SHARED

# Each body by its name, and the values that are fine of fields that are refused otherwise.
_BODIES: dict[type[msgspec.Struct], Mapping[str, tuple[object, ...]]] = {
    _sent(
        "ChatRequest",
        ChatRequest,
        StructuredFields,
        needs={},
        forms={"messages": ChatMessages, "stop": Stops} | _GRAMMAR | _CHAT_TOOLS,
    ): unsupported.HARMLESS,
    _sent(
        "CompletionRequest",
        CompletionRequest,
        StructuredFields,
        needs={"prompt": Prompts},
        forms={"stop": Stops} | _GRAMMAR,
    ): unsupported.HARMLESS,
    _sent(
        "MessagesRequest",
        anthropic_requests.MessagesRequest,
        OutputFields,
        needs={"messages": Turns, "max_tokens": Annotated[int, Meta(ge=1)]},
        forms={"system": _SYSTEM} | _MESSAGES_TOOLS,
        leave_out=_NOT_SENT,
    ): anthropic_requests.HARMLESS,
    _sent(
        "CountTokensRequest",
        anthropic_requests.CountRequest,
        OutputFields,
        needs={"messages": Turns},
        forms={"system": _SYSTEM} | _MESSAGES_TOOLS,
        leave_out=_NOT_SENT,
    ): anthropic_requests.HARMLESS,
    _sent(
        "ResponseRequest",
        response_requests.ResponseFields,
        ChatRequest,
        StructuredFields,
        needs={"input": str | Items},
        forms={"stop": Stops} | _GRAMMAR | _RESPONSE_TOOLS,
        leave_out=_RESPONSE_ONLY - _names(response_requests.ResponseFields) | {"response_format"},
    ): response_requests.HARMLESS,
    _sent("EmbeddingRequest", EmbeddingRequest, needs={"input": Prompts}): unsupported.HARMLESS,
    _sent(
        "TokenizeRequest",
        TokenizeRequest,
        needs={},
        forms={"messages": ChatMessages, "tools": list[Tool]},
    ): unsupported.HARMLESS,
    _sent("DetokenizeRequest", DetokenizeRequest, needs={"tokens": TokenIds}): (
        unsupported.HARMLESS
    ),
}


@functools.cache
def document(version: str) -> bytes:
    """The document, of a server of that version."""
    shapes = [operation.answer for operation in OPERATIONS]
    told, schemas = msgspec.json.schema_components(
        [*shapes, *_BODIES, Error, MessagesError],
        # A value that the parser looks at later, or never: anything.
        schema_hook=lambda _: {"description": "Any value."},
        ref_template=_REF,
    )
    # Null is absence, so it does not do for what must be there.
    schemas["ChatRequest"]["anyOf"] = [_given("messages"), _given("prompt_token_ids")]
    schemas["TokenizeRequest"]["anyOf"] = [
        _given("messages"),
        _given("prompt", kind="string"),
        _given("content", kind="string"),
    ]
    for struct, harmless in _BODIES.items():
        properties = schemas[struct.__name__]["properties"]
        for name in harmless.keys() - properties.keys():
            properties[name] = _only(harmless[name])
    paths: dict[str, dict[str, Any]] = {}
    for operation, answer in zip(OPERATIONS, told, strict=False):
        described = _described(operation, answer)
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "fastserve", "version": version},
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            # Whether a key is needed is the server's setting.
            "security": [{}, {"bearer": []}, {"key": []}],
        }
    )


def _given(name: str, *, kind: str = "array") -> dict[str, Any]:
    """The schema of a body that has this field."""
    return {"required": [name], "properties": {name: {"type": kind}}}


def _only(harmless: tuple[object, ...]) -> dict[str, object]:
    """The schema of a field that must ask for nothing."""
    return {"enum": [None, *harmless], "description": "Not supported with any other value."}


def _described(operation: Operation, answer: dict[str, Any]) -> dict[str, Any]:
    content = {TEXT: {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {JSON: {"schema": answer}}
    responses: dict[str, Any] = {
        "200": {"description": "The answer", "content": content},
        "default": {"description": "Why not", "content": _schema_of(operation.error)},
    }
    if operation.answers_503:
        responses["503"] = {"description": "It is not so", "content": content}
    if operation.streams:
        # This version of OpenAPI has no words for the events that a stream is made of.
        streamed = {"schema": {"description": "Events, the data of each of which is JSON."}}
        responses["200"]["content"] = content | {EVENTS: streamed}
    if operation.links is not None:
        responses["200"]["links"] = _links(*operation.links)
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        sent = _schema_of(operation.body)
        sent[JSON]["example"] = operation.example
        described["requestBody"] = {"required": True, "content": sent}
    parameters = [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    if "{" in operation.path:
        name = _parameter(operation.path)
        schema = {"type": "string", "minLength": 1}
        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})
    if parameters:
        described["parameters"] = parameters
    return described


def _parameter(path: str) -> str:
    return path.partition("{")[2].partition("}")[0]


def _links(parameter: str, where: str) -> dict[str, Any]:
    """What can be asked of every path that has this parameter."""
    return {
        f"{each.method} {each.path}".translate(_NOT_OF_KEYS): {
            "operationRef": f"#/paths/{each.path.replace('/', '~1')}/{each.method.lower()}",
            "parameters": {parameter: where},
        }
        for each in OPERATIONS
        if _parameter(each.path) == parameter
    }


# OpenAPI 3.1, 4.8.7: a key of such a map is of letters, digits, dots, dashes and underscores.
_NOT_OF_KEYS = str.maketrans({" ": "_", "/": ".", "{": "", "}": ""})


def _schema_of(name: str) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": _REF.format(name=name)}}}
