"""What a generation is, in tokens: the values that api, frontend, lane and engine all speak of.

Everything here is about token ids and numbers. It knows nothing of HTTP, of text, or of how a
value crosses a process.
"""

from __future__ import annotations

import base64
import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

RequestId = NewType("RequestId", int)
"""One generation: bit 63 clear, 6 bits of lane at shift 57, a 57-bit counter below."""

# OpenAI's own limits are 20 (chat) and 5 (completions); vLLM and llama.cpp accept more.
LOGPROBS_MAX = 20

# JSON has no infinities: what a log of zero becomes on the wire (vLLM's value).
LOGPROB_MIN = -9999.0


class FinishReason(enum.StrEnum):
    """Why a request ended. OpenAI's words, and two for what OpenAI has no word for."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class GrammarKind(enum.StrEnum):
    """In what language a grammar is written. An engine tells which of them it can follow."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the whole text of an answer must match.

    `source`: for JSON_SCHEMA the schema as JSON text, for REGEX an expression that the text must
    match from its first character to its last, for EBNF a grammar that starts at its rule `root`.
    `param`: the field that asked for it, to be named where an engine cannot follow it.
    """

    kind: GrammarKind
    source: str
    param: str = "grammar"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen, and when to stop. Already validated; every field is definite.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and penalties at their defaults are
    off. `logprobs` None: none; 0: the chosen token's; N: also the N most likely tokens'.
    `min_tokens`: EOS and stop ids cannot be chosen before that many tokens. `grammar`: what the
    answer must match, unless `max_tokens` or a stop cuts it short. `prompt_logprobs`: as
    `logprobs`, of each token of the prompt but the first; only with it may `max_tokens` be 0.
    `priority`: of the requests that wait, those with the lowest come first.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    priority: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The logarithm of a chosen token's probability, and the `top` (id, logprob) pairs, best first.

    Of the model's distribution before temperature and penalties, as OpenAI's are.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RefusalReason(enum.StrEnum):
    """Which limit of admission was reached: the name of its metric's label."""

    QUEUED_REQUESTS = "queued_requests"
    QUEUED_TOKENS = "queued_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The engine has no room for a request now, and may have after `retry_after_s` seconds."""

    reason: RefusalReason
    retry_after_s: int


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended. `stop_token_id`: the stop id that ended it (None: EOS or other).

    The id that ended a request is the last of its tokens, and counts as one of them. With ERROR,
    `error` says why, `invalid` whether that was the request's own doing, `param` by which field,
    `refusal` that it never began.
    `cached_tokens`: how many of the prompt's tokens needed no computing, since an earlier request
    had them. `queue_time_s`: how long it waited in the engine before its first step, in seconds.
    `embedding`: what a text became that was to be embedded, as `packed_embedding` made it.
    """

    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None
    invalid: bool = False
    param: str | None = None
    cached_tokens: int = 0
    queue_time_s: float = 0.0
    refusal: Refusal | None = None
    embedding: str | None = None


def packed_embedding(values: Sequence[float]) -> str:
    """32-bit floats, little-endian, in base64: the form that clients ask for."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def embedding_values(packed: str) -> list[float]:
    """The numbers of a packed embedding."""
    raw = base64.b64decode(packed)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


STOPPED = Finish(reason=FinishReason.STOP)
# The ends of an answer; any other is the end of its exchange.
ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a frontend must know of the model to turn text into tokens and back.

    `tokenizer_path` is a `tokenizer.json`. `eos_token_ids`: every id that ends a turn or a text.
    `max_seq_len`: prompt and answer together, in tokens. `add_bos`: whether the tokenizer puts
    `bos_token` before a plain prompt (a chat template writes its own). `grammar_kinds`: which
    grammars the engine can follow. `embedding_size`: how many numbers the model makes of a text;
    one that makes any generates nothing, and one that generates has 0. `add_eos`: whether
    `eos_token` ends a text that is to be embedded.
    """

    name: str
    tokenizer_path: str
    chat_template: str | None
    bos_token: str
    eos_token: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_seq_len: int
    add_bos: bool = False
    grammar_kinds: tuple[GrammarKind, ...] = ()
    embedding_size: int = 0
    add_eos: bool = False
