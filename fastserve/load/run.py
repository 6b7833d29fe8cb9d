"""Carries out a plan: runs the programs, shows how far they are, and adds up what they found."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastserve.load.build import LoadError, build
from fastserve.load.cpu import pinned
from fastserve.load.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from fastserve.load.plan import Plan

# From the start of the programs to the beginning of the load: they read their plan meanwhile.
_LEAD_S = 0.2
_LEAD_S_PER_MIB = 0.05
# What a program may take beyond its plan before it is given up.
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far all programs are. Requests and chunks count from the window's beginning."""

    in_flight: int = 0
    requests: int = 0
    chunks: int = 0
    failures: int = 0


@dataclass(slots=True, kw_only=True)
class Result:
    """What was counted in the window; failures are those of the whole run.

    `chunks` have text; `merged` came together with another of their stream. `requests` are those
    answered in full. `ttft` and `latency` are of requests that were due in the window, `itl` of
    chunks that came in it. `cpu_s` is the load generator's own.
    """

    window_s: float = 0.0
    chunks: int = 0
    merged: int = 0
    reads: int = 0
    bytes: int = 0
    requests: int = 0
    answered: int = 0
    unfinished: int = 0
    opened: int = 0
    cpu_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    notes: list[str] = field(default_factory=list)

    def add(self, found: dict[str, Any]) -> None:
        """Add what one program printed."""
        for name in ("chunks", "merged", "reads", "bytes", "requests", "answered", "unfinished"):
            setattr(self, name, getattr(self, name) + found[name])
        self.opened += found["opened"]
        self.window_s = max(self.window_s, found["window_ns"] / 1e9)
        self.cpu_s += found["cpu_ns"] / 1e9
        self.failures += Counter(found["failures"])
        self.ttft += Histogram.from_json(found["ttft"])
        self.itl += Histogram.from_json(found["itl"])
        self.latency += Histogram.from_json(found["latency"])


def run(
    plan: Plan,
    *,
    cores: Collection[int] | None = None,
    processes: int = 1,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_window_edge: Callable[[], None] = lambda: None,
) -> Result:
    """Carry out `plan` with that many programs on `cores`. Raises LoadError.

    `on_window_edge` is called when the window begins and when it ends.
    """
    program = build()
    processes = min(processes, plan.connections)
    parts = [plan.part(index, of=processes) for index in range(processes)]
    # The times in a plan are all that depends on when it begins, and are not what takes long.
    size_mib = processes * len(plan.render(begin_ns=0)) / (1 << 20)
    begin_ns = time.monotonic_ns() + round((_LEAD_S + _LEAD_S_PER_MIB * size_mib) * 1e9)
    programs: list[subprocess.Popen[bytes]] = []
    result = Result()
    try:
        for part in parts:
            with pinned(cores):
                programs.append(_spawn([str(program)]))
            _hand_over(programs[-1], part.render(begin_ns=begin_ns))
        edges_s = [begin_ns / 1e9 + plan.warm_s, begin_ns / 1e9 + plan.warm_s + plan.window_s]
        give_up_s = begin_ns / 1e9 + plan.duration_s + _GRACE_S
        far: dict[int, Counter[str]] = {}
        for pid, line in _lines(programs, edges_s, on_window_edge, give_up_s=give_up_s):
            message = json.loads(line)
            if "progress" in message:
                far[pid] = Counter(message["progress"])
                on_progress(Progress(**sum(far.values(), Counter())))
            else:
                result.add(message["result"])
        for each in programs:
            _collect(each, result)
    finally:
        for each in programs:
            each.kill()
            each.wait()
            for stream in (each.stdin, each.stdout, each.stderr):
                assert stream is not None
                stream.close()
    return result


def _spawn(command: list[str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)


def _hand_over(program: subprocess.Popen[bytes], plan: bytes) -> None:
    assert program.stdin is not None
    rest = memoryview(plan)
    try:
        while rest:
            rest = rest[program.stdin.write(rest) :]
    except BrokenPipeError:
        pass  # It did not like what it read, and says why: see _collect.


def _lines(
    programs: list[subprocess.Popen[bytes]],
    edges_s: list[float],
    on_edge: Callable[[], None],
    *,
    give_up_s: float,
) -> Iterator[tuple[int, bytes]]:
    """What the programs print, each line with its pid, until all have ended.

    Edges are told on the way.
    """
    kept = {program.pid: b"" for program in programs}
    with selectors.DefaultSelector() as selector:
        for program in programs:
            assert program.stdout is not None
            selector.register(program.stdout, selectors.EVENT_READ, program)
        while selector.get_map():
            now_s = time.monotonic()
            if edges_s and now_s >= edges_s[0]:
                edges_s.pop(0)
                on_edge()
                continue
            if now_s > give_up_s:
                raise LoadError("the load generator did not end in time")
            wait_s = max(0.0, min(edges_s[0] - now_s if edges_s else 1.0, 1.0))
            for key, _ in selector.select(wait_s):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fd)
                pid = key.data.pid
                *lines, kept[pid] = (kept[pid] + data).split(b"\n")
                yield from ((pid, line) for line in lines)
    # A run that ended early, as a trace may, ends its window with it.
    for _ in edges_s:
        on_edge()


def _collect(program: subprocess.Popen[bytes], result: Result) -> None:
    assert program.stderr is not None
    said = program.stderr.read().decode(errors="replace").strip()
    if program.wait(_GRACE_S):
        raise LoadError(said or f"the load generator exited with {program.returncode}")
    for line in said.splitlines():
        note = line.removeprefix("loadgen: ").rstrip(", ")
        if note not in result.notes:
            result.notes.append(note)
