"""Calls on a thread of their own, waited for on a descriptor."""

from __future__ import annotations

import os
import select
import threading

import pytest

from fastserve.engine.offload import Offload

TIMEOUT_S = 10.0


def wait(offload: Offload[int]) -> int:
    assert select.select((offload.fd,), (), (), TIMEOUT_S)[0]
    return offload.result()


def test_a_call_runs_elsewhere_and_its_result_comes_by_descriptor() -> None:
    offload: Offload[int] = Offload("test")
    threads = []
    for _ in range(3):
        offload.start(threading.get_ident)
        threads.append(wait(offload))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    assert not select.select((offload.fd,), (), (), 0)[0], "taken, so no longer readable"
    assert offload.close(timeout_s=TIMEOUT_S)


def test_what_a_call_raises_is_raised_by_its_result_and_the_next_call_runs() -> None:
    offload: Offload[int] = Offload("test")
    offload.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        wait(offload)
    offload.start(lambda: 5)
    assert wait(offload) == 5
    assert offload.close(timeout_s=TIMEOUT_S)


def test_closing_waits_for_the_call_under_way_but_not_for_ever() -> None:
    offload: Offload[int] = Offload("test")
    gate = threading.Event()
    offload.start(lambda: int(gate.wait(TIMEOUT_S)))
    assert not offload.close(timeout_s=0.01)
    gate.set()
    assert offload.close(timeout_s=TIMEOUT_S)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(offload.fd)
