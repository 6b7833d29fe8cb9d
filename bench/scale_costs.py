"""The costs of scale.py, measured on this machine: a server with one acceptor, and an engine alone.

A cell's cost for each chunk is what is paid for the chunk, and its share of what is paid for the
message that brings it and for the request it belongs to. Two concurrencies part the first two;
requests for a single token show the third.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil

from bench import engine_tokens
from bench.compare import Options, plan_of
from bench.scale import Costs
from bench.servers import fastserve, running
from bench.works import Work
from fastserve.load.cpu import process_cpu_s
from fastserve.load.run import run

if TYPE_CHECKING:
    from bench.servers import Running

_TOKENS = 64
_FEW, _MANY = 64, 512
_LANES = 64
_RUNNING = 10_000
_WINDOW_S = 4.0


def measure() -> Costs:
    """Start servers, put load on them, and solve for the parts. Takes about a minute."""
    acceptor_few, _ = _each(_work(_TOKENS, concurrency=_FEW, step_ms=10))
    acceptor_many, _ = _each(_work(_TOKENS, concurrency=_MANY, step_ms=10))
    acceptor_request, engine_request = _each(
        Work(stream=False, tokens=1, step_ms=0, concurrency=_FEW)
    )
    acceptor_message = max(acceptor_few - acceptor_many, 0.0) / (1 / _FEW - 1 / _MANY)
    acceptor_chunk = acceptor_many - acceptor_message / _MANY - acceptor_request / _TOKENS
    one, many = (_engine_step_us(lanes=lanes) for lanes in (1, _LANES))
    engine_message = max(many - one, 0.0) / (_LANES - 1)
    return Costs(
        acceptor_chunk=acceptor_chunk,
        acceptor_message=acceptor_message,
        acceptor_request=acceptor_request,
        engine_token=(one - engine_message) / _RUNNING,
        engine_message=engine_message,
        engine_request=engine_request,
    )


def _work(tokens: int, *, concurrency: int, step_ms: float) -> Work:
    return Work(stream=True, tokens=tokens, step_ms=step_ms, concurrency=concurrency)


def _engine_step_us(*, lanes: int) -> float:
    figures = engine_tokens.measure(running=_RUNNING, lanes=lanes, seconds=_WINDOW_S)
    return figures["engine_cpu_us_per_token"] * _RUNNING


def _each(work: Work) -> tuple[float, float]:
    """CPU microseconds of the acceptor and of the engine process for each chunk, or request."""
    *server_cores, load_core = sorted(os.sched_getaffinity(0))
    options = Options(
        server_cores=frozenset(server_cores or {load_core}),
        load_cores=frozenset({load_core}),
        window_s=_WINDOW_S,
        rounds=1,
        attempts_max=1,
        drain_s=5.0,
        start_timeout_s=30.0,
        model=None,
    )
    with running(
        fastserve(frontends=1),
        step_ms=work.step_ms,
        model=None,
        cores=options.server_cores,
        start_timeout_s=options.start_timeout_s,
    ) as live:
        readings: list[tuple[float, float]] = []
        result = run(
            plan_of(work, live, options, check=True),
            cores=options.load_cores,
            on_window_edge=lambda: readings.append(_clocks(live)),
        )
    done = result.chunks if work.stream else result.requests
    (acceptor_began, engine_began), (acceptor_ended, engine_ended) = readings
    return (
        (acceptor_ended - acceptor_began) / done * 1e6,
        (engine_ended - engine_began) / done * 1e6,
    )


def _clocks(live: Running) -> tuple[float, float]:
    """The CPU seconds so far of the acceptor and of the engine process."""
    used = {}
    for child in psutil.Process(live.pid).children(recursive=True):
        title = " ".join(child.cmdline())
        for name in ("acceptor", "engine"):
            if title.startswith(f"fastserve: {name}"):
                used[name] = process_cpu_s(child.pid) or 0.0
    return used["acceptor"], used["engine"]
