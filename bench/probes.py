"""How long a probe waits while a server streams, and a scrape: what an orchestrator sees of load.

    python -m bench.probes [--streams 2000] [--frontends 4] [--path /health --path /metrics]

Starts a server with the sim engine, keeps that many streams open on it, and meanwhile asks for each
path again and again, over a new connection each time, as probes do. Prints quantiles of how long an
answer took from before the connection was made, and how the streams fared.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.compare import Options, plan_of
from bench.servers import fastserve, running
from bench.works import Work
from fastserve.load.run import run

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTERVAL_S = 0.02
_TIMEOUT_S = 10.0
_REQUEST = b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


@dataclass(slots=True, kw_only=True)
class Probe:
    """One path, and how long each answer took. `failures` are answers that were no 200."""

    path: str
    took_s: list[float] = field(default_factory=list)
    failures: int = 0

    def ask(self, port: int) -> None:
        """Ask once, and keep how long it took."""
        began_s = time.monotonic()
        try:
            answer = _answer(port, self.path)
        except OSError:
            answer = b""
        self.took_s.append(time.monotonic() - began_s)
        self.failures += not answer.startswith(b"HTTP/1.1 200 ")

    def as_text(self) -> str:
        if not self.took_s:
            return f"{self.path:<14} never asked"
        shown = "  ".join(f"p{100 * q:g} {quantile(self.took_s, q) * 1e3:.1f}" for q in (0.5, 0.99))
        most_ms = max(self.took_s) * 1e3
        return (
            f"{self.path:<14} {shown}  max {most_ms:.1f} ms  "
            f"(n={len(self.took_s)}, failures {self.failures})"
        )


def quantile(values: list[float], share: float) -> float:
    """The smallest of `values` that so large a share of them does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def _answer(port: int, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(_REQUEST % path.encode())
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        return b"".join(parts)


@contextlib.contextmanager
def asking(probes: list[Probe], port: int) -> Iterator[threading.Event]:
    """Ask for every path in turn, from the moment at which the event is set to the end."""
    begin, end = threading.Event(), threading.Event()

    def ask() -> None:
        begin.wait()
        while not end.wait(_INTERVAL_S):
            for probe in probes:
                probe.ask(port)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield begin
    finally:
        end.set()
        begin.set()
        thread.join()


def main(argv: list[str] | None = None) -> int:
    """Measure and print. Returns 1 if an answer failed. Raises LoadError."""
    arguments = _arguments().parse_args(argv)
    probes = [Probe(path=path) for path in arguments.path or ["/health", "/metrics"]]
    cores = frozenset(os.sched_getaffinity(0))
    options = Options(
        rounds=1, window_s=arguments.seconds, drain_s=60.0, attempts_max=1, server_cores=cores,
        load_cores=cores, model=None, start_timeout_s=300.0,
    )  # fmt: skip
    tokens = math.ceil(arguments.seconds * 1000 / arguments.step_ms)
    work = Work(
        stream=True, tokens=tokens, step_ms=arguments.step_ms, concurrency=arguments.streams
    )
    server = fastserve(frontends=arguments.frontends)
    with running(
        server, step_ms=arguments.step_ms, model=None, cores=None, start_timeout_s=300.0
    ) as live:
        plan = plan_of(work, live, options, check=True)
        with asking(probes, live.port) as begin:
            # Set when the window begins, and again, which does nothing, when it ends.
            result = run(plan, on_window_edge=begin.set)
    rate = result.chunks / (result.window_s or 1.0)
    p99_ms = result.itl.quantile_ms(0.99) or 0.0
    print(f"{arguments.streams} streams, {rate:.0f} tokens/s, between tokens p99 {p99_ms:.1f} ms")
    for probe in probes:
        print(probe.as_text())
    return int(any(probe.failures for probe in probes) or bool(+result.failures))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--streams", type=int, default=2000, help="open all the time (%(default)s)")
    add("--frontends", type=int, default=4, help="acceptors (%(default)s)")
    add("--step-ms", type=float, default=200.0, help="between a stream's tokens (%(default)s)")
    add("--seconds", type=float, default=10.0, help="for which it is asked (%(default)s)")
    add("--path", action="append", help="what to ask for; may be repeated (/health, /metrics)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
