"""Who used the CPU: a server's processes, to the nanosecond, and everyone else on its cores.

A process's time is read from its CPU clock, which is what /proc/PID/stat rounds to ticks of 10 ms:
too coarse for a window of seconds in which a server uses a few percent of a core.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# The columns of /proc/stat (proc(5)) in which a core was not at its owner's disposal: user, nice,
# system, irq, softirq, and steal, in which another virtual machine had it.
_BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)
# CPUCLOCK_SCHED of Linux: see clock_getcpuclockid(3), which Python does not have.
_SCHED_CLOCK = 2


def parse_cores(text: str) -> frozenset[int]:
    """Core numbers as taskset(1) writes them: 0,2-5."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of cores, such as 0,2-5")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cores)


@contextlib.contextmanager
def pinned(cores: Collection[int] | None) -> Iterator[None]:
    """What is spawned in here runs on `cores` alone (None: wherever we may)."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def process_cpu_s(pid: int) -> float | None:
    """The CPU time that a process's threads have used, ended ones included; None: it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _SCHED_CLOCK)
    except OSError:
        return None


def cores_busy_s(cores: Collection[int], *, stat: str | None = None) -> float:
    """How long `cores` have been busy since the machine started, added up."""
    wanted = {f"cpu{core}" for core in cores}
    if stat is None:
        with open("/proc/stat", encoding="ascii") as file:
            stat = file.read()
    rows = (line.split() for line in stat.splitlines())
    ticks = sum(int(row[at]) for row in rows if row and row[0] in wanted for at in _BUSY_COLUMNS)
    return ticks / _TICKS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The clocks at one moment."""

    at_s: float
    by_process: dict[int, float]
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Between two readings: the server's CPU seconds, and the share of its cores others used."""

    server_s: float
    others_share: float


class Meter:
    """Reads the clocks of a process, all its descendants, and the cores they run on."""

    def __init__(self, pid: int, *, cores: Collection[int]) -> None:
        self._root = psutil.Process(pid)
        self._cores = frozenset(cores)
        self.readings: list[Reading] = []

    def read(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = [self._root, *self._root.children(recursive=True)]
            clocks = {process.pid: process_cpu_s(process.pid) for process in tree}
            self.readings.append(
                Reading(
                    at_s=time.monotonic(),
                    by_process={pid: used for pid, used in clocks.items() if used is not None},
                    busy_s=cores_busy_s(self._cores),
                )
            )

    def usage(self) -> Usage:
        """Between the first reading and the last."""
        return usage(self.readings[0], self.readings[-1], num_cores=len(self._cores))


def usage(first: Reading, last: Reading, *, num_cores: int) -> Usage:
    """What happened between two readings. A process that came in between began at zero."""
    server_s = sum(used - first.by_process.get(pid, 0.0) for pid, used in last.by_process.items())
    elapsed_s = max(last.at_s - first.at_s, 1e-9)
    others_s = last.busy_s - first.busy_s - server_s
    return Usage(server_s=server_s, others_share=max(0.0, others_s) / elapsed_s / num_cores)
