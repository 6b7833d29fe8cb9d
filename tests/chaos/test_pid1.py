"""A server that is process 1 of its namespace, as in a container without an init.

Such a process inherits every orphan, and no signal has a default for it.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.chaos.asking import lasting
from tests.chaos.load import Load
from tests.e2e.harness import Server, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

UNSHARE = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")
# What may be added to what a second signal leaves to do, which is nothing.
AT_ONCE_S = 4.0


@cache
def why_not() -> str:
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        return "unshare and nsenter are not installed"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    return f"no namespace of processes: {tried.stderr.strip()}" if tried.returncode else ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be")


class Contained(Server):
    """`process` is unshare, which waits for the supervisor and exits as it does."""

    def supervisor(self) -> psutil.Process:
        return self.find("supervisor")

    def inside(self, *command: str) -> None:
        """Run a command in the server's namespace."""
        pid = str(self.supervisor().pid)
        subprocess.run(["nsenter", "-t", pid, "-p", "-m", *command], check=True)


@pytest.fixture
def server() -> Iterator[Contained]:
    contained = Contained(
        "--engine", "sim", "--frontends", "1", "--sim-step-ms", "4",
        "--engine-max-seq-len", "8192",
        program=(*UNSHARE, sys.executable, "-m", "fastserve"),
    )  # fmt: skip
    try:
        contained.wait_ready()
        yield contained
        contained.assert_nothing_left()
    finally:
        with contextlib.suppress(psutil.NoSuchProcess, AssertionError):
            contained.remember_processes()
        contained.kill_everything()


def test_it_reaps_what_it_inherits_and_obeys_a_signal_from_inside(server: Contained) -> None:
    supervisor = server.supervisor()
    children = {child.pid for child in supervisor.children()}
    # Each is left by a shell that exits before it, and so is the server's from then on.
    orphans = ("sh", "-c", "for each in 1 2 3 4 5; do (sleep 0.3 &) ; done")
    server.inside(*orphans)
    wait_until(lambda: len(supervisor.children()) == len(children) + 5)
    wait_until(lambda: {child.pid for child in supervisor.children()} == children)
    # Orphans that die beside a child of its own keep it from neither.
    before = server.find("acceptor 0")
    server.inside(*orphans)
    before.kill()
    wait_until(lambda: server.find("acceptor 0") != before)
    wait_until(lambda: server.get("/ready")[0] == 200)
    wait_until(lambda: len(supervisor.children()) == len(children))
    assert all(child.status() != psutil.STATUS_ZOMBIE for child in supervisor.children())
    server.inside("kill", "-TERM", "1")
    assert server.wait_exit() == 0


def test_a_second_signal_ends_it_at_once(server: Contained) -> None:
    with Load(lambda rng: lasting(rng, engine="sim"), seed="1", num_clients=0) as load:
        load.port = server.port
        assert load.ask(lasting(random.Random(1), engine="sim")).wait(30.0)
        supervisor = server.supervisor()
        supervisor.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready")[0] == 503)
        began_s = time.monotonic()
        supervisor.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 128 + signal.SIGTERM
        assert time.monotonic() - began_s < AT_ONCE_S
