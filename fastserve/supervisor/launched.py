"""A server that an MPI launcher has started as one rank of its world.

A launcher that loses a rank kills all it has started, process groups and all; so a supervisor that
it had started would have no time to answer anybody. It is started by a go-between instead, which is
all that the launcher knows, in a session of its own: and so it sees the job end, says so to its
clients, and ends as it does with any dead engine.

Knows nothing of MPI but the variables that launchers set for their ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastserve.process import entitle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

# Each launcher's for a process's rank and their number: MPICH and its kin (also srun --mpi=pmi2),
# and Open MPI.
_VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many this process is; 0 of 1 where no launcher has started it."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Place:
        """Read what the launcher says, if there is one."""
        for names in _VARIABLES:
            rank, size = (environ.get(name, "") for name in names)
            if rank.isdecimal() and size.isdecimal():
                return cls(int(rank), int(size))
        return cls()


def apart(serve: Callable[[int], int]) -> int:
    """Run `serve` in a process and a session of its own, and return the exit code it returns.

    It is given a pidfd of this process, whose end is that of the launcher's job. Signals that this
    process is sent go to it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    go_between = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        return serve(go_between)
    os.close(go_between)
    entitle("fastserve: for the launcher")

    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        _abort_job(code)
    return code if code >= 0 else 128 - code


def _abort_job(code: int) -> None:
    """Have MPICH's launcher end the other ranks: one that waits in MPI_Init for a rank 0 which has
    ended before it came so far, or one that is stopped. Other launchers see the exit code.

    PMI-1's wire protocol: a line on the descriptor that the launcher has left us.
    """
    descriptor = os.environ.get("PMI_FD", "")
    if descriptor.isdecimal():
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(int(descriptor), f"cmd=abort exitcode={abs(code)}\n".encode())
