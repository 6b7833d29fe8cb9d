"""Which tokens of which requests the next step computes: continuous batching, as a plain value.

A request waits until one of the KV cache's slots is free, then runs until it ends: who is next
says waiting.py. Each step gives
every request in decode its one row, and requests in prefill, in the order they came, a share of
the tokens that the step may take; so a long prompt delays the others' tokens by one chunk at most.
"Prefill" is whatever is not computed yet: of a preempted request, prompt and answer.

Knows nothing of the library that computes or of how a token is chosen.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from fastserve.engine.admission import queue_of
from fastserve.engine.prefixes import as_tokens
from fastserve.engine.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.engine.admission import Queue
    from fastserve.engine.guidance import Guide
    from fastserve.engine.prefixes import Tokens
    from fastserve.engine.sampler import Sampler
    from fastserve.generation import RequestId, SamplingParams, TokenLogprob


# Rows of logits in one step for prompts whose logprobs were asked for: each is as wide as the
# vocabulary, and llama.cpp never gives back the memory of the most there were.
PROMPT_LOGPROBS_ROWS_MAX = 32


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request in the engine. `token_ids` is the prompt and, appended to it, the answer.

    `num_computed` of them are in the KV cache, in `slot` (None: it waits); `placed`: the slot holds
    these and nothing else. Until then it may wait for a request that computes as many tokens of
    its prompt: `awaited`, see reuse.py. `queue_time_s` is known once it was placed. `reuses`: not
    where the logits of the whole prompt are wanted, which only computing it gives:
    `prompt_logprobs` are of its tokens from the second on, as far as they are computed. `guide`:
    what leads the sampler through a grammar.
    """

    request_id: RequestId
    token_ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    sampler: Sampler
    added_s: float = 0.0
    reuses: bool = True
    guide: Guide | None = None
    num_computed: int = 0
    slot: int | None = None
    placed: bool = False
    awaited: Request | None = None
    awaited_tokens: int | None = None
    cached_tokens: int = 0
    queue_time_s: float | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: Tokens = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = as_tokens(self.token_ids)

    @property
    def num_answered(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def decodes(self) -> bool:
        """Whether it gets a token in each step, and so notices how long a step takes."""
        return self.num_answered > 0 and self.num_computed == len(self.token_ids) - 1

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the logits of prompt tokens are still needed."""
        if self.sampling.prompt_logprobs is None:
            return False
        return len(self.prompt_logprobs) < self.num_prompt - 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a request, to be computed in this step."""

    request: Request
    count: int

    @property
    def is_last(self) -> bool:
        """Whether nothing is left to compute after it, so that its logits are the next token's."""
        return self.request.num_computed + self.count == len(self.request.token_ids)

    @property
    def num_prompt_rows(self) -> int:
        """How many of its tokens, the first, tell the logprobs of the prompt's next tokens."""
        if not self.request.needs_prompt_logprobs:
            return 0
        return min(self.count, self.request.num_prompt - 1 - self.request.num_computed)


class Schedule:
    """The waiting and the running requests, and the free slots of the KV cache."""

    def __init__(self, *, num_slots: int) -> None:
        self.waiting: WaitingQueue[Request] = WaitingQueue()
        self.running: dict[RequestId, Request] = {}
        self.left: dict[int, Tokens] = {}
        """What requests that went have left computed in slots that nobody was placed in since."""
        # The lowest comes first: llama.cpp computes neighbouring sequences together.
        self._free_slots = list(range(num_slots))
        self._closed = False

    def add(self, request: Request) -> None:
        self.waiting.add(
            request.request_id,
            request,
            priority=request.sampling.priority,
            num_tokens=request.num_prompt,
        )

    def remove(self, request_id: RequestId) -> None:
        """Forget a request, waiting or running; its slot is free at once. An unknown id is none."""
        if self.waiting.remove(request_id) is None:
            request = self.running.pop(request_id, None)
            if request is not None:
                self._release(request)
                self._closed = False

    def preempt(self) -> Request | None:
        """Send the youngest running request back to the head of its queue; None if it is alone.

        No request is admitted before another has ended: it would only be preempted again.
        """
        if len(self.running) <= 1:
            return None
        _, request = self.running.popitem()
        self._release(request)
        self.waiting.put_back(
            request.request_id,
            request,
            priority=request.sampling.priority,
            num_tokens=request.num_prompt,
        )
        self._closed = True
        return request

    def admit(self) -> None:
        """Give the free slots to the requests that wait."""
        while self.waiting and self._free_slots and not self._closed:
            request = self.waiting.pop()
            request.slot = heapq.heappop(self._free_slots)
            self.running[request.request_id] = request

    def queue(self, *, also: Sequence[int] = ()) -> Queue:
        """What waits without a slot that it will have with the next step; `also`: the lengths of
        prompts that will come to wait here."""
        return queue_of(
            chain(self.waiting.lengths(), also),
            num_waiting=len(self.waiting) + len(also),
            num_tokens=self.waiting.num_tokens + sum(also),
            num_free=0 if self._closed else len(self._free_slots),
        )

    def compact(self) -> tuple[int, int] | None:
        """Move the running request in the highest slot to the lowest free one, if that is lower.

        Returns from where to where. Sequences that are no neighbours are computed one after the
        other: with eight on a small model, a step with gaps takes twice the time. A move costs less
        than two such steps, so one a step is made.
        """
        if not self.running or not self._free_slots:
            return None
        request = max(self.running.values(), key=slot_of)
        source, target = slot_of(request), self._free_slots[0]
        if target > source:
            return None
        request.slot = heapq.heapreplace(self._free_slots, source)
        return (source, target) if request.placed else None

    def decoding(self) -> bool:
        """Whether any request waits for its next token in each step."""
        return any(request.decodes for request in self.running.values())

    def plan(self, *, prefill_tokens: int) -> list[Chunk]:
        """Share out the next step among the placed requests, in the order of their slots."""
        chunks = []
        budget = prefill_tokens
        rows_left = PROMPT_LOGPROBS_ROWS_MAX
        for request in self.running.values():
            if not request.placed:
                continue
            count = len(request.token_ids) - request.num_computed
            if count > 1:
                count = min(count, budget)
                if request.needs_prompt_logprobs:
                    count = min(count, rows_left)
                    rows_left -= count
                budget -= count
            if count:
                chunks.append(Chunk(request, count))
        chunks.sort(key=lambda chunk: slot_of(chunk.request))
        return chunks

    def _release(self, request: Request) -> None:
        slot = slot_of(request)
        heapq.heappush(self._free_slots, slot)
        if request.placed:
            self.left[slot] = as_tokens(request.token_ids[: request.num_computed])
        request.slot, request.placed, request.num_computed = None, False, 0


def slot_of(request: Request) -> int:
    """The slot of a request that runs."""
    assert request.slot is not None, f"{request.request_id} waits"
    return request.slot
