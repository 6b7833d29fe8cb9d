"""Waiting for descriptors of every size, as an engine and an acceptor do."""

from __future__ import annotations

import fcntl
import os
import resource
import threading
import time
from typing import TYPE_CHECKING

import pytest

from fastserve.readable import wait_readable

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBERS = [3, 2000]  # below and above what select(2) knows


@pytest.fixture(params=NUMBERS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Two event counters whose descriptors are at least so large."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] <= request.param + 2:
        pytest.skip("so many descriptors are not allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    small = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(2)]
    one, other = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, request.param) for fd in small)
    yield one, other
    for fd in (*small, one, other):
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_only_what_is_readable_is_told(pair: tuple[int, int]) -> None:
    assert wait_readable(*pair, timeout_s=0.0) == []
    os.eventfd_write(pair[1], 1)
    assert wait_readable(*pair, timeout_s=30.0) == [pair[1]]
    os.eventfd_write(pair[0], 1)
    assert wait_readable(*pair, timeout_s=30.0) == list(pair)


def test_it_waits_until_the_time_is_up_and_no_longer_than_it_must(pair: tuple[int, int]) -> None:
    began_s = time.monotonic()
    assert wait_readable(*pair, timeout_s=0.05) == []
    assert 0.04 < time.monotonic() - began_s < 20
    writer = threading.Timer(0.05, os.eventfd_write, (pair[0], 1))
    writer.start()
    assert wait_readable(*pair, timeout_s=60.0) == [pair[0]]
    assert time.monotonic() - began_s < 40
    writer.join()


def test_the_end_of_a_pipe_is_something_to_read() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert wait_readable(reading, timeout_s=30.0) == [reading]
    os.close(reading)
