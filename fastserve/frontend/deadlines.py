"""By when an exchange must be answered, and one timer for all of them.

A client may ask for less time than the server allows, in a header, and never for more. The timer is
set for the earliest deadline: nearly every request ends long before its own, so a timer each would
cost more than all of them are worth. Adding and discarding cost 0.1 microseconds each.

Knows nothing of what is done to a request whose time is up.
"""

from __future__ import annotations

import math
import time
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Protocol

from fastserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.http1.deadline import Handle
    from fastserve.http1.message import RequestHead

# The name says the unit: under the shorter one some send seconds, others milliseconds.
HEADER = "X-Request-Timeout-Ms"
_FIELD = HEADER.lower().encode()
# A day and more; longer numbers need no parsing to be refused.
_DIGITS_MAX = 9

# The fewest milliseconds between two looks: each is at every deadline there is.
_LOOK_INTERVAL_S = 0.01


def asked_timeout_s(head: RequestHead) -> float:
    """How long the client would wait, in seconds; infinite if it does not say.

    Raises InvalidRequest for anything but a whole number of milliseconds above 0.
    """
    value = head.header(_FIELD)
    if value is None:
        return math.inf
    if not value.isdigit() or len(value) > _DIGITS_MAX or int(value) == 0:
        raise InvalidRequest(
            f"{HEADER} must be a whole number of milliseconds, from 1 to {10**_DIGITS_MAX - 1}",
            param=HEADER,
            code="invalid_value",
        )
    return int(value) / 1000


class Expiring(Protocol):
    """Something with a deadline (monotonic); infinite: it has none."""

    @property
    def deadline_s(self) -> float: ...

    def expire(self) -> None:
        """Your time is up; called once, and nothing is to be discarded for it."""


@dataclass(slots=True, eq=False)
class Due:
    """An Expiring that is nothing else."""

    expire: Callable[[], None]
    _: KW_ONLY
    deadline_s: float


class Timers(Protocol):
    """What is used of an event loop."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Handle: ...


class Deadlines:
    """Expires what was added, and not discarded, by its deadline.

    `timeout_s`: how long any request may take; 0: as long as it likes.
    """

    __slots__ = ("_clock", "_items", "_timeout_s", "_timer", "_timer_at_s", "_timers")

    def __init__(
        self,
        timers: Timers,
        *,
        timeout_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s or math.inf
        self._timers = timers
        self._clock = clock
        self._items: set[Expiring] = set()
        self._timer: Handle | None = None
        self._timer_at_s = math.inf

    def allowed_s(self, head: RequestHead) -> float:
        """How long a request may take, in seconds: what its client asks for, or less."""
        return min(asked_timeout_s(head), self._timeout_s)

    def add(self, item: Expiring) -> None:
        """Expire `item` at its deadline, or some 10 ms later."""
        if item.deadline_s == math.inf:
            return
        self._items.add(item)
        if item.deadline_s < self._timer_at_s:
            self._set_timer(item.deadline_s)

    def discard(self, item: Expiring) -> None:
        """Forget `item`, whether or not it was added."""
        self._items.discard(item)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = at_s
        delay_s = max(at_s - self._clock(), _LOOK_INTERVAL_S)
        self._timer = self._timers.call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer, self._timer_at_s = None, math.inf
        now_s = self._clock()
        for item in [item for item in self._items if item.deadline_s <= now_s]:
            # The end of one may be the end of another.
            if item in self._items:
                self._items.discard(item)
                item.expire()
        if self._items:
            next_s = min(item.deadline_s for item in self._items)
            if next_s < self._timer_at_s:
                self._set_timer(next_s)
