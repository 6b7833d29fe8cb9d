"""A thread that never ends, and an interpreter that ends all the same."""

from __future__ import annotations

import subprocess
import sys
import threading
import types

import pytest

from fastserve.engine.mpi_exit import ExitJoin, exit_join, forget_thread

# Far more than an interpreter needs to end; one that is held never does.
EXIT_TIMEOUT_S = 20.0

PROLOGUE = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from fastserve.engine.mpi_exit import forget_thread, forget_thread_pool

def stand():
    time.sleep(3600)

def finish_late():
    time.sleep(0.3)
    print("finished")
"""


def run(code: str) -> str:
    """Run `code` in an interpreter of its own until that ends by itself; return what it said."""
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + code],
        capture_output=True,
        timeout=EXIT_TIMEOUT_S,
        check=True,
        text=True,
    )
    assert done.stderr == ""
    return done.stdout


def test_a_forgotten_thread_does_not_hold_the_interpreter_and_the_others_do() -> None:
    said = run(
        "standing = threading.Thread(target=stand)\n"
        "standing.start()\n"
        "threading.Thread(target=finish_late).start()\n"
        "print(forget_thread(standing), forget_thread(standing))\n"
    )
    assert said == "True True\nfinished\n"


def test_a_thread_that_is_not_forgotten_holds_it() -> None:
    """So that the test above shows something."""
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-c", PROLOGUE + "threading.Thread(target=stand).start()"],
            timeout=1.0,
            check=False,
        )


def test_a_forgotten_pool_holds_neither_its_shutdown_nor_the_interpreter() -> None:
    said = run(
        "pool = ThreadPoolExecutor(1)\n"
        "running, queued = pool.submit(stand), pool.submit(stand)\n"
        "print(forget_thread_pool(pool), queued.cancelled(), running.running())\n"
        "pool.shutdown(wait=True)\n"
    )
    assert said == "True True True\n"


def test_this_interpreter_has_a_way() -> None:
    assert exit_join() is not ExitJoin.UNKNOWN


def shape(**names: object) -> types.ModuleType:
    module = types.ModuleType("threading")
    module.__dict__.update(names)
    return module


@pytest.mark.parametrize(
    ("module", "way"),
    [
        pytest.param(
            shape(_shutdown_locks=set(), _shutdown_locks_lock=threading.Lock()),
            ExitJoin.LOCKS,
            id="CPython 3.8 to 3.12",
        ),
        pytest.param(shape(_thread_shutdown=print), ExitJoin.CALL, id="CPython 3.13"),
        pytest.param(shape(_shutdown_locks=set()), ExitJoin.UNKNOWN, id="half of what is needed"),
        pytest.param(shape(), ExitJoin.UNKNOWN, id="none of it"),
    ],
)
def test_the_way_is_found_by_its_parts(module: types.ModuleType, way: ExitJoin) -> None:
    assert exit_join(module) is way


def test_each_way_does_what_it_says() -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    locks = {getattr(thread, "_tstate_lock", None), "another's"}
    by_locks = shape(_shutdown_locks=locks, _shutdown_locks_lock=threading.Lock())
    by_call = shape(_thread_shutdown=print)
    try:
        assert forget_thread(thread, module=by_locks)
        assert forget_thread(thread, module=by_call)
        assert not forget_thread(thread, module=shape()), "only os._exit is left"
    finally:
        leave.set()
        thread.join()

    assert locks == {"another's"}
    assert by_call.__dict__["_thread_shutdown"] is not print
    assert forget_thread(thread, module=shape()), "it has ended, so it holds nothing"


def test_a_daemon_holds_nothing() -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, daemon=True)
    thread.start()

    assert forget_thread(thread, module=shape())
    leave.set()
    thread.join()
