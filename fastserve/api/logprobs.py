"""Log probabilities in OpenAI's two dialects: objects with bytes for chat, columns for completions.

A token need not be whole characters. Its `raw` bytes are always true. Where they are no UTF-8, its
text is an escape like `bytes:\\xf0\\x9f`, as in OpenAI's completions: never empty, and never
U+FFFD, which would make different tokens look the same.

Knows nothing of token ids: whoever calls has looked up the texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastserve.generation import LOGPROB_MIN

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """One token of an answer. `top`: (token, raw, logprob) of the likeliest ones, best first.

    `token` is its text, `raw` its bytes: what it adds to the answer, unless it is `hidden`.
    Logprobs may be infinite or NaN; they are clamped when they are rendered. Only the first token
    of a prompt has none.
    """

    token: str
    raw: bytes
    logprob: float | None
    top: tuple[tuple[str, bytes, float], ...] = ()
    hidden: bool = False

    @property
    def num_characters(self) -> int:
        """How many characters of the answer begin in it."""
        return 0 if self.hidden else count_characters(self.raw)


def token_string(raw: bytes) -> str:
    """How to show a token of these bytes as text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + raw.decode(errors="backslashreplace")


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, object]:
    """The `logprobs` of a chat choice: one object per token."""
    return {
        "content": [
            {
                "token": token.token or token_string(token.raw),
                "logprob": _finite_or_none(token.logprob),
                "bytes": list(token.raw),
                "top_logprobs": [_chat_top(*top) for top in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: Sequence[TokenText], *, text_offset: int) -> dict[str, object]:
    """The `logprobs` of a completion choice: a column per kind of fact.

    `text_offset`: the characters of the answer before these tokens. The chosen token is among the
    `top_logprobs` even when it is not one of the likeliest.
    """
    offsets = []
    for token in tokens:
        # Of a token that begins inside a character, that character's.
        inside = not token.hidden and _continues(token.raw)
        offsets.append(max(text_offset - inside, 0))
        text_offset += token.num_characters
    return {
        "text_offset": offsets,
        "token_logprobs": [_finite_or_none(token.logprob) for token in tokens],
        "tokens": [token.token or token_string(token.raw) for token in tokens],
        "top_logprobs": [_completion_top(token) for token in tokens],
    }


def count_characters(raw: bytes) -> int:
    """How many characters begin in these bytes of UTF-8 (RFC 3629): all bytes but 10xxxxxx."""
    return len(raw) - sum(byte & 0xC0 == 0x80 for byte in raw)


def finite(logprob: float) -> float:
    """A logprob that JSON can carry; orjson would turn NaN and the infinities into null."""
    return logprob if LOGPROB_MIN <= logprob < math.inf else LOGPROB_MIN


def _finite_or_none(logprob: float | None) -> float | None:
    return None if logprob is None else finite(logprob)


def _continues(raw: bytes) -> bool:
    """Whether the bytes begin inside a character."""
    return raw[:1] != b"" and raw[0] & 0xC0 == 0x80


def _chat_top(token: str, raw: bytes, logprob: float) -> dict[str, object]:
    return {
        "token": token or token_string(raw),
        "logprob": finite(logprob),
        "bytes": list(raw),
    }


def _completion_top(token: TokenText) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    ranked = [*token.top, (token.token, token.raw, token.logprob)]
    shown: dict[str, float] = {}
    for text, raw, logprob in ranked:
        # Different ids may have the same text; the likelier comes first and keeps it.
        shown.setdefault(text or token_string(raw), finite(logprob))
    return shown
