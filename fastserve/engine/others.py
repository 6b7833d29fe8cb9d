"""The other ranks of this engine, as rank 0 has them: an MPI job, and a control socket to each.

Started by MPI, found by pid; the control socket ends with its rank, and so does the pidfd that the
job has of it: whichever is seen first. A rank that is lost, raises or returns unasked is the loss
of all. Every wait has a deadline.

Knows nothing of requests and lanes.
"""

from __future__ import annotations

import contextlib
import select
from pathlib import Path
from typing import TYPE_CHECKING

import fastserve
from fastserve.control import ControlListener, Stop
from fastserve.engine import rank
from fastserve.engine.mpi import MpiSession, MpiWorld
from fastserve.engine.mpi_library import finalize
from fastserve.errors import EngineDead, StartError
from fastserve.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastserve.control import ControlMessage, ControlSocket
    from fastserve.engine.arguments import RankArguments

log = get_logger("engine")

# Of the time to end in order, for MPI's own goodbye.
_FINALIZE_TIMEOUT_S = 1.0


class OtherRanks:
    """Ranks 1 to `size` - 1 of an engine: start, begin, hear, and then stop or abandon."""

    def __init__(self, arguments: RankArguments, *, size: int, of_launcher: bool) -> None:
        """`of_launcher`: they exist, as a world of that size; else they are spawned."""
        self.numbers = range(1, size)
        self._arguments = arguments
        # Where this package is, they find it, too.
        path = str(Path(fastserve.__file__).parents[1])
        self._session: MpiSession = (
            MpiWorld() if of_launcher else MpiSession(size - 1, path=(path,), rank_first=1)
        )
        self._poll = select.epoll()
        self._rank_of_pid: dict[int, int] = {}
        self._listener: ControlListener | None = None
        self._links: dict[int, ControlSocket] = {}

    @property
    def fd(self) -> int:
        """Readable when there is something to `hear`."""
        return self._poll.fileno()

    def start(self) -> None:
        """Start the job, and learn who is who; models are loaded later. Raises StartError."""
        self._session.start()
        self._poll.register(self._session.fd, select.EPOLLIN)
        strangers = [str(one) for one in self._session.ranks if not one.is_local]
        if strangers:
            raise StartError(f"all ranks must be on one host: {', '.join(strangers)}")
        if len(self._session.ranks) != len(self.numbers):
            raise StartError(
                f"server.dp_size is {len(self.numbers) + 1}, and the launcher has started "
                f"{len(self._session.ranks) + 1} ranks"
            )
        self._rank_of_pid = {one.pid: one.rank for one in self._session.ranks}

    def begin(self) -> None:
        """Have each rank load its model and serve. Raises EngineDead."""
        path = rank.ranks_address(Path(self._arguments.run_directory), self._arguments.incarnation)
        self._listener = ControlListener(path, backlog=len(self.numbers))
        self._poll.register(self._listener, select.EPOLLIN)
        self._session.submit(rank.main, self._arguments)

    def hear(self) -> Iterator[tuple[int, ControlMessage]]:
        """Yield what ranks have said, and which. Raises EngineDead if one is lost."""
        self._accept()
        closed = []
        for number, link in self._links.items():
            for message in link.receive():
                yield number, message
            if link.closed:
                closed.append(number)
        self._session.check()
        if closed:
            raise EngineDead(f"{self.describe(closed[0])} has ended")

    def _accept(self) -> None:
        if self._listener is None:
            return
        for pid, link in self._listener.accept():
            number = self._rank_of_pid.get(pid)
            if number is None or number in self._links:
                log.warning("a stranger at the ranks' socket", pid=pid)
                link.close()
                continue
            self._links[number] = link
            self._poll.register(link, select.EPOLLIN)
        if len(self._links) == len(self.numbers):
            self._forget_listener()

    def describe(self, number: int) -> str:
        """Say who that rank is, and whether it is stopped."""
        stopped = [one.rank for one in self._session.stopped()]
        who = next((str(one) for one in self._session.ranks if one.rank == number), "not started")
        return f"{who}, stopped by a signal" if number in stopped else who

    def stop(self, *, timeout_s: float) -> None:
        """Have them end in order, and wait for it; what does not within `timeout_s` is killed."""
        for link in self._links.values():
            link.send(Stop())
        if self._session.shutdown(timeout_s=max(timeout_s - _FINALIZE_TIMEOUT_S, 0.0)):
            finalize(timeout_s=_FINALIZE_TIMEOUT_S)
        self._close()

    def abandon(self, reason: str) -> None:
        """Kill what is left of them, and wait for nobody."""
        self._session.abandon(reason, grace_s=0.0)
        self._close()

    def _close(self) -> None:
        """Also a second time."""
        if self._poll.closed:
            return
        self._forget_listener()
        for link in self._links.values():
            link.close()
        self._poll.close()

    def _forget_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(listener)
            listener.close()
