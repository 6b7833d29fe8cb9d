"""The choices in flight, and what one step of the engine brings them: the hot path's one loop.

Nearly all that comes is one more token for a stream that has begun. Its chunk is made here, of
bytes that are ready, and no call into the choice. All chunks of a step are made before the first
is written: the interpreter and the kernel would push each other out of the processor's caches
otherwise, and each write would wake a client that has just gone to sleep.

Whatever else comes (a first token, a last one, half a character, logprobs, a client that does not
read) is the choice's own business: streams.py, whole.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from fastserve.errors import FastserveError
from fastserve.http1.exchange import CHUNK_HEADS
from fastserve.log import get_logger
from fastserve.metrics.catalog import GENERATION_TOKENS, LANE_DROPS

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from fastserve.frontend.observing import Observer
    from fastserve.frontend.streams import Answer
    from fastserve.generation import Finish, RequestId, TokenLogprob
    from fastserve.lane.messages import Outputs
    from fastserve.text.reasoning import ThoughtTokens

log = get_logger("frontend")

NO_PIECES: dict[int, bytes] = {}


class Choice(ABC):
    """One request of the engine: what everybody knows of it.

    `last_s`: when its last delta came; `wrote_s`: when it last wrote (monotonic; 0: never).
    `thoughts` counts those of its tokens that are thoughts, where these are told apart.
    `pieces`: the tokens whose chunks are made here: `frame_head`, the piece and `frame_tail`, which
    are `frame_bytes` without the piece, to `write_chunk`. It has none while that is not so.
    """

    __slots__ = (
        "answer",
        "finish_reason",
        "frame_bytes",
        "frame_head",
        "frame_tail",
        "last_s",
        "num_tokens",
        "open",
        "pieces",
        "request_id",
        "thoughts",
        "write_chunk",
        "wrote_s",
    )

    write_chunk: Callable[[bytes], None]

    def __init__(self, answer: Answer, *, request_id: RequestId, wrote_s: float) -> None:
        self.answer = answer
        self.request_id = request_id
        self.open = True
        self.num_tokens = 0
        self.finish_reason = ""
        self.thoughts: ThoughtTokens | None = None
        self.last_s = 0.0
        self.wrote_s = wrote_s
        self.pieces = NO_PIECES
        self.frame_bytes = 0
        self.frame_head = self.frame_tail = b""

    @abstractmethod
    def push(
        self,
        token_ids: list[int],
        finish: Finish | None,
        logprobs: list[TokenLogprob] | None,
        now_s: float,
    ) -> None:
        """Take one delta."""

    @abstractmethod
    def hear_prompt(self, logprobs: list[TokenLogprob]) -> None:
        """Take the logprobs of the prompt, before any token."""


class InFlight:
    """The choices that the engine works on, by request id."""

    __slots__ = ("_by_id", "_meter", "_observe_gaps")

    def __init__(self, observer: Observer) -> None:
        self._by_id: dict[int, Choice] = {}
        self._meter = observer.meter
        self._observe_gaps = observer.observe_gaps

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, choice: Choice) -> None:
        """Have this choice be told of what comes for it."""
        self._by_id[choice.request_id] = choice

    def forget(self, request_id: RequestId) -> None:
        """Nothing more is to be told of this request."""
        self._by_id.pop(request_id, None)

    def on_outputs(self, outputs: Outputs) -> None:
        """Give every delta to the choice that it belongs to."""
        now_s = time.monotonic()
        if outputs.prompt_logprobs:
            self._hear_prompts(outputs)
        if outputs.counts is None and not outputs.logprobs and not _ends_after_more(outputs):
            late = self._take_tokens(outputs, now_s)
        else:
            late = self._take_deltas(outputs, now_s)
        if late:
            self._meter.count(LANE_DROPS, "late", by=late)

    def _take_tokens(self, outputs: Outputs, now_s: float) -> int:
        """Take one token for each request; return how many were of none that is here.

        Callables are put into locals first: CPython 3.11 calls those of slots the slow way.
        """
        ended = self._take_ends(outputs, now_s) if outputs.finishes else ()
        find, chunk_heads, join = self._by_id.get, CHUNK_HEADS, b"".join
        writing: list[Choice] = []
        chunks: list[bytes] = []
        late = alike = 0
        since_s = 0.0
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            choice = find(request_id)
            if choice is None:
                late += request_id not in ended
                continue
            piece = choice.pieces.get(token_id)
            if piece is None:
                self._push(choice, [token_id], None, None, now_s)
                continue
            choice.num_tokens += 1
            last_s = choice.last_s
            if last_s != since_s:
                # Streams that run side by side have had their last token in the same step.
                if alike:
                    self._observe_gaps(now_s - since_s, alike)
                since_s, alike = last_s, 0
            alike += 1
            choice.last_s = choice.wrote_s = now_s
            size = choice.frame_bytes + len(piece)
            chunks.append(join((chunk_heads[size], choice.frame_head, piece, choice.frame_tail)))
            writing.append(choice)
        if alike:
            self._observe_gaps(now_s - since_s, alike)
        self._meter.count(GENERATION_TOKENS, by=len(chunks))
        for choice, chunk in zip(writing, chunks, strict=True):
            if choice.open:
                write = choice.write_chunk
                write(chunk)
        return late

    def _take_ends(self, outputs: Outputs, now_s: float) -> Container[int]:
        """Take the tokens that are their requests' last; return these requests."""
        ended = set()
        for index, finish in outputs.finishes.items():
            request_id = outputs.request_ids[index]
            choice = self._by_id.pop(request_id, None)
            if choice is not None:
                ended.add(request_id)
                self._push(choice, [outputs.token_ids[index]], finish, None, now_s)
        return ended

    def _take_deltas(self, outputs: Outputs, now_s: float) -> int:
        """Take whatever came for each request; return how many were of none that is here."""
        at = late = 0
        counts = outputs.counts or [1] * len(outputs.request_ids)
        for index, (request_id, count) in enumerate(zip(outputs.request_ids, counts, strict=True)):
            token_ids = outputs.token_ids[at : at + count]
            at += count
            choice = self._by_id.get(request_id)
            if choice is None:  # aborted while this was on its way
                late += 1
                continue
            finish, logprobs = outputs.finishes.get(index), outputs.logprobs.get(index)
            self._push(choice, token_ids, finish, logprobs, now_s)
        return late

    def _push(
        self,
        choice: Choice,
        token_ids: list[int],
        finish: Finish | None,
        logprobs: list[TokenLogprob] | None,
        now_s: float,
    ) -> None:
        # Before an answer ends: whoever has all answers finds all their tokens in the metrics.
        self._meter.count(GENERATION_TOKENS, by=len(token_ids))
        try:
            choice.push(token_ids, finish, logprobs, now_s)
        except Exception:
            log.exception("rendering failed", id=choice.answer.exchange.request_id)
            choice.answer.fail(FastserveError("internal error"))

    def _hear_prompts(self, outputs: Outputs) -> None:
        for index, logprobs in outputs.prompt_logprobs.items():
            choice = self._by_id.get(outputs.request_ids[index])
            if choice is not None:
                choice.hear_prompt(logprobs)


def _ends_after_more(outputs: Outputs) -> bool:
    """Whether a request may end here and have another token before: ends must not go first then.

    So it is where an engine tells of two of its own steps at once.
    """
    request_ids = outputs.request_ids
    return bool(outputs.finishes) and len(set(request_ids)) < len(request_ids)
