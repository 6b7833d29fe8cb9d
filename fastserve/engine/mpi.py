"""MPI jobs: ranks that run our functions, and an end that nobody waits for in vain.

    NEW -> STARTING -> RUNNING -> STOPPING -> CLOSED        in order: all ranks are waited for
               \\__________\\_________\\-> RELEASED -> CLOSED  a rank is lost: nobody is

An MpiSession spawns its ranks; an MpiWorld finds them in the world that a launcher has made. MPI
itself does not report a rank that was killed or stopped, and each call that involves it may last
for ever. So only mpi4py's manager thread makes such calls, every wait here has a deadline, and
ranks are watched through the kernel (mpi_watch.py). At the moment a rank is found lost, that
thread is taken out of everything that would wait for it (mpi_release.py).

Knows nothing of what the ranks do.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

from fastserve.engine import mpi_shm
from fastserve.engine.mpi_library import finalize, find_launcher, import_futures, import_mpi
from fastserve.engine.mpi_release import broken, fail, pool_of, release
from fastserve.engine.mpi_watch import IdentityWatch, RankIdentity, descendants, kill_all
from fastserve.errors import EngineDead, StartError
from fastserve.log import get_logger
from fastserve.readable import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from concurrent.futures import Future

    from fastserve.engine.mpi_release import PoolExecutor
    from fastserve.engine.mpi_watch import ProcessKey

log = get_logger("mpi")

# After a loss, surviving ranks may still say why: a rank that raised is the cause of the others'
# trouble. All futures together get this long, never each.
FUTURES_GRACE_S_MAX = 5.0
FUTURES_GRACE_S = 1.0

START_TIMEOUT_S = 60.0
SHUTDOWN_TIMEOUT_S = 60.0

# Between two looks at what has no descriptor: the pool's start, its thread's end, its results.
_POLL_S = 0.02

# Once all ranks are gone, the manager thread has nothing left to wait for.
_LAST_JOIN_TIMEOUT_S = 1.0


class SessionState(enum.Enum):
    NEW = enum.auto()  # nothing has been started
    STARTING = enum.auto()  # ranks are being spawned, or found; who they are is not known
    RUNNING = enum.auto()
    STOPPING = enum.auto()  # in order: ranks finish what they do
    RELEASED = enum.auto()  # a rank is lost; nothing waits any more
    CLOSED = enum.auto()


NEXT = {
    SessionState.NEW: {SessionState.STARTING, SessionState.CLOSED},
    SessionState.STARTING: {SessionState.RUNNING, SessionState.RELEASED},
    SessionState.RUNNING: {SessionState.STOPPING, SessionState.RELEASED},
    SessionState.STOPPING: {SessionState.CLOSED, SessionState.RELEASED},
    SessionState.RELEASED: {SessionState.CLOSED},
    SessionState.CLOSED: set(),
}


class MpiSession:
    """`size` ranks on this host, spawned through mpi4py's pool. One thread makes all calls.

    Only `release` may come from any thread.
    """

    # What a session that was never initialised has: it, too, is released and shut down quietly.
    state = SessionState.NEW
    reason = ""
    exit_is_free = True
    """Whether the interpreter can end by itself. If not, only os._exit ends the process."""

    def __init__(
        self,
        size: int,
        *,
        rank_first: int = 0,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[object, ...] = (),
        path: tuple[str, ...] = (),
    ) -> None:
        """`initializer(*initargs)` runs first on each rank. `path`: more for their sys.path.

        `rank_first`: the number of the first of them; 1 where this process counts as rank 0.
        """
        self.size = size
        self._rank_first = rank_first
        self.ranks: list[RankIdentity] = []
        self._options: dict[str, Any] = {"path": list(path), "main": False, "backoff": _POLL_S}
        if initializer is not None:
            self._options |= {"initializer": initializer, "initargs": initargs}
        self._executor: PoolExecutor | None = None
        self._manager: threading.Thread | None = None
        self._watch: IdentityWatch | None = None
        self._in_flight: set[Future[Any]] = set()
        self._failure: BaseException | None = None
        self._before: set[ProcessKey] = set()
        self._processes: set[ProcessKey] | None = None
        self._lock = threading.Lock()
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.epoll()
        self._poll.register(self._news, select.EPOLLIN)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state.name} size={getattr(self, 'size', None)}>"

    @property
    def fd(self) -> int:
        """Readable when a future is done or a rank is lost: then call `check`."""
        return self._poll.fileno()

    # --- start ---

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the ranks, and learn who they are. Raises StartError; nothing is left then."""
        self._enter(SessionState.STARTING)
        deadline_s = time.monotonic() + timeout_s
        try:
            mpi_shm.sweep()
            self._before = descendants()
            self._executor = self._make_executor()
            self._await_boot(self._executor, deadline_s)
            self._meet(deadline_s)
        except BaseException as error:
            self.abandon(f"the MPI job cannot start: {error}", grace_s=0.0)
            if isinstance(error, StartError) or not isinstance(error, Exception):
                raise
            raise StartError(self.reason) from error
        self._enter(SessionState.RUNNING)
        log.info("MPI job started", size=self.size, pids=[one.pid for one in self.ranks])

    def _make_executor(self) -> PoolExecutor:
        # A launcher that loses a rank kills the process group of whoever has spawned it.
        if os.getpgrp() != os.getpid():
            raise StartError("an MPI job needs a session of its own (setsid)")
        find_launcher()
        futures = import_futures()
        executor = futures.MPIPoolExecutor(max_workers=self.size, **self._options)
        started: PoolExecutor = executor.bootup(wait=False)
        return started

    def _await_boot(self, executor: PoolExecutor, deadline_s: float) -> None:
        """Wait for the pool. Its own wait has no end if its thread dies before the ranks run."""
        pool = pool_of(executor)
        self._manager = pool.thread
        while not pool.event.wait(_POLL_S):
            if not pool.thread.is_alive():
                raise StartError(
                    "the MPI ranks could not be started: one has died, or mpiexec is not on PATH"
                )
            if time.monotonic() >= deadline_s:
                raise StartError("the MPI ranks do not answer")
        if why := broken(executor):
            raise StartError(f"the MPI ranks did not start: {why}")
        threading.Thread(
            target=self._outlive, args=(pool.thread,), name="mpi-watch", daemon=True
        ).start()

    def _outlive(self, manager: threading.Thread) -> None:
        """On a thread: tell when the manager thread ends, as it does if MPI reports an error."""
        manager.join()
        self._tell()

    def _meet(self, deadline_s: float) -> None:
        futures = self._submit(_who_are_you, self._rank_first)
        if not self.wait(futures, timeout_s=deadline_s - time.monotonic()):
            raise StartError("the MPI ranks do not say who they are")
        self.ranks = sorted((one.result() for one in futures), key=lambda one: one.rank)
        self._watch = IdentityWatch(self.ranks)
        self._poll.register(self._watch.fd, select.EPOLLIN)
        self._processes = descendants() - self._before
        mpi_shm.unlink(mpi_shm.mapped(self._local_pids(), prefixes=mpi_shm.MPICH))
        self.check()

    def _local_pids(self) -> list[int]:
        spawned = [one.pid for one in self._spawned()]
        return [os.getpid(), *spawned, *(one.pid for one in self.ranks if one.is_local)]

    def _spawned(self) -> set[ProcessKey]:
        """The job's processes: launcher and ranks, as far as they descend from this one."""
        return descendants() - self._before if self._processes is None else self._processes

    # --- work ---

    def submit(self, function: Callable[..., Any], *args: object) -> list[Future[Any]]:
        """Have every rank call `function(*args)`, which it must be able to import.

        Returns a future for each, in no order. All ranks must be idle. Raises EngineDead.
        """
        assert self.state is SessionState.RUNNING or self.reason, f"submit to {self!r}"
        assert not self._in_flight, "the ranks have not finished what they do"
        self.check()
        return self._submit(function, *args)

    def _submit(self, function: Callable[..., Any], *args: object) -> list[Future[Any]]:
        # The pool gives the next task to the rank that has been idle for longest: each gets one.
        assert self._executor is not None, "started"
        futures = [self._executor.submit(function, *args) for _ in range(self.size)]
        self._in_flight.update(futures)
        for future in futures:
            future.add_done_callback(self._on_done)
        return futures

    def _on_done(self, future: Future[Any]) -> None:
        """On the manager thread."""
        if not future.cancelled() and self._failure is None:
            self._failure = future.exception()
        self._in_flight.discard(future)
        self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(OSError):  # closed
            os.eventfd_write(self._news, 1)

    def wait(self, futures: Collection[Future[Any]], *, timeout_s: float) -> bool:
        """Wait until all `futures` are done (True) or `timeout_s` has passed (False).

        Raises EngineDead as soon as a rank is lost; the session is released by then.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            # Not future.done(): that comes before our own account of it.
            done = self._in_flight.isdisjoint(futures)
            self.check()
            if done:
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            wait_readable(self._poll.fileno(), timeout_s=left_s)

    def check(self) -> None:
        """Release the session and raise EngineDead if a rank is lost. Does not wait."""
        with contextlib.suppress(OSError):  # there is none, or it is closed
            os.eventfd_read(self._news)
        if reason := self.lost():
            self.release(reason)
            raise EngineDead(reason) from self._failure

    def lost(self) -> str:
        """Say why this job cannot go on; "" if it can. A rank that raised counts as lost."""
        if self.reason:
            return self.reason
        if self._failure is not None:
            error = self._failure
            return f"an MPI rank raised {type(error).__name__}: {error}"
        if self._watch is not None and (exited := self._watch.exited()):
            return f"{exited[0]} exited"
        if self._manager is not None and not self._manager.is_alive():
            return "MPI reported an error: its manager thread has ended"
        return ""

    def stopped(self) -> list[RankIdentity]:
        """The ranks that a signal has stopped, for the message of whoever misses their results."""
        return self._watch.stopped() if self._watch is not None else []

    # --- the end ---

    def release(self, reason: str) -> bool:
        """Never wait for this job again; return `exit_is_free`. For the moment of detection.

        What the ranks were given stays pending: `abandon` ends it. May be called again, and from
        any thread.
        """
        if not hasattr(self, "_lock"):  # never initialised
            return True
        with self._lock:
            if self.state not in (
                SessionState.STARTING, SessionState.RUNNING, SessionState.STOPPING
            ):  # fmt: skip
                return self.exit_is_free
            self.reason = reason
            self._enter(SessionState.RELEASED)
            self.exit_is_free = release(self._executor, reason=reason)
        log.error("MPI job lost", reason=reason)
        self._tell()
        return self.exit_is_free

    def abandon(self, reason: str, *, grace_s: float = FUTURES_GRACE_S) -> None:
        """Release this job, which is ours, and end it: futures, ranks and launcher.

        The futures get `grace_s` together, FUTURES_GRACE_S_MAX at most, and then fail.
        """
        self.release(reason)
        if self.state is SessionState.RELEASED:
            pending = list(self._in_flight)
            if self._failure is None:  # else we know why already
                concurrent.futures.wait(pending, timeout=min(grace_s, FUTURES_GRACE_S_MAX))
            for future in pending:
                fail(future, EngineDead(self.reason))
            mpi_shm.unlink(mpi_shm.mapped(self._local_pids()))
            self._kill()
        self._close()

    def shutdown(self, *, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> bool:
        """End in order: wait for what the ranks do, and for their exit; return whether they did.

        A rank that is lost meanwhile, or `timeout_s`, turns it into `abandon`. A session that has
        been released, or was never started, waits for nothing.
        """
        if self.state is SessionState.RUNNING:
            self._enter(SessionState.STOPPING)
            deadline_s = time.monotonic() + timeout_s
            try:
                if not self.wait(list(self._in_flight), timeout_s=timeout_s):
                    self.release(f"the MPI ranks did not finish within {timeout_s:g} s")
                elif not self._await_exit(deadline_s):
                    self.release(f"the MPI ranks did not exit within {timeout_s:g} s")
            except EngineDead as error:
                log.warning("MPI job lost while it was shutting down", reason=error.message)
        in_order = not self.reason
        if in_order:
            self._close()
        else:
            self.abandon(self.reason)
        return in_order

    def _await_exit(self, deadline_s: float) -> bool:
        """Send the ranks home, and wait until the manager thread and then they have ended."""
        assert self._executor is not None, "started"
        self._executor.shutdown(wait=False)
        return (
            self._await_manager(deadline_s)
            and self._leave(deadline_s)
            and self._await_ranks(deadline_s)
        )

    def _await_manager(self, deadline_s: float) -> bool:
        assert self._manager is not None, "started"
        while self._manager.is_alive():
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return False
            if self._have_exited():  # it says goodbye to nobody
                deadline_s = min(deadline_s, now_s + _LAST_JOIN_TIMEOUT_S)
            self._manager.join(_POLL_S)
        return True

    def _await_ranks(self, deadline_s: float) -> bool:
        while not self._have_exited():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _have_exited(self) -> bool:
        """Whether the ranks of this host have, if there are any."""
        assert self._watch is not None, "started"
        return len(self._watch.exited()) == len(self._watch.local)

    def _leave(self, _deadline_s: float) -> bool:
        """What MPI itself wants done before the ranks can exit: for those we spawned, nothing."""
        return True

    def _kill(self) -> None:
        kill_all(self._spawned())
        if self._watch is not None:
            self._watch.kill()

    def _close(self) -> None:
        if self.state is SessionState.CLOSED:
            return
        self._enter(SessionState.CLOSED)
        if not hasattr(self, "_poll"):
            return
        # Ours, which only MPI_Finalize would remove, and another session may want MPI still.
        mpi_shm.unlink(mpi_shm.mapped([os.getpid()]))
        self._poll.close()
        news, self._news = self._news, -1
        os.close(news)
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _enter(self, state: SessionState) -> None:
        assert state in NEXT[self.state], f"{self.state.name} -> {state.name}"
        self.state = state


class MpiWorld(MpiSession):
    """The ranks of a world that a launcher has made. This process is rank 0; the others `serve`.

    Its size is without rank 0. What is left of it after a loss is for the launcher to end, which it
    does once rank 0 has exited without MPI_Finalize, as by os._exit.
    """

    def __init__(self) -> None:
        super().__init__(0, rank_first=1)

    def _leave(self, deadline_s: float) -> bool:
        # Collective. Afterwards this process can make no MPI call.
        return finalize(timeout_s=deadline_s - time.monotonic())

    def _make_executor(self) -> PoolExecutor:
        futures = import_futures()
        world = import_mpi().COMM_WORLD
        self.size = world.Get_size() - 1
        if self.size < 1 or world.Get_rank() != 0:
            raise StartError(
                f"this is rank {world.Get_rank()} of {self.size + 1}: the engine is rank 0 of "
                "a world of two or more (mpiexec -n)"
            )
        executor = futures.MPICommExecutor(world, root=0, **self._options)
        started: PoolExecutor = executor.__enter__()
        return started

    def _kill(self) -> None:
        """Nothing: the launcher would kill us for it before we have said our last words."""


def serve() -> None:
    """Be a rank other than 0 of an MpiWorld: do as rank 0 says, until it shuts down in order.

    This process can make no MPI call afterwards. Waits without end, as a rank does: the launcher
    ends those whose rank 0 is gone.
    """
    world = import_mpi().COMM_WORLD
    with import_futures().MPICommExecutor(world, root=0):
        pass
    import_mpi().Finalize()


def worker_rank() -> int:
    """On a rank that does what a session says: its number among those, from 0."""
    return int(import_futures().get_comm_workers().Get_rank())


def _who_are_you(rank_first: int) -> RankIdentity:
    """On each rank. All take part in the barrier, so none answers twice."""
    import_futures().get_comm_workers().Barrier()
    return RankIdentity.of_this_process(rank=rank_first + worker_rank())
