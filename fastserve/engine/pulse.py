"""What the heartbeats of several ranks amount to: one heartbeat, as if they were one engine.

Whoever watches the engine takes it for stalled if it has work and its steps stand still. So the
steps of all move on only once every rank has moved: has finished a step, or had nothing to do. One
wedged rank stops the count for all, however busy the others are. One that says nothing at all is
stopped or stuck, and is told apart by its silence.

Pure: time is passed in. Knows nothing of how heartbeats come.
"""

from __future__ import annotations

import dataclasses
import statistics

from fastserve.lane.messages import Heartbeat

# Until it has its model a rank may be busy with what says nothing: imports, above all.
STARTING_SILENT_TIMEOUT_S = 60.0

# Rank 0 looks at least once a second. A look that comes so much later: it was stopped itself,
# perhaps together with all the others.
_STOPPED_S_MIN = 3.0


class Pulse:
    """Hears the ranks from 1 to `num_ranks` - 1; rank 0 is whoever asks."""

    def __init__(self, num_ranks: int, *, silent_timeout_s: float, now_s: float) -> None:
        """A rank that says nothing for `silent_timeout_s` counts as silent; one that is starting
        has STARTING_SILENT_TIMEOUT_S, if that is more."""
        nothing = Heartbeat(ready=False, num_running=0, num_waiting=0, steps=0)
        self._last = [nothing] * num_ranks
        self._heard_s = [now_s] * num_ranks
        self._silent_timeout_s = silent_timeout_s
        self._looked_s = now_s
        # What each rank had done when all had last moved, and who has moved since.
        self._steps_then = [0] * num_ranks
        self._moved: set[int] = set()
        self._steps = 0

    @property
    def ready(self) -> bool:
        """Whether every rank but this has its model."""
        return all(heartbeat.ready for heartbeat in self._last[1:])

    def hear(self, rank: int, heartbeat: Heartbeat, *, now_s: float) -> None:
        """Take a rank's heartbeat."""
        self._last[rank] = heartbeat
        self._heard_s[rank] = now_s
        idle = heartbeat.num_running + heartbeat.num_waiting == 0
        if idle or heartbeat.steps != self._steps_then[rank]:
            self._moved.add(rank)

    def silent(self, *, now_s: float) -> list[int]:
        """The ranks that have said nothing for too long, while we were there to hear it."""
        if now_s - self._looked_s > _STOPPED_S_MIN:
            self._heard_s = [now_s] * len(self._heard_s)
        self._looked_s = now_s
        return [
            rank
            for rank, heard_s in enumerate(self._heard_s)
            if rank and now_s - heard_s > self._timeout_s(rank)
        ]

    def _timeout_s(self, rank: int) -> float:
        if self._last[rank].ready:
            return self._silent_timeout_s
        return max(self._silent_timeout_s, STARTING_SILENT_TIMEOUT_S)

    def combined(self, own: Heartbeat, *, now_s: float) -> Heartbeat:
        """The engine's heartbeat, of which `own` is rank 0's part."""
        self.hear(0, own, now_s=now_s)
        if len(self._moved) == len(self._last):
            self._moved.clear()
            self._steps_then = [heartbeat.steps for heartbeat in self._last]
            self._steps = sum(self._steps_then)
        return dataclasses.replace(
            own,
            ready=all(each.ready for each in self._last),
            num_running=sum(each.num_running for each in self._last),
            num_waiting=sum(each.num_waiting for each in self._last),
            steps=self._steps,
            prefix_cache_queries=sum(each.prefix_cache_queries for each in self._last),
            prefix_cache_hits=sum(each.prefix_cache_hits for each in self._last),
            # All ranks have as much of it.
            kv_cache_usage=statistics.fmean(each.kv_cache_usage for each in self._last),
        )
