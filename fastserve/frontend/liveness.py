"""Whether the engine is there, ready and moving, as its heartbeats tell; time is passed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.lane.messages import Heartbeat


class Liveness:
    """What the frontend knows of the engine's life.

    `heard_s` is when the last heartbeat came (monotonic). `dead` is the reason why the engine is
    gone. An engine is stalled if it has work and has finished no step for `stall_unhealthy_s`, or
    has not been heard of for so long.
    """

    def __init__(self, *, stall_unhealthy_s: float) -> None:
        self.dead: str | None = None
        self.heartbeat: Heartbeat | None = None
        self._stall_unhealthy_s = stall_unhealthy_s
        self.heard_s = 0.0
        self._progress_s = 0.0

    def begin_again(self) -> None:
        """A successor of the dead engine is starting."""
        self.dead = self.heartbeat = None

    @property
    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self.heartbeat is not None and self.heartbeat.ready

    def observe(self, heartbeat: Heartbeat, *, now_s: float) -> None:
        """Take a heartbeat."""
        before, self.heartbeat = self.heartbeat, heartbeat
        self.heard_s = now_s
        busy = heartbeat.num_running + heartbeat.num_waiting > 0
        if before is None or heartbeat.steps != before.steps or not busy:
            self._progress_s = now_s

    def stalled(self, *, now_s: float) -> bool:
        """Whether a ready engine has stopped moving."""
        return self.ready and now_s - self._progress_s > self._stall_unhealthy_s
