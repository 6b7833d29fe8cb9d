"""Which processes the ranks of a job are, and when one of them is gone.

A rank that is killed tells nobody: the futures of its work then never complete. The kernel does
tell, by a pidfd, in well under a millisecond. So each rank says who it is when the job starts: its
pid and the time it started, which together are never used twice. That holds for the ranks of this
host and pid namespace; of others only MPI hears.

Knows nothing of MPI.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

# The kernel counts from its boot, and psutil adds when that was: which steps as the clock is set.
# No pid comes round so fast.
_START_TOLERANCE_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """A rank's process. `started_s`: the time it started (Unix); `pid_namespace`: its inode."""

    rank: int
    pid: int
    started_s: float
    host: str
    pid_namespace: int

    @classmethod
    def of_this_process(cls, *, rank: int) -> RankIdentity:
        """Return who this process is, for `rank` to tell the others."""
        return cls.of(os.getpid(), rank=rank)

    @classmethod
    def of(cls, pid: int, *, rank: int) -> RankIdentity:
        """Return who `pid` is, as seen from here. Raises ProcessLookupError."""
        try:
            started_s = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            raise ProcessLookupError(f"there is no process {pid}") from None
        return cls(
            rank=rank,
            pid=pid,
            started_s=started_s,
            host=socket.gethostname(),
            pid_namespace=_pid_namespace(),
        )

    @property
    def is_local(self) -> bool:
        """Whether its pid means anything here."""
        return self.host == socket.gethostname() and self.pid_namespace == _pid_namespace()

    def __str__(self) -> str:
        return f"MPI rank {self.rank} (pid {self.pid} on {self.host})"


class IdentityWatch:
    """Watches the local ones among `identities`. `fd` is readable once one of them has exited.

    One that had exited before, is a zombie or whose pid has gone to another process counts as
    exited from the start.
    """

    def __init__(self, identities: Iterable[RankIdentity]) -> None:
        self.remote: list[RankIdentity] = []
        self._rank_of: dict[int, RankIdentity] = {}
        self._exited: list[RankIdentity] = []
        self._poll = select.epoll()
        for identity in identities:
            if not identity.is_local:
                self.remote.append(identity)
            elif (pidfd := _open(identity)) is None:
                self._exited.append(identity)
            else:
                self._rank_of[pidfd] = identity
                self._poll.register(pidfd, select.EPOLLIN)
        if self._exited:
            self._wake = os.eventfd(1, os.EFD_CLOEXEC)
            self._poll.register(self._wake, select.EPOLLIN)

    @property
    def fd(self) -> int:
        return self._poll.fileno()

    @property
    def local(self) -> list[RankIdentity]:
        return [*self._exited, *self._rank_of.values()]

    def exited(self) -> list[RankIdentity]:
        """Those that have exited, zombies included. Does not wait."""
        ready = [fd for fd, _ in self._poll.poll(0) if fd in self._rank_of]
        return [*self._exited, *(self._rank_of[fd] for fd in ready)]

    def stopped(self) -> list[RankIdentity]:
        """Those that a signal has stopped: alive, and of no use. No descriptor tells."""
        return [one for one in self._rank_of.values() if _status(one.pid) == psutil.STATUS_STOPPED]

    def kill(self) -> None:
        """Kill those that are left; pidfds never mean a stranger. A stopped one dies too."""
        for pidfd in self._rank_of:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def close(self) -> None:
        if self._poll.closed:
            return
        for pidfd in self._rank_of:
            os.close(pidfd)
        if self._exited:
            os.close(self._wake)
        self._poll.close()


def _open(identity: RankIdentity) -> int | None:
    """Return a pidfd of just that process, or None if it is gone."""
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    # Looked at while the pidfd is held: from now on the pid goes to nobody else unnoticed.
    with contextlib.suppress(psutil.NoSuchProcess):
        started_s = psutil.Process(identity.pid).create_time()
        if abs(started_s - identity.started_s) <= _START_TOLERANCE_S:
            return pidfd
    os.close(pidfd)
    return None


def _status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


# --- the launcher's processes ---


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """A process for as long as the host is up."""

    pid: int
    started_s: float


def descendants() -> set[ProcessKey]:
    """The processes that this one has started, and those that they have, zombies left out.

    MPICH's launcher gives each rank a session of its own, so no group or session has them all.
    """
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(ProcessKey(process.pid, process.create_time()))
    return found


def kill_all(processes: Iterable[ProcessKey]) -> None:
    """Kill `processes`, and let none of them do anything about it.

    A launcher that sees a rank die kills the whole job, and with it the process that spawned the
    job. So all of them are stopped before the first is killed.
    """
    pidfds = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            pidfd = os.pidfd_open(process.pid)
            pidfds.append(pidfd)
            if psutil.Process(process.pid).create_time() != process.started_s:
                os.close(pidfds.pop())
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pidfd in pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
    for pidfd in pidfds:
        os.close(pidfd)
