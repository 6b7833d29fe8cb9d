"""The MPI ranks that a library has started on this host: which they are, and when one is gone.

A rank that is killed tells nobody: not MPI, whose futures then never complete, and so not the
library. The kernel does, by a pidfd. Ranks are children of MPI's daemon, so they are looked for
among our descendants and in our session, by the variables that a launcher gives each of them.
A helper that a rank starts inherits them, and is no rank.

Knows nothing of MPI itself, nor of who uses it. Sees no other host.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Open MPI and PRRTE, PMIx, and MPICH with its kin. A namespace tells one job's rank 0 from
# another's.
_VARIABLES = (b"OMPI_COMM_WORLD_RANK", b"PMIX_NAMESPACE", b"PMIX_RANK", b"PMI_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    pid: int
    parent: int
    session: int


class RankWatch:
    """The ranks there were when it was made. `fd` is readable once one of them has exited."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._pid_of: dict[int, int] = {}
        for pid in _find_ranks():
            with contextlib.suppress(OSError):
                self._watch(pid)

    @property
    def fd(self) -> int:
        return self._poll.fileno()

    @property
    def pids(self) -> list[int]:
        return sorted(self._pid_of.values())

    def exited(self) -> list[int]:
        """The pids of those that have exited. Does not wait."""
        return sorted(self._pid_of[fd] for fd, _ in self._poll.poll(0))

    def kill(self) -> None:
        """Kill those that are left; pidfds never mean a stranger."""
        for pidfd in self._pid_of:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def close(self) -> None:
        for pidfd in self._pid_of:
            os.close(pidfd)
        self._pid_of.clear()
        self._poll.close()

    def _watch(self, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        # Looked at once more: until it was held, the number could pass to another process.
        if pid not in _find_ranks():
            os.close(pidfd)
            return
        self._pid_of[pidfd] = pid
        self._poll.register(pidfd, select.EPOLLIN)


def _find_ranks() -> set[int]:
    """Pids whose rank is not simply inherited from their parent."""
    processes = {process.pid: process for process in _processes()}
    return {
        process.pid
        for process in processes.values()
        if _is_ours(process, processes) and _rank(process.pid) not in ((), _rank(process.parent))
    }


def _is_ours(process: _Process, processes: dict[int, _Process]) -> bool:
    if process.pid == os.getpid():
        return False
    # Only the leader's: else it is our supervisor's session, or that of somebody's terminal.
    if process.session == os.getpid():
        return True
    ancestor: _Process | None = process
    while ancestor is not None:
        if ancestor.parent == os.getpid():
            return True
        ancestor = processes.get(ancestor.parent)
    return False


def _processes() -> Iterator[_Process]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            # proc(5): the name, in parentheses, may itself hold parentheses and spaces.
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            yield _Process(pid=int(entry.name), parent=int(fields[1]), session=int(fields[3]))


def _rank(pid: int) -> tuple[bytes, ...]:
    """What a launcher told this process of its rank: nothing for most."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ()
    variables = environment.split(b"\0")
    return tuple(sorted(one for one in variables if one.partition(b"=")[0] in _VARIABLES))
