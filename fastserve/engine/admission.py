"""Whether the engine takes more requests: decided where all acceptors meet, so exact under races.

What queues is what no place in the running batch is free for: a burst that an idle engine can run
at once is no queue. The requests of one exchange are taken together or not at all. A refusal says
when to come again, from how fast requests have been ending.

Pure. Knows nothing of lanes, clocks or adapters.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from fastserve.generation import Refusal, RefusalReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# openai's and anthropic's clients heed a Retry-After of up to a minute.
_RETRY_AFTER_S_MAX = 60
# Where nothing has ended lately there is nothing to reckon from.
_RETRY_AFTER_UNKNOWN_S = 5
# Over how many looks, one a heartbeat, the rate of endings is taken.
_LOOKS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The requests that no place in the running batch is free for, and their prompts' tokens.

    `num_places`: how many requests more would find one; 0 if any queues.
    """

    num_places: int
    num_requests: int = 0
    num_tokens: int = 0


def queue_of(
    prompt_lengths: Iterable[int], *, num_waiting: int, num_tokens: int, num_free: int
) -> Queue:
    """The queue of an adapter that takes its waiting requests first come, first served.

    `prompt_lengths` are theirs, in that order; `num_tokens` their sum. `num_free`: places in the
    running batch that nobody has.
    """
    if num_waiting <= num_free:
        return Queue(num_places=num_free - num_waiting)
    placed = sum(islice(prompt_lengths, num_free)) if num_free > 0 else 0
    return Queue(
        num_places=0,
        num_requests=num_waiting - max(num_free, 0),
        num_tokens=num_tokens - placed,
    )


class Admission:
    """The two limits, 0 for none, and the rate at which requests end."""

    def __init__(self, *, max_queued_requests: int, max_queued_tokens: int) -> None:
        self._requests_max = max_queued_requests
        self._tokens_max = max_queued_tokens
        self._num_ended = 0
        self._looks: deque[tuple[float, int]] = deque(maxlen=_LOOKS)

    @property
    def limited(self) -> bool:
        """Whether anything can be refused."""
        return bool(self._requests_max or self._tokens_max)

    def ended(self, number: int) -> None:
        """Count requests that ended, however they did."""
        self._num_ended += number

    def look(self, now_s: float) -> None:
        """Note how many have ended by now."""
        self._looks.append((now_s, self._num_ended))

    def refusal(
        self, prompt_lengths: Sequence[int], *, queue: Queue, now_s: float
    ) -> Refusal | None:
        """Say why requests with these prompts cannot all be taken; None: they can."""
        queued = prompt_lengths[queue.num_places :]
        if not queued:
            return None
        num_requests = queue.num_requests + len(queued)
        if self._requests_max and num_requests > self._requests_max:
            reason = RefusalReason.QUEUED_REQUESTS
        elif self._tokens_max and queue.num_tokens + sum(queued) > self._tokens_max:
            reason = RefusalReason.QUEUED_TOKENS
        else:
            return None
        return Refusal(reason=reason, retry_after_s=self._retry_after_s(num_requests, now_s=now_s))

    def words(self, reason: RefusalReason, *, queue: Queue) -> str:
        """What is told of a refusal."""
        if reason is RefusalReason.QUEUED_TOKENS:
            return (
                f"{queue.num_requests} requests of {queue.num_tokens} prompt tokens are queued, "
                f"and at most {self._tokens_max} tokens may be"
            )
        return f"{queue.num_requests} of at most {self._requests_max} requests are queued"

    def _retry_after_s(self, num_requests: int, *, now_s: float) -> int:
        """How long the queue as it is takes to become the running batch."""
        since_s, before = self._looks[0] if self._looks else (now_s, self._num_ended)
        num_ended = self._num_ended - before
        if not num_ended or now_s <= since_s:
            return _RETRY_AFTER_UNKNOWN_S
        return min(
            max(math.ceil(num_requests * (now_s - since_s) / num_ended), 1), _RETRY_AFTER_S_MAX
        )
