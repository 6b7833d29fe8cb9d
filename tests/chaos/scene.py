"""The scene of a blow: a server under load, with hands on its processes; and what is done there.

Knows nothing of kinds, nor of what must hold after a blow.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from tests.e2e.harness import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.load import Load
    from tests.e2e.harness import Server

Engine = Literal["sim", "embedded"]

# The settings that the waits of some kinds are made for; see FLAGS in driver.py.
SILENT_TIMEOUT_S = 3.0
STALL_KILL_S = 6.0
DRAIN_TIMEOUT_S = 10.0
START_TIMEOUT_S = 30.0
# Of a server of many acceptors, which start one after the other.
START_TIMEOUT_S_MAX = 100.0
# Longer than the default, so that what a slow machine adds does not hide what it is for.
DEAD_EXIT_TIMEOUT_S = 10.0
SHORT_DRAIN_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One of the plan: after `after_s` of load, with `lane` the first victim where there are many,
    and `hold_s`, from 0 to 1, the place within the kind's own range of waits."""

    kind: str
    after_s: float
    lane: int
    hold: float
    seed: int


@dataclass(slots=True, kw_only=True)
class Struck:
    """What was done. `began_s`: when anything was, as its caller knows; `at_s`: from when its cost
    is counted. `held`: the client ports of connections that died with their acceptor. `recovered`:
    whether the server is whole again."""

    at_s: float
    began_s: float = 0.0
    held: set[int] = field(default_factory=set)
    recovered: Callable[[], bool] = lambda: True


class Scene:
    """A running server under load, with hands on its processes."""

    def __init__(
        self, server: Server, load: Load, *, engine: Engine, frontends: int, ranks: int = 1
    ) -> None:
        self.engine = engine
        self.server = server
        self.load = load
        self.frontends = frontends
        self.ranks = ranks

    def processes(self) -> dict[str, psutil.Process]:
        """Every process by name: engine, supervisor, acceptor 0, ..."""
        return {
            title.removeprefix("fastserve: "): process
            for title, process in self.server.remember_processes().items()
            if title.startswith("fastserve: ")
        }

    def find(self, name: str) -> psutil.Process:
        return self.server.find(name)

    def replaced(self, victims: dict[str, int]) -> bool:
        """Whether each of the victims, name to pid, has a successor that serves."""
        now = self.processes()
        if any(name not in now or now[name].pid == pid for name, pid in victims.items()):
            return False
        if len(now) != self.frontends + 1 + self.ranks:
            return False
        # Whoever of the acceptors answers.
        return all(self.server.get("/ready")[0] == 200 for _ in range(2))

    def held_by(self, *processes: psutil.Process) -> set[int]:
        """The ports of the clients that are connected to these processes, which stand still.

        They may not for long, and the kernel's table has thousands of connections that were: it is
        read once for all of them.
        """
        links = {
            os.readlink(fd)
            for process in processes
            for fd in Path(f"/proc/{process.pid}/fd").iterdir()
        }
        ports = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, _, _, _, _, _, _, inode, *_ = line.split()
            if f"socket:[{inode}]" in links and int(local[9:], 16) == self.server.port:
                ports.add(int(remote[9:], 16))
        return ports - {0}


def standing(process: psutil.Process) -> psutil.Process:
    """Wait until it has stopped: a signal takes its time. Raises psutil.NoSuchProcess."""
    wait_until(lambda: process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    return process
