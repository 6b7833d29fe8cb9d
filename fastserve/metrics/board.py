"""The board: one block of shared memory in which every process has a row that it alone writes.

It is anonymous memory (memfd) that children inherit, so no file can be left behind, and it is gone
with the last process. A slot is a row of 64-bit words; an aligned word is read and written whole,
so no lock is needed. A respawned acceptor takes over its lane's slot, its metrics (catalog.py),
which stand in a second row, and its last requests (recent.py). The engine and the supervisor have
rows of metrics, too.

Beside it stands one eventfd per acceptor, by which the others can nudge it: there is a connection
for you.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
import weakref
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

from fastserve.metrics.catalog import ROW_WORDS
from fastserve.metrics.recent import RecentRequests, bytes_of

# A row is as long as two cache lines, so that acceptors do not slow each other.
_WORDS = 16
_ROW_BYTES = _WORDS * 8

# The rows of metrics follow those of the slots; they too begin on cache lines of their own.
_NUMBERS = -(-ROW_WORDS // _WORDS) * _WORDS
# Rows of metrics beside the acceptors': the engine's and the supervisor's.
_OTHERS = 2

_CONNECTIONS = 0
_SEEN_NS = 1

# An acceptor writes that it is there every quarter of this; one not seen for so long takes no share
# of new connections.
SEEN_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Everybody's metrics at one moment; acceptors by lane."""

    acceptors: list[list[float]]
    engine: list[float]
    supervisor: list[float]


class Board:
    """The whole block. It crosses to children as a spawn argument and in no other way."""

    def __init__(self, *, memory_fd: int, nudge_fds: list[int], recent_max: int) -> None:
        self._memory_fd = memory_fd
        self._nudge_fds = nudge_fds
        self.recent_max = recent_max
        # Whoever still has a row of it keeps the memory, which needs no descriptor any more.
        weakref.finalize(self, _close_all, [memory_fd, *nudge_fds]).atexit = False
        rows = len(nudge_fds)
        memory = memoryview(mmap.mmap(memory_fd, _bytes_of(rows, recent_max)))
        ends = [rows * _ROW_BYTES, rows * _ROW_BYTES + (rows + _OTHERS) * _NUMBERS * 8]
        self._words = memory[: ends[0]].cast("Q")
        self._numbers = memory[ends[0] : ends[1]].cast("d")
        self._recent = memory[ends[1] :]

    @classmethod
    def make(cls, rows: int, *, recent_max: int = 0) -> Board:
        """Make a board for `rows` acceptors, each with room for `recent_max` requests."""
        memory_fd = os.memfd_create("fastserve-board", os.MFD_CLOEXEC)
        os.ftruncate(memory_fd, _bytes_of(rows, recent_max))
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        nudge_fds = [os.eventfd(0, flags) for _ in range(rows)]
        return cls(memory_fd=memory_fd, nudge_fds=nudge_fds, recent_max=recent_max)

    def __reduce__(self) -> tuple[Any, ...]:
        fds: list[Any] = [DupFd(fd) for fd in (self._memory_fd, *self._nudge_fds)]
        return _restore, (fds, self.recent_max)

    def slot(self, row: int) -> Slot:
        """Return the row of lane `row`, for its one writer."""
        return Slot(self._words[row * _WORDS : (row + 1) * _WORDS])

    def numbers(self, row: int) -> memoryview[float]:
        """Return the metrics of lane `row`, for its one writer."""
        return self._numbers[row * _NUMBERS : row * _NUMBERS + ROW_WORDS]

    def engine_numbers(self) -> memoryview[float]:
        """Return the engine's metrics; the supervisor clears the gauges of a dead one."""
        return self.numbers(len(self._nudge_fds))

    def supervisor_numbers(self) -> memoryview[float]:
        """Return the supervisor's metrics."""
        return self.numbers(len(self._nudge_fds) + 1)

    def all_numbers(self) -> Numbers:
        """Return everybody's metrics."""
        return Numbers(
            acceptors=[list(self.numbers(row)) for row in range(len(self._nudge_fds))],
            engine=list(self.engine_numbers()),
            supervisor=list(self.supervisor_numbers()),
        )

    def recent(self, row: int) -> RecentRequests:
        """Return the last requests of lane `row`: one writes them, and anybody reads."""
        size = bytes_of(self.recent_max)
        return RecentRequests(self._recent[row * size : (row + 1) * size])

    def all_recent(self) -> list[RecentRequests]:
        """Return everybody's last requests, by lane."""
        return [self.recent(row) for row in range(len(self._nudge_fds))]

    def nudge_fd(self, row: int) -> int:
        """Readable once acceptor `row` was nudged; its owner resets it with os.eventfd_read."""
        return self._nudge_fds[row]

    def nudge(self, row: int) -> None:
        """Tell acceptor `row` that there is a connection for it."""
        with contextlib.suppress(BlockingIOError):  # a count at its limit is a nudge as well
            os.eventfd_write(self._nudge_fds[row], 1)

    def connections(self) -> list[int]:
        """Return the number of connections that each acceptor holds, by lane."""
        return self._words[_CONNECTIONS::_WORDS].tolist()

    def seen_ns(self, row: int) -> int:
        """Return when acceptor `row` last said that it is there (monotonic; 0: not yet)."""
        return self._words[row * _WORDS + _SEEN_NS]

    def others_seen(self, row: int, *, now_ns: int) -> bool:
        """Whether any acceptor but `row` was seen lately."""
        oldest_ns = now_ns - int(SEEN_WITHIN_S * 1e9)
        seen = self._words[_SEEN_NS::_WORDS].tolist()
        return any(at_ns >= oldest_ns for lane, at_ns in enumerate(seen) if lane != row)

    def least_loaded(self, *, now_ns: int) -> tuple[int, int]:
        """Return (connections, lane) of the acceptor that holds the fewest, of those seen lately.

        With none seen, a number that nobody is above, and lane 0.
        """
        oldest_ns = now_ns - int(SEEN_WITHIN_S * 1e9)
        seen = self._words[_SEEN_NS::_WORDS].tolist()
        loads = [
            (count, lane)
            for lane, count in enumerate(self.connections())
            if seen[lane] >= oldest_ns
        ]
        return min(loads, default=(1 << 62, 0))


class Slot:
    """One acceptor's row."""

    def __init__(self, words: memoryview[int]) -> None:
        self._words = words
        self._words[_CONNECTIONS] = 0

    @property
    def connections(self) -> int:
        return self._words[_CONNECTIONS]

    @connections.setter
    def connections(self, count: int) -> None:
        self._words[_CONNECTIONS] = count

    def seen(self) -> None:
        """Note that the acceptor is there, now."""
        self._words[_SEEN_NS] = time.monotonic_ns()

    def unseen(self) -> None:
        """Note that nobody is to wait for the acceptor any more."""
        self._words[_SEEN_NS] = 0


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _bytes_of(rows: int, recent_max: int) -> int:
    return rows * _ROW_BYTES + (rows + _OTHERS) * 8 * _NUMBERS + rows * bytes_of(recent_max)


def _restore(duplicates: list[Any], recent_max: int) -> Board:
    memory_fd, *nudge_fds = [duplicate.detach() for duplicate in duplicates]
    return Board(memory_fd=memory_fd, nudge_fds=nudge_fds, recent_max=recent_max)
