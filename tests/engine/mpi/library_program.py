"""A program whose MPI session is a library's: it can be released, but it is not ours.

    python library_program.py session|all|nothing

A rank is stopped, so the library would wait for it at its shutdown and at the interpreter's end.
The session is shaped as those of TensorRT-LLM are: a pool of ranks, and one of threads.
"""

from __future__ import annotations

import importlib
import sys
import time
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rank_work  # type: ignore[import-not-found] # beside this program, for ranks to import

from fastserve.engine.mpi_library import import_mpi
from fastserve.engine.mpi_release import release, release_all

RANKS = 2
FOR_EVER_S = 3600.0


class LibrarySession:
    """Runs a task on each rank, and one on a thread; shuts down by waiting for both."""

    def __init__(self) -> None:
        futures = importlib.import_module("mpi4py.futures")
        here = str(Path(__file__).parent)
        self.mpi_pool: Any = futures.MPIPoolExecutor(RANKS, path=[here], main=False)
        self.thread_pool = ThreadPoolExecutor(1)

    def submit(self, *task: Any) -> list[Future[Any]]:
        self.thread_pool.submit(time.sleep, FOR_EVER_S)
        return [self.mpi_pool.submit(*task) for _ in range(RANKS)]

    def shutdown(self) -> None:
        self.mpi_pool.shutdown(wait=True)
        self.thread_pool.shutdown(wait=True)


def main(what: str) -> None:
    import_mpi()
    session = LibrarySession()
    session.mpi_pool.bootup()
    running = session.submit(rank_work.load, "stopped", "load")
    queued = session.mpi_pool.submit(rank_work.load, "", "")
    while not any(future.running() for future in running):
        time.sleep(0.01)
    rank_work.announce("a library's job has started")
    # The test stops the clock from here on; the ranks take a moment to get where they stop.
    time.sleep(0.5)
    match what:
        case "session":
            assert release(session, reason="a rank is stopped")
            assert release(session, reason="and once more")
            assert isinstance(queued.exception(timeout=0), BrokenExecutor)
            session.shutdown()
        case "all":
            assert release_all(reason="a rank is stopped")
            assert isinstance(queued.exception(timeout=0), BrokenExecutor)
            session.mpi_pool.shutdown(wait=True)
            assert release(session.thread_pool, reason="it waits, too")
    rank_work.announce("leaving")


if __name__ == "__main__":
    main(*sys.argv[1:])
