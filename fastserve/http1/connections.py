"""The connections of one acceptor: how many there may be, and what their bodies may hold.

The cap is hard: it also counts those that never send a request. One more is told so at once and
reads its answer in a place of its own; where those are all taken, too, it is closed right away.

A head is small and a body need not be: those that are on their way are bounded all together.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.http1.connection import Connection


class Connections:
    """`len()` is the number of those admitted. Those refused are kept apart, and not for long."""

    def __init__(
        self,
        *,
        admitted_max: int = 16_384,
        refused_max: int = 128,
        bodies_bytes_max: int = 1 << 30,
    ) -> None:
        self.draining = False
        self._bodies_bytes = 0
        self._bodies_bytes_max = bodies_bytes_max
        self._admitted_max = admitted_max
        self._refused_max = refused_max
        self._admitted: set[Connection] = set()
        self._refused: set[Connection] = set()
        self._on_empty: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._admitted)

    def admit(self, connection: Connection) -> bool:
        """Take a new connection in; False if it must be told that there are too many."""
        admitted = len(self._admitted) < self._admitted_max
        (self._admitted if admitted else self._refused).add(connection)
        return admitted

    @property
    def may_linger(self) -> bool:
        """Whether the last one refused may stay until it has read why."""
        return len(self._refused) <= self._refused_max

    def discard(self, connection: Connection) -> None:
        self._admitted.discard(connection)
        self._refused.discard(connection)
        if not self._admitted and not self._refused and self._on_empty is not None:
            self._on_empty.set()

    def hold(self, change_bytes: int) -> bool:
        """Note that bodies on their way have grown, or shrunk; False if they hold too much now."""
        self._bodies_bytes += change_bytes
        return self._bodies_bytes <= self._bodies_bytes_max

    def drain(self) -> None:
        """Close idle connections now and the others after their answer, which says so if it can."""
        self.draining = True
        for connection in list(self._admitted):
            connection.drain()

    async def wait_closed(self, *, timeout_s: float) -> bool:
        """Wait until the last connection has closed; False if `timeout_s` passed before that."""
        if not self._admitted and not self._refused:
            return True
        self._on_empty = asyncio.Event()
        try:
            await asyncio.wait_for(self._on_empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> None:
        """Close every connection now, whatever is still unsent."""
        for connection in [*self._admitted, *self._refused]:
            connection.abort()
