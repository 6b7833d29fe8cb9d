"""What holds for every test: none leaves a process, a port, shared memory or a socket file."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# multiprocessing's own helper of this process: it ends with us.
_HELPERS = "multiprocessing.resource_tracker"
_DEADLINE_S = 10.0

# How long an example takes is the machine's affair; figures belong to bench/.
hypothesis.settings.register_profile("fastserve", deadline=None)
hypothesis.settings.load_profile("fastserve")


def _left() -> set[str]:
    """Whatever a server leaves behind that was not cleaned up, in words."""
    left = set()
    for child in psutil.Process().children(recursive=True):
        try:
            title = " ".join(child.cmdline()).strip()
            if _HELPERS not in title and child.status() != psutil.STATUS_ZOMBIE:
                left.add(f"process {child.pid} {title}")
        except psutil.NoSuchProcess:
            continue
    for each in psutil.Process().net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN:
            left.add(f"port {each.laddr}")
    left |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    temporary = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return left | {str(path) for path in temporary.glob("fastserve-run-*")}


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Checked once everything else has been torn down: fixtures of a session come last."""
    before = _left()
    yield
    give_up_s = time.monotonic() + _DEADLINE_S
    while (left := _left() - before) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert not left, "tests left something behind"


@pytest.hookimpl(trylast=True)  # after pytest's own choice by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow, unless the command line speaks of it."""
    if "slow" in config.getoption("markexpr"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
