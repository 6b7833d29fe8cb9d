"""Taking threads out of the joins that an interpreter makes when it ends.

CPython ends only once every thread that is not a daemon has, and executors register joins of their
own on top. A thread that waits inside MPI for a dead rank never ends, so it holds the process for
ever, after main() has long returned. The joins come before atexit hooks, so it must be taken out of
them earlier: at the moment when the rank is known to be dead.

There is no public way. Each is looked for by its parts, not by a version; whoever is told that
there is none ends the process by os._exit. Knows nothing of MPI.
"""

from __future__ import annotations

import concurrent.futures.thread as thread_pools
import enum
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping
    from concurrent.futures import ThreadPoolExecutor
    from types import ModuleType


class ExitJoin(enum.Enum):
    """How an interpreter joins the threads that are no daemons."""

    LOCKS = enum.auto()  # a set of locks, one for each thread, in `threading` (3.8 to 3.12)
    CALL = enum.auto()  # a list in C, joined by a function that `threading` holds (from 3.13)
    UNKNOWN = enum.auto()


# Kept weakly: a thread that does end after all is to be collected.
_forgotten: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def exit_join(module: ModuleType = threading) -> ExitJoin:
    """Tell how the interpreter whose `threading` module this is joins its threads."""
    if hasattr(module, "_shutdown_locks") and hasattr(module, "_shutdown_locks_lock"):
        return ExitJoin.LOCKS
    if callable(getattr(module, "_thread_shutdown", None)):
        return ExitJoin.CALL
    return ExitJoin.UNKNOWN


def forget_thread(thread: threading.Thread, *, module: ModuleType = threading) -> bool:
    """Let the interpreter end while `thread` runs; return whether it now will.

    Only its end is meant: join() still waits. Daemons and threads that have ended hold nothing.
    """
    if thread.daemon or not thread.is_alive():
        return True
    match exit_join(module):
        case ExitJoin.LOCKS:
            locks, guard = (
                module.__dict__["_shutdown_locks"],
                module.__dict__["_shutdown_locks_lock"],
            )
            with guard:
                locks.discard(getattr(thread, "_tstate_lock", None))
        case ExitJoin.CALL:
            # The list in C offers no removal, and a handle that is marked as done is joined anyway.
            _forgotten.add(thread)
            module.__dict__["_thread_shutdown"] = _join_the_others
        case ExitJoin.UNKNOWN:
            return False
    return True


def forget_registered(
    threads: Iterable[threading.Thread], *, registry: MutableMapping[threading.Thread, Any]
) -> bool:
    """Take `threads` out of an executor's own exit joins, and then out of the interpreter's.

    `registry` maps a thread to its queue, as mpi4py and concurrent.futures keep them.
    """
    forgotten = True
    for thread in list(threads):
        registry.pop(thread, None)
        forgotten = forget_thread(thread) and forgotten
    return forgotten


def forget_thread_pool(pool: ThreadPoolExecutor) -> bool:
    """Let neither the interpreter's end nor `pool.shutdown()` wait for the threads of `pool`."""
    threads: set[threading.Thread] = getattr(pool, "_threads", set())
    registry: Any = getattr(thread_pools, "_threads_queues", {})
    forgotten = forget_registered(threads, registry=registry)
    threads.clear()  # what shutdown(wait=True) joins
    pool.shutdown(wait=False, cancel_futures=True)
    return forgotten


def _join_the_others() -> None:
    """What the interpreter's own function does, but for the threads that were forgotten."""
    while waited_for := [one for one in threading.enumerate() if _holds_the_exit(one)]:
        for thread in waited_for:
            thread.join()


def _holds_the_exit(thread: threading.Thread) -> bool:
    if thread.daemon or thread in _forgotten:
        return False
    return thread not in (threading.current_thread(), threading.main_thread())
