"""An engine in small, over real ranks: it starts them, loads, prefills, decodes, and shuts down.

    python engine_program.py pool|world struck BLOW PHASE
    python engine_program.py pool|world late MARKS SECONDS TIMEOUT

It ends as an interpreter does, with every join and hook, where the engine process would call
os._exit: what holds it here would hold anything. Under mpiexec all ranks run this same program.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import rank_work  # type: ignore[import-not-found] # beside this program, for ranks to import

from fastserve.engine.mpi import MpiSession, MpiWorld, serve
from fastserve.engine.mpi_library import import_mpi
from fastserve.errors import EngineDead, StartError

RANKS = 3
STEPS = 5
# A step takes 0.1 s at most.
STALL_S = 1.5
START_TIMEOUT_S = 20.0
# Where a rank will not start, and everything else is quick.
START_STRUCK_TIMEOUT_S = 3.0

EXIT_CANNOT_START = 2
EXIT_NOT_IN_ORDER = 3
EXIT_DEAD = 70


def make_session(kind: str, *, blow: str = "", at: str = "") -> MpiSession:
    if kind == "world":
        return MpiWorld()
    here = str(Path(__file__).parent)
    return MpiSession(RANKS, initializer=rank_work.start, initargs=(blow, at), path=(here,))


def be_a_rank(*, blow: str = "", at: str = "") -> None:
    """One rank is struck at its start before it joins in, when nobody has heard of it."""
    rank = import_mpi().COMM_WORLD.Get_rank() - 1
    rank_work.announce("phase", "start", rank, os.getpid())
    if at == "start" and rank == rank_work.STRUCK_RANK:
        rank_work.strike(blow)
    serve()


def generate(session: MpiSession, *, blow: str, at: str) -> None:
    """Load, prefill, decode. A step that does not end is the end of the session."""
    steps = [
        (rank_work.load, (blow, at)),
        (rank_work.prefill, (blow, at)),
        *((rank_work.decode, (blow, at, step)) for step in range(STEPS)),
    ]
    for function, arguments in steps:
        futures = session.submit(function, *arguments)
        if not session.wait(futures, timeout_s=STALL_S):
            stopped = ", ".join(map(str, session.stopped()))
            session.abandon(f"no step finishes; stopped: {stopped}")
            assert all(future.done() for future in futures), "abandoned, yet somebody waits"
            raise EngineDead(session.reason)


def struck(session: MpiSession, blow: str, at: str) -> int:
    timeout_s = START_STRUCK_TIMEOUT_S if at == "start" else START_TIMEOUT_S
    try:
        session.start(timeout_s=timeout_s)
        generate(session, blow=blow, at=at)
    except (EngineDead, StartError) as error:
        rank_work.announce("detected", time.monotonic(), error.message)
        session.shutdown()
        assert session.exit_is_free
        return EXIT_DEAD if isinstance(error, EngineDead) else EXIT_CANNOT_START
    return 0 if session.shutdown() else EXIT_NOT_IN_ORDER


def late(session: MpiSession, marks: str, after_s: str, timeout_s: str) -> int:
    """Shut down while the ranks are at work."""
    session.start(timeout_s=START_TIMEOUT_S)
    session.submit(rank_work.finish_late, marks, float(after_s))
    return 0 if session.shutdown(timeout_s=float(timeout_s)) else EXIT_NOT_IN_ORDER


def main(kind: str, what: str, *arguments: str) -> int:
    blow, at = arguments[:2] if what == "struck" else ("", "")
    if kind == "world" and import_mpi().COMM_WORLD.Get_rank() != 0:
        be_a_rank(blow=blow, at=at)
        return 0
    session = make_session(kind, blow=blow, at=at)
    return struck(session, blow, at) if what == "struck" else late(session, *arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
