"""The connections of one acceptor, to be drained, counted and ended together.

Knows of a connection only that it can be drained and aborted.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Member(Protocol):
    """A live connection."""

    def drain(self) -> None: ...
    def abort(self) -> None: ...


class Connections:
    """The live connections of one acceptor."""

    def __init__(self) -> None:
        self.draining = False
        self._live: set[Member] = set()
        self._on_empty: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._live)

    def add(self, connection: Member) -> None:
        self._live.add(connection)

    def discard(self, connection: Member) -> None:
        self._live.discard(connection)
        if not self._live and self._on_empty is not None:
            self._on_empty.set()

    def drain(self) -> None:
        """Close idle connections now and the others after their answer, which says so if it can."""
        self.draining = True
        for connection in list(self._live):
            connection.drain()

    async def wait_closed(self, *, timeout_s: float) -> bool:
        """Wait until the last connection has closed; False if `timeout_s` passed before that."""
        if not self._live:
            return True
        self._on_empty = asyncio.Event()
        try:
            await asyncio.wait_for(self._on_empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> None:
        """Close every connection now, whatever is still unsent."""
        for connection in list(self._live):
            connection.abort()
