"""Sessions that are partly built, or not what they seem: there is less to release, and no error."""

from __future__ import annotations

import threading
import types
from collections import deque
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from fastserve.engine.mpi_release import fail, release


class Pool:
    """As mpi4py's, with a thread that stands in MPI until the test lets it go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.event = threading.Event()
        self.queue = Queue()
        self.thread = threading.Thread(target=self.let_go.wait, daemon=True)
        self.thread.start()


class Queue(deque[Any]):
    put = deque.append
    pop = deque.popleft  # as mpi4py has it


class Executor:
    """As mpi4py's, whose shutdown joins the pool's thread."""

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._shutdown = False

    def bootup(self) -> None:
        with self._lock:
            assert self._pool is not None
            self._pool.event.wait()

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.thread.join()


class Session:
    """As a library's. `__init__` is not always reached, or finished."""

    mpi_pool: Any
    thread_pool: Any


@pytest.mark.parametrize(
    "session",
    [
        pytest.param(None, id="none"),
        pytest.param(Session(), id="never initialised"),
        pytest.param(types.SimpleNamespace(mpi_pool=None, thread_pool=None), id="not started"),
        pytest.param(types.SimpleNamespace(mpi_pool=object()), id="of another kind"),
        pytest.param(types.SimpleNamespace(mpi_pool=Executor(None)), id="its pool not started"),
        pytest.param(Executor(None), id="an executor alone, not started"),
    ],
)
def test_a_partly_built_session_is_released_quietly(session: object) -> None:
    assert release(session, reason="the ranks are dead")


def test_a_released_session_is_never_waited_for_again() -> None:
    pool = Pool()
    executor = Executor(pool)
    session = types.SimpleNamespace(mpi_pool=executor)

    assert release(session, reason="the ranks are dead")

    executor.shutdown()
    assert pool.thread.is_alive(), "left where it stands"
    assert executor._broken == "the ranks are dead"
    pool.let_go.set()


def test_whoever_waits_for_the_pool_to_start_is_woken() -> None:
    pool = Pool()
    executor = Executor(pool)
    waiting = threading.Thread(target=executor.bootup, daemon=True)
    waiting.start()
    while not executor._lock.locked():
        pass

    assert release(executor, reason="the ranks are dead")

    waiting.join(5.0)
    assert not waiting.is_alive()
    pool.let_go.set()


def test_what_has_not_reached_a_rank_fails_and_what_has_is_left_alone() -> None:
    pool = Pool()
    running: Future[None] = Future()
    queued: Future[None] = Future()
    pool.queue.put((queued, "task"))
    pool.queue.put(None)

    assert release(Executor(pool), reason="the ranks are dead")

    assert not running.done()
    with pytest.raises(BrokenExecutor, match="the ranks are dead"):
        queued.result(timeout=0)
    assert list(pool.queue) == [None], "should the thread come back, it is to end"
    pool.let_go.set()


def test_a_pool_of_threads_is_released_with_the_session() -> None:
    let_go = threading.Event()
    thread_pool = ThreadPoolExecutor(1)
    thread_pool.submit(let_go.wait)

    assert release(types.SimpleNamespace(thread_pool=thread_pool), reason="the ranks are dead")

    thread_pool.shutdown(wait=True)
    let_go.set()


def test_a_future_that_has_ended_stays_as_it_is() -> None:
    future: Future[int] = Future()
    future.set_result(1)
    fail(future, EOFError())

    assert future.result() == 1
