"""Giving a request its slot of the KV cache, with as much of its prompt as was computed before.

What an ended request computed stays in its slot until another needs the slot, and is then copied
out. A new request begins with the longest beginning it finds: in its own slot, in another's (also
of a request that runs), or among the copies. If one that runs is about to compute more of what it
needs, it waits for that: so a burst of requests with one system prompt computes that once.

A copy is exact to the bit, and so is the answer: it does not depend on what was reused.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastserve.engine.prefixes import (
    PREFIX_TOKENS_MIN,
    PrefixCache,
    as_tokens,
    common_length,
)
from fastserve.engine.schedule import slot_of

if TYPE_CHECKING:
    from fastserve.engine.llama import Context
    from fastserve.engine.prefixes import State, Tokens
    from fastserve.engine.schedule import Request, Schedule

# To wait for less would hold a request up for nothing.
_AWAITED_TOKENS_MIN = 2 * PREFIX_TOKENS_MIN


class Reuse:
    """Places the requests of one schedule in the slots of one context. Only between decodes."""

    def __init__(
        self, context: Context, schedule: Schedule, *, bytes_max: int, place_s_max: float
    ) -> None:
        """`bytes_max`: of copies that are kept, 0: reuse nothing; `place_s_max`: about how long one
        `place` may take."""
        self._context = context
        self._schedule = schedule
        self._cache = PrefixCache(bytes_max=bytes_max) if bytes_max else None
        self._place_s_max = place_s_max
        # What was copied out of slots in this call of `place`, for many may begin with the same.
        self._saved: dict[int, State] = {}
        self.queries = 0
        """Prompt tokens of the requests that were placed for the first time."""
        self.hits = 0
        """Those of them that were there already."""

    def place(self) -> None:
        """Place the requests that have a slot and nothing in it yet, in the order they came."""
        unplaced = [request for request in self._schedule.running.values() if not request.placed]
        if not unplaced:
            return
        began_s = time.monotonic()
        for request in unplaced:
            if not self._awaits(request):
                self._place(request)
            # Whoever is left has its turn in the next step; by now at least one can be computed.
            if time.monotonic() - began_s > self._place_s_max:
                break
        self._saved.clear()

    def vacate(self, slot: int) -> None:
        """Keep a copy of what an ended request left in a slot, which is about to be overwritten."""
        left = self._schedule.left.pop(slot, None)
        if left is None or len(left) < PREFIX_TOKENS_MIN or self._cache is None:
            return
        if not self._cache.covers(left):
            # A decode that was interrupted may have left more there than counts.
            self._context.truncate(slot, length=len(left))
            self._cache.put(left, self._context.save(slot))

    def _place(self, request: Request) -> None:
        slot = slot_of(request)
        wanted = _reusable(request)
        request.num_computed = self._begin(slot, wanted)
        request.placed, request.awaited = True, None
        self._saved.pop(slot, None)
        if request.queue_time_s is None:
            request.queue_time_s = time.monotonic() - request.added_s
            # What a preempted request finds of its own answer is nobody's hit.
            request.cached_tokens = min(request.num_computed, request.num_prompt)
            self.queries += request.num_prompt
            self.hits += request.cached_tokens

    def _begin(self, slot: int, wanted: Tokens) -> int:
        """Fill a slot with the longest known beginning of `wanted`, and return how long that is."""
        length, state, in_place = 0, None, False
        if self._cache is not None:
            length, state, in_place = self._longest(slot, wanted, cache=self._cache)
        if not in_place:
            self.vacate(slot)
        self._schedule.left.pop(slot, None)
        if state is not None and not self._context.restore(slot, state):
            length = 0
        return length if self._context.truncate(slot, length=length) else self._emptied(slot)

    def _longest(
        self, slot: int, wanted: Tokens, *, cache: PrefixCache
    ) -> tuple[int, State | None, bool]:
        """The longest beginning, its state unless the slot has it, and whether it is all of that.

        (0, None, False) if there is none worth it.
        """
        left = self._schedule.left.get(slot, wanted[:0])
        length, state = common_length(left, wanted), None
        kept, in_cache = cache.longest(wanted)
        if kept is not None and in_cache > length:
            length, state = in_cache, kept.state
        other, in_slot = self._longest_in_slots(wanted, but=slot)
        if in_slot > max(length, PREFIX_TOKENS_MIN - 1):
            length, state = in_slot, self._save(other)
        if length < PREFIX_TOKENS_MIN:
            return 0, None, False
        return length, state, state is None and length == len(left)

    def _emptied(self, slot: int) -> int:
        self._context.truncate(slot)
        return 0

    def _longest_in_slots(self, wanted: Tokens, *, but: int) -> tuple[int, int]:
        """The other slot, of an ended or running request, that begins like `wanted` for longest."""
        found = [
            (common_length(left, wanted), slot)
            for slot, left in self._schedule.left.items()
            if slot != but
        ]
        found += [
            (min(common_length(other.prompt, wanted), other.num_computed), slot_of(other))
            for other in self._schedule.running.values()
            if other.placed
        ]
        length, slot = max(found, default=(0, but))
        return slot, length

    def _save(self, slot: int) -> State:
        if (state := self._saved.get(slot)) is None:
            state = self._saved[slot] = self._context.save(slot)
        return state

    def _awaits(self, request: Request) -> bool:
        """Whether a request that runs is about to compute more than is there of this one's prompt.

        Looked up once, and only among those placed before it: so nobody waits in a circle.
        """
        if request.awaited_tokens is None:
            request.awaited, request.awaited_tokens = self._find_awaited(_reusable(request))
        other = request.awaited
        return (
            other is not None
            and other.slot is not None
            and other.num_computed < request.awaited_tokens
        )

    def _find_awaited(self, wanted: Tokens) -> tuple[Request | None, int]:
        if self._cache is None:
            return None, 0
        in_slot = self._longest_in_slots(wanted, but=-1)[1]
        there = max(self._cache.longest(wanted)[1], in_slot)
        awaited, tokens = None, there + _AWAITED_TOKENS_MIN - 1
        for other in self._schedule.running.values():
            length = common_length(other.prompt, wanted) if other.placed else 0
            if length > tokens:
                awaited, tokens = other, length
        return awaited, tokens


def _reusable(request: Request) -> Tokens:
    """All but the last token, which is computed in any case: the answer begins with its logits."""
    return as_tokens(request.token_ids[:-1] if request.reuses else ())
