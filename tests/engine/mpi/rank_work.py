"""What the ranks of these tests do: a model's phases in small, and ways to die in one of them.

A rank announces by datagrams to the test: "phase load 1 4711", and just before the blow "blow".
Rank 1 of the working ranks is the one that is struck. Imports nothing of ours: it is only work.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

STRUCK_RANK = 1


def announce(*words: object) -> None:
    """Tell the test, at the socket that FASTSERVE_TEST_EARS names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth, contextlib.suppress(OSError):
        mouth.sendto(" ".join(map(str, words)).encode(), os.environ["FASTSERVE_TEST_EARS"])


def workers() -> Any:
    """The communicator of the working ranks: of all that were spawned, or of all but rank 0."""
    return importlib.import_module("mpi4py.futures").get_comm_workers()


def strike(blow: str) -> None:
    """Be struck: raise, or never return."""
    announce("blow", time.monotonic())
    match blow:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "aborted":
            importlib.import_module("mpi4py.MPI").COMM_WORLD.Abort(7)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raises":
            raise ArithmeticError("the model is not what it was")
        case _:
            raise AssertionError(blow)


def _phase(name: str, *, blow: str, at: str, work_s: float) -> int:
    """One phase, which ends with a collective call: it takes all ranks to finish it."""
    rank = workers().Get_rank()
    announce("phase", name, rank, os.getpid())
    if rank == STRUCK_RANK and name == at:
        strike(blow)
    time.sleep(work_s)
    return int(workers().allreduce(rank))


def start(blow: str, at: str) -> None:
    """An initializer: it runs on each rank before anything is known of it."""
    rank = workers().Get_rank()
    announce("phase", "start", rank, os.getpid())
    if rank == STRUCK_RANK and at == "start":
        strike(blow)


def load(blow: str, at: str) -> int:
    return _phase("load", blow=blow, at=at, work_s=0.1)


def prefill(blow: str, at: str) -> int:
    return _phase("prefill", blow=blow, at=at, work_s=0.05)


def decode(blow: str, at: str, step: int) -> int:
    """The blow falls at the third step, when the ranks are well under way."""
    return _phase("decode", blow=blow, at=at if step == 2 else "", work_s=0.01)


def finish_late(marks: str, after_s: float) -> None:
    """Work that has left a mark by the time it is done."""
    rank = workers().Get_rank()
    announce("phase", "late", rank, os.getpid())
    time.sleep(after_s)
    (Path(marks) / f"rank-{rank}").write_text("done")
