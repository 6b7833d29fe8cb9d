"""One timer for a connection that has many deadlines, one after the other.

Moving a timer costs more than parsing a header field, and nearly every deadline is replaced long
before it is due. So only one that comes closer moves the timer; one that recedes is noticed when
the timer fires, and the timer is then set again.

Knows the clock as far as Clock says, and nothing of what the deadlines are for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Handle(Protocol):
    """A call that is to come."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """What is used of an event loop."""

    def time(self) -> float: ...
    def call_at(self, when: float, callback: Callable[[], None], /) -> Handle: ...
    def call_later(self, delay: float, callback: Callable[[], None], /) -> Handle: ...


class Deadline:
    """Calls `on_due` once the last timeout set has passed."""

    __slots__ = ("_clock", "_due_s", "_on_due", "_timer", "_timer_at_s")

    def __init__(self, clock: Clock, on_due: Callable[[], None]) -> None:
        self._clock = clock
        self._on_due = on_due
        self._due_s = math.inf
        self._timer: Handle | None = None
        self._timer_at_s = math.inf

    def set(self, timeout_s: float) -> None:
        """Be due in `timeout_s`, and no longer at the time set before."""
        self._due_s = self._clock.time() + timeout_s
        if self._due_s < self._timer_at_s:
            self._start_timer()

    def clear(self) -> None:
        """Be due never, until set again."""
        self._due_s = math.inf

    def cancel(self) -> None:
        """Give the timer up, for good."""
        self._due_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = self._due_s
        self._timer = self._clock.call_at(self._due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_at_s = math.inf
        # Loops round to milliseconds.
        if self._due_s - self._clock.time() < 0.001:
            self._due_s = math.inf
            self._on_due()
        elif self._due_s < math.inf:
            self._start_timer()
