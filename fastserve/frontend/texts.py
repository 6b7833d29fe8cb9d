"""What needs the tokenizer and no engine: tokenize, detokenize, and count the tokens of a chat.

From a body's bytes to the body of the answer: pure, and safe to run in any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fastserve.api.anthropic_answers import token_count
from fastserve.api.anthropic_requests import parse_count
from fastserve.api.response_objects import input_token_count
from fastserve.api.response_requests import parse_response
from fastserve.api.tokenizing import detokenized, parse_detokenize, parse_tokenize, tokenized
from fastserve.frontend.prepare import check_model, earlier

if TYPE_CHECKING:
    from fastserve.api.tokenizing import ToTokenize
    from fastserve.frontend.model import Model
    from fastserve.frontend.response_store import ResponseStore


class TextAnswer(NamedTuple):
    """The body of an answer, and the fields of its request that nobody knows."""

    body: bytes
    unknown_fields: tuple[str, ...]


def tokenize(body: bytes, model: Model) -> TextAnswer:
    """Answer POST /tokenize. Raises RequestError."""
    request = parse_tokenize(body)
    check_model(request.model, model)
    token_ids = _token_ids(request, model)
    raw = [model.tokenizer.token_bytes[token_id] for token_id in token_ids]
    answer = tokenized(
        token_ids,
        max_seq_len=model.card.max_seq_len,
        strings=raw if request.strings else None,
        pieces=raw if request.pieces else None,
    )
    return TextAnswer(answer, request.unknown_fields)


def detokenize(body: bytes, model: Model) -> TextAnswer:
    """Answer POST /detokenize. Raises RequestError."""
    request, unknown_fields = parse_detokenize(body, vocab_size=model.card.vocab_size)
    check_model(request.model, model)
    text = model.tokenizer.decode(request.tokens, skip_special_tokens=request.skip_special_tokens)
    return TextAnswer(detokenized(text), unknown_fields)


def count_tokens(body: bytes, model: Model) -> TextAnswer:
    """Answer POST /v1/messages/count_tokens. Raises RequestError."""
    request = parse_count(body)
    check_model(request.model, model)
    token_ids = model.chat_prompt(request.as_chat())
    return TextAnswer(token_count(len(token_ids)), request.unknown_fields)


def count_response_tokens(body: bytes, model: Model, *, store: ResponseStore | None) -> TextAnswer:
    """Answer POST /v1/responses/input_tokens. Raises RequestError."""
    asked = parse_response(body)
    check_model(asked.shared.get("model"), model)
    request = asked.as_chat(earlier(asked.fields.previous_response_id, store))
    token_ids = model.chat_prompt(request)
    return TextAnswer(input_token_count(len(token_ids)), asked.unknown_fields)


def _token_ids(request: ToTokenize, model: Model) -> list[int]:
    if request.chat is not None:
        return model.chat_prompt(request.chat)
    if request.parse_special:
        return model.completion_prompt(request.text, special=request.special)
    guarded = model.tokenizer.guard(request.text)
    return model.completion_prompt(guarded, special=request.special)
