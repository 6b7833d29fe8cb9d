"""What the ranks of these tests do: a model's phases in small, and ways to die in one of them.

A rank announces by datagrams to the test: "phase load 1 4711", and just before the blow "blow".
Rank 1 is the one that is struck. Imports nothing of ours: it is only work.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

STRUCK_RANK = 1
LATE_EXIT_S = 0.3


def announce(*words: object) -> None:
    """Tell the test, by a datagram to the socket that FASTSERVE_TEST_EARS names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth, contextlib.suppress(OSError):
        mouth.sendto(" ".join(map(str, words)).encode(), os.environ["FASTSERVE_TEST_EARS"])


def workers():  # type: ignore[no-untyped-def] # an Intracomm, or whatever mpi4py has here
    from mpi4py.futures import get_comm_workers

    return get_comm_workers()


def strike(blow: str) -> None:
    """Be struck by `blow`. Returns for none of them, or raises."""
    announce("blow", blow, time.monotonic())
    match blow:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "aborted":
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(7)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raises":
            raise ArithmeticError("the model is not what it was")
        case _:
            raise AssertionError(blow)


def phase(name: str, *, blow: str, at: str, work_s: float = 0.05) -> int:
    """One phase, which ends with a collective call: it takes all ranks to finish it."""
    rank = workers().Get_rank()
    announce("phase", name, rank, os.getpid())
    if rank == STRUCK_RANK and name == at:
        strike(blow)
    time.sleep(work_s)
    return int(workers().allreduce(rank))


def load(blow: str, at: str) -> int:
    return phase("load", blow=blow, at=at, work_s=0.1)


def prefill(blow: str, at: str) -> int:
    return phase("prefill", blow=blow, at=at)


def decode(blow: str, at: str, step: int) -> int:
    """The blow falls at the third step, when the ranks are well under way."""
    return phase("decode", blow=blow, at=at if step == 2 else "", work_s=0.01)


def start(blow: str, at: str) -> None:
    """An initializer: it runs on each rank before anything is known of it."""
    rank = workers().Get_rank()
    announce("phase", "start", rank, os.getpid())
    if rank == STRUCK_RANK and at == "start":
        strike(blow)


def leave_late(mark: str, seconds_s: float) -> str:
    """Work that takes long, done by the time a mark is there for each rank."""
    time.sleep(seconds_s)
    path = Path(mark) / f"rank-{workers().Get_rank()}"
    path.write_text("done")
    return str(path)
