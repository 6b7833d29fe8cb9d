"""Texts to tokens and back, as vLLM has it (POST /tokenize and /detokenize) and as llama.cpp does.

A text is `prompt` (vLLM) or `content` (llama.cpp); the two differ in what they take for granted, so
each name brings its own defaults. Answers have the fields of both.

Knows nothing of tokenizers: ids and texts are passed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from fastserve.api.body import convert, load_object, missing
from fastserve.api.logprobs import token_string
from fastserve.api.prompts import Count
from fastserve.api.requests import ChatRequest, parse_chat_fields
from fastserve.api.structured import FIELDS as STRUCTURED_FIELDS
from fastserve.api.unsupported import ACCEPTED, sort_out
from fastserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of one request; a tokenizer makes about four million a second of them.
DETOKENIZED_MAX = 1 << 20

# Fields that shape a chat's prompt, besides the messages.
_OF_CHATS = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template_kwargs",
    "continue_final_message",
    "reasoning_effort",
    "tools",
)


TokenIds = Annotated[list[Count], Meta(max_length=DETOKENIZED_MAX)]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: one of `prompt`, `content` and `messages`.

    `add_special_tokens` (`add_special`): put before the text what the model wants at its beginning.
    `parse_special`: control tokens that are written in the text are control. `return_token_strs`
    and `with_pieces` tell the text of each token, in vLLM's form and in llama.cpp's.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, object]] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool = True
    return_token_strs: bool = False
    with_pieces: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = msgspec.field(default_factory=dict)
    reasoning_effort: str | None = None
    tools: list[Any] = msgspec.field(default_factory=list)


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize. Control tokens are shown unless they are to be skipped."""

    tokens: TokenIds
    model: str | None = None
    skip_special_tokens: bool = False


class ToTokenize(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be tokenized, with every default decided: a `text`, or else a `chat`."""

    model: str | None
    text: str
    chat: ChatRequest | None
    special: bool
    parse_special: bool
    strings: bool
    pieces: bool
    unknown_fields: tuple[str, ...]


def parse_tokenize(body: bytes) -> ToTokenize:
    """Read a request of POST /tokenize. Raises InvalidRequest."""
    fields = load_object(body)
    unknown = sort_out(
        fields, ours=_TOKENIZE_FIELDS, accepted=ACCEPTED | STRUCTURED_FIELDS
    )  # An answer's structure does not change its prompt.
    request = convert(fields, TokenizeRequest)
    given = [name for name in ("prompt", "content", "messages") if name in fields]
    if not given:
        raise missing("prompt")
    if len(given) > 1:
        raise InvalidRequest(
            f"'{given[0]}' and '{given[1]}' exclude each other.",
            param=given[1],
            code="invalid_value",
        )
    [form] = given
    special = request.add_special_tokens if form != "content" else request.add_special
    return ToTokenize(
        model=request.model,
        text=request.prompt or request.content or "",
        chat=_chat_of(fields) if form == "messages" else None,
        # In vLLM, a text is as for a completion; llama.cpp puts nothing before one unasked.
        special=form == "prompt" if special is None else special,
        parse_special=request.parse_special,
        strings=request.return_token_strs,
        pieces=request.with_pieces,
        unknown_fields=unknown,
    )


def parse_detokenize(body: bytes, *, vocab_size: int) -> tuple[DetokenizeRequest, tuple[str, ...]]:
    """Read a request of POST /detokenize, and its unknown fields. Raises InvalidRequest."""
    fields = load_object(body)
    unknown = sort_out(fields, ours=_DETOKENIZE_FIELDS)
    request = convert(fields, DetokenizeRequest)
    if request.tokens and max(request.tokens) >= vocab_size:
        raise InvalidRequest(
            f"'tokens' has a token id that is not below the vocabulary's {vocab_size}.",
            param="tokens",
            code="integer_above_max_value",
        )
    return request, unknown


def tokenized(
    token_ids: Sequence[int],
    *,
    max_seq_len: int,
    strings: Sequence[bytes] | None,
    pieces: Sequence[bytes] | None,
) -> bytes:
    """The answer of POST /tokenize. `strings` and `pieces` are the bytes of each token, if asked.

    A piece that is not text by itself is an array of its bytes (llama.cpp's form).
    """
    tokens: list[Any] = list(token_ids)
    if pieces is not None:
        tokens = [
            {"id": token_id, "piece": _piece(raw)}
            for token_id, raw in zip(token_ids, pieces, strict=True)
        ]
    return orjson.dumps(
        {
            "count": len(tokens),
            "max_model_len": max_seq_len,
            "tokens": tokens,
            "token_strs": None if strings is None else [token_string(raw) for raw in strings],
        }
    )


def detokenized(text: str) -> bytes:
    """The answer of POST /detokenize: vLLM's `prompt` and llama.cpp's `content` are the same."""
    return orjson.dumps({"prompt": text, "content": text})


def _chat_of(fields: dict[str, Any]) -> ChatRequest:
    of_chat = {name: fields[name] for name in _OF_CHATS if name in fields}
    return parse_chat_fields({"messages": fields["messages"]} | of_chat)


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


_TOKENIZE_FIELDS = frozenset(TokenizeRequest.__struct_fields__)
_DETOKENIZE_FIELDS = frozenset(DetokenizeRequest.__struct_fields__)
