"""Releasing MPI sessions, whoever made them: so that nothing waits for a world that is dead.

mpi4py's pool has a manager thread, which asks MPI for results and never stops to. If a rank is
dead it stands in MPI for ever, and holds four things: shutdown(), mpi4py's exit hook, the exit of
the interpreter, and whoever waits for the pool to start. Releasing frees all four, at once and for
good; the thread stays where it is until the process ends.

A session may be a library's own. What it holds is recognised by names, so a partly built one, or
one of a version with other names, has less to release and raises nothing.
"""

# ruff: noqa: SLF001 - what is private in mpi4py is all there is to hold it by

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, cast

from fastserve.engine.mpi_exit import forget_registered, forget_thread_pool
from fastserve.log import get_logger

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, MutableMapping
    from concurrent.futures import Future

log = get_logger("mpi")

# Where a session keeps its executors: TensorRT-LLM's pool session and its session over an existing
# communicator, which also runs rank 0's part on a thread.
_EXECUTOR_NAMES = ("mpi_pool", "thread_pool")

# mpi4py 4 and 3.
_MPI4PY_CORES = ("mpi4py.futures._core", "mpi4py.futures._lib")

# submit() and shutdown() hold it for a moment only.
_LOCK_TIMEOUT_S = 1.0


class Pool(Protocol):
    """mpi4py.futures' pool: the manager thread and what is queued for it."""

    thread: threading.Thread
    event: threading.Event
    queue: Any

    def exref(self) -> PoolExecutor | None: ...


class PoolExecutor(Protocol):
    """mpi4py.futures.MPIPoolExecutor, as far as it matters here."""

    _pool: Pool | None
    _lock: threading.Lock
    _broken: str | None
    _shutdown: bool

    def submit(self, function: Callable[..., Any], /, *args: object) -> Future[Any]: ...

    def shutdown(self, wait: bool = True) -> None: ...


def release(session: object, *, reason: str) -> bool:
    """Free everything that waits, or will wait, for `session`; return whether exit is free too.

    `session`: an MPIPoolExecutor, a ThreadPoolExecutor, or what has one as `mpi_pool` or
    `thread_pool`. Work that has not reached a rank fails with BrokenExecutor(reason); what has is
    left to whoever waits for it. If False is returned only os._exit ends the process. May be called
    again, from any thread; never waits.
    """
    free = True
    for executor in _executors(session):
        if isinstance(executor, ThreadPoolExecutor):
            free = forget_thread_pool(executor) and free
        else:
            free = _release_executor(cast("PoolExecutor", executor), reason=reason) and free
    return free


def release_all(*, reason: str) -> bool:
    """Release every pool of mpi4py in this process, without being told of the sessions.

    For a library's session that cannot be got at. See release().
    """
    free = True
    for thread in list(_registry()):
        # While a thread runs it keeps its arguments, of which the pool is the first.
        arguments: tuple[object, ...] = getattr(thread, "_args", ())
        pool = arguments[0] if arguments else None
        executor = pool.exref() if hasattr(pool, "exref") else None
        if executor is not None:
            free = _release_executor(executor, reason=reason) and free
        free = forget_registered([thread], registry=_registry()) and free
    return free


def _executors(session: object) -> Iterator[object]:
    if isinstance(session, ThreadPoolExecutor) or _is_mpi_executor(session):
        yield session
        return
    for name in _EXECUTOR_NAMES:
        executor = getattr(session, name, None)
        if isinstance(executor, ThreadPoolExecutor) or _is_mpi_executor(executor):
            yield executor


def _is_mpi_executor(candidate: object) -> bool:
    return all(hasattr(candidate, name) for name in ("_pool", "_lock", "_broken", "_shutdown"))


def _release_executor(executor: PoolExecutor, *, reason: str) -> bool:
    pool = executor._pool
    free = True
    if pool is not None:
        free = forget_registered([pool.thread], registry=_registry())
        _forget_shared(pool.thread)
        # Who waits for the pool to start holds the lock meanwhile, so they are woken first.
        pool.event.set()
    locked = executor._lock.acquire(timeout=_LOCK_TIMEOUT_S)
    try:
        # Later calls of submit() see the first two, and those of shutdown() find nothing to join.
        executor._broken = reason
        executor._shutdown = True
        executor._pool = None
    finally:
        if locked:
            executor._lock.release()
    if pool is not None:
        _fail_queued(pool, reason=reason)
    return free


def pool_of(executor: PoolExecutor) -> Pool:
    """Return the pool of an executor that has been started."""
    assert executor._pool is not None, "started, and not released"
    return executor._pool


def broken(executor: PoolExecutor) -> str | None:
    """Say why the pool takes no more work, if mpi4py knows."""
    return executor._broken


def _fail_queued(pool: Pool, *, reason: str) -> None:
    while True:
        try:
            item: tuple[Future[object], object] | None = pool.queue.pop()
        except LookupError:
            break
        if item is not None:
            fail(item[0], BrokenExecutor(reason))
    # If the thread ever comes back from MPI, it is to end.
    pool.queue.put(None)


def fail(future: Future[Any], error: BaseException) -> None:
    """End `future` with `error` unless it has ended; its other side may do so at any moment."""
    with contextlib.suppress(Exception):
        if not future.done():
            future.set_exception(error)


def _registry() -> MutableMapping[threading.Thread, Any]:
    """The threads that mpi4py's exit hook joins. Nothing is imported: unused, there are none."""
    core = _core()
    threads: MutableMapping[threading.Thread, Any] = getattr(core, "THREADS_QUEUES", {})
    return threads


def _forget_shared(thread: threading.Thread) -> None:
    """Under `python -m mpi4py.futures` all executors share a pool that has a list of its own."""
    shared = getattr(_core(), "SharedPool", None)
    threads = getattr(shared, "threads", None)
    if threads is not None:
        threads.pop(thread, None)


def _core() -> object:
    for name in _MPI4PY_CORES:
        if name in sys.modules:
            return sys.modules[name]
    return None
