"""An engine in small, over real ranks: starts them, loads, prefills, decodes, and shuts down.

    python engine_program.py pool|world BLOW PHASE

It ends as an interpreter does, with every join and hook, where the engine process would call
os._exit: what holds it here would hold anything. Under mpiexec all ranks run this same program.
"""

from __future__ import annotations

import sys
import time

import rank_work

from fastserve.engine.mpi import MpiSession, MpiWorld, import_mpi, serve
from fastserve.errors import EngineDead, StartError

RANKS = 3
STALL_S = 1.0
EXIT_DEAD = 70
EXIT_CANNOT_START = 2


def make_session(kind: str, blow: str, at: str) -> MpiSession:
    if kind == "world":
        return MpiWorld()
    return MpiSession(
        RANKS,
        initializer=rank_work.start,
        initargs=(blow, at),
        path=(str(rank_work.__file__).rpartition("/")[0],),
    )


def be_a_rank(blow: str, at: str) -> None:
    """A rank of a world is struck at its start before it joins in: nobody has heard of it."""
    rank = import_mpi().COMM_WORLD.Get_rank()
    rank_work.announce("phase", "start", rank)
    if at == "start" and rank == rank_work.STRUCK_RANK + 1:
        rank_work.strike(blow)
    serve()


def run(session: MpiSession, blow: str, at: str) -> None:
    """Load, prefill, decode. A step that does not end is the end of the session."""
    steps = [
        (rank_work.load, (blow, at)),
        (rank_work.prefill, (blow, at)),
        *((rank_work.decode, (blow, at, step)) for step in range(5)),
    ]
    for function, arguments in steps:
        futures = session.submit(function, *arguments)
        if not session.wait(futures, timeout_s=STALL_S):
            stopped = ", ".join(map(str, session.stopped()))
            session.abandon(f"no step finishes; stopped: {stopped or 'none'}")
            raise EngineDead(session.reason)


def main(kind: str, blow: str, at: str) -> int:
    if kind == "world" and import_mpi().COMM_WORLD.Get_rank() != 0:
        be_a_rank(blow, at)
        return 0
    session = make_session(kind, blow, at)
    try:
        session.start(timeout_s=3.0)
        run(session, blow, at)
    except (EngineDead, StartError) as error:
        rank_work.announce("detected", time.monotonic(), error.message)
        session.shutdown()
        rank_work.announce("shut", time.monotonic(), session.exit_is_free)
        return EXIT_DEAD if isinstance(error, EngineDead) else EXIT_CANNOT_START
    assert session.shutdown(timeout_s=10.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
