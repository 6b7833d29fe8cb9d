"""`python -m bench flat`: what does not grow with what was served, or is in flight.

Two series on one server each, one acceptor and the sim engine on one core, the load on another:

served    the cost of a request, and the memory of every process, from the first thousand requests
          to the last of --requests; a leak or a slow-down would be a slope
streams   the cost of a chunk and the memory of a stream, from 1 to --streams of them in flight, at
          steps of --step-ms; each has 64 tokens

The cost is CPU time of the whole server, kernel included. With one stream a step is all there is to
share its cost, so a chunk is dearest there; what matters is that it does not rise again.
"""

from __future__ import annotations

import argparse
import resource
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import orjson
import psutil

from bench.servers import Server, running
from fastserve.load.chats import chat_bodies
from fastserve.load.cpu import Meter
from fastserve.load.plan import Plan, Request, target_of
from fastserve.load.run import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from bench.servers import Running

_STREAMS = (1, 16, 256, 1024, 4096)
_TOKENS = 64
_CLIENTS = 64
_WARM_S = 1.0
_DRAIN_S = 10.0
_START_TIMEOUT_S = 30.0
_MIB = 1 << 20

_SERVER = (
    "{python} -m fastserve --engine sim --sim-step-ms {step_ms} --port {port} --frontends 1 "
    "--sim-max-batch-size 8192 --limits-requests-in-flight-max 8192 --log-level warning"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One place of a series: `at` requests served before, or streams in flight.

    `cpu_us` is for a request, or a chunk. `uss_mib` is private memory, by process.
    """

    at: int
    cpu_us: float
    per_s: float
    uss_mib: dict[str, float]
    others_share: float


def served(*, number: int, slices: int, cores: tuple[int, int]) -> Iterator[Point]:
    """`number` requests of one token in so many windows on one server."""
    with _server(step_ms=0.0, core=cores[0]) as live:
        done = 0
        window_s = 1.0
        while done < number:
            plan = _plan(live, connections=_CLIENTS, tokens=1, stream=False, window_s=window_s)
            point, count = _measured(live, plan, cores, at=done)
            yield point
            done += max(count, 1)
            # Whatever the machine does: the slices are of about as many requests.
            window_s = max(1.0, min(number / slices / max(point.per_s, 1.0), 60.0))


def streams(*, most: int, step_ms: float, cores: tuple[int, int]) -> Iterator[Point]:
    """So many streams at a time, one server for each number."""
    for number in _STREAMS:
        if number > most:
            return
        with _server(step_ms=step_ms, core=cores[0]) as live:
            answer_s = _TOKENS * step_ms / 1000
            plan = _plan(
                live,
                connections=number,
                tokens=_TOKENS,
                stream=True,
                window_s=max(answer_s, 3.0),
                ramp_s=answer_s,
            )
            yield _measured(live, plan, cores, at=number)[0]


def main(argv: list[str]) -> int:
    """Print both series, and write them with --json."""
    asked = _arguments().parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cores = (asked.cores[0], asked.cores[1])
    found: dict[str, list[Point]] = {"served": [], "streams": []}
    print(_HEAD)
    for point in served(number=asked.requests, slices=asked.slices, cores=cores):
        found["served"].append(point)
        print(_line("served", point), flush=True)
    for point in streams(most=asked.streams, step_ms=asked.step_ms, cores=cores):
        found["streams"].append(point)
        print(_line("streams", point), flush=True)
    print(summary(found["served"], found["streams"]))
    if asked.json is not None:
        values = {name: [asdict(point) for point in points] for name, points in found.items()}
        asked.json.write(orjson.dumps(values, option=orjson.OPT_INDENT_2).decode())
    return 0


def summary(of_served: list[Point], of_streams: list[Point]) -> str:
    """What both series come to, in a sentence for each question."""
    lines = []
    # The first slice pays for what is made once.
    later = of_served[1:]
    if len(later) > 1:
        first, last = later[0], later[-1]
        grown = {name: last.uss_mib[name] - size for name, size in first.uss_mib.items()}
        lines.append(
            f"from request {first.at} to {last.at}: {first.cpu_us:.0f} to {last.cpu_us:.0f} us a "
            f"request ({last.cpu_us / first.cpu_us:.2f} times); grown by "
            + ", ".join(f"{name} {size:+.1f} MiB" for name, size in sorted(grown.items()))
        )
    if len(of_streams) > 1:
        few, many = of_streams[0], of_streams[-1]
        lines.append(
            f"from {few.at} to {many.at} streams: {few.cpu_us:.1f} to {many.cpu_us:.1f} us a chunk"
        )
        # What is made once for all is there by the last but one.
        fewer = of_streams[-2]
        each = {
            name: (size - fewer.uss_mib[name]) * 1024 / (many.at - fewer.at)
            for name, size in many.uss_mib.items()
        }
        lines.append(
            f"each stream from {fewer.at} on takes "
            + ", ".join(f"{name} {size:.1f} KiB" for name, size in sorted(each.items()))
        )
    return "\n".join(lines)


def _measured(live: Running, plan: Plan, cores: tuple[int, int], *, at: int) -> tuple[Point, int]:
    meter = Meter(live.pid, cores=[cores[0]])
    memory: dict[str, float] = {}

    def edge() -> None:
        meter.read()
        memory.update(_uss_mib(live.pid))

    result = run(plan, cores=[cores[1]], on_window_edge=edge)
    usage = meter.usage()
    count = result.chunks if plan.requests[0].expected_chunks else result.requests
    return (
        Point(
            at=at,
            cpu_us=usage.server_s / max(count, 1) * 1e6,
            per_s=count / result.window_s,
            uss_mib=memory,
            others_share=usage.others_share,
        ),
        # What came before the window and after it was served, too.
        result.requests + sum(result.failures.values()),
    )


def _plan(
    live: Running,
    *,
    connections: int,
    tokens: int,
    stream: bool,
    window_s: float,
    ramp_s: float = 0.0,
) -> Plan:
    bodies = chat_bodies(model=live.model, tokens=tokens, stream=stream)
    expected = tokens if stream else 0
    return Plan(
        target=target_of(f"http://127.0.0.1:{live.port}"),
        requests=tuple(Request(body=body, expected_chunks=expected) for body in bodies),
        connections=connections,
        ramp_s=ramp_s,
        warm_s=ramp_s + _WARM_S if ramp_s else 0.0,
        window_s=window_s,
        drain_s=_DRAIN_S + ramp_s,
    )


def _server(*, step_ms: float, core: int) -> AbstractContextManager[Running]:
    return running(
        Server(name="fastserve K=1", command=_SERVER),
        step_ms=step_ms,
        model=None,
        cores=[core],
        start_timeout_s=_START_TIMEOUT_S,
    )


def _uss_mib(pid: int) -> dict[str, float]:
    sizes = {}
    for process in psutil.Process(pid).children():
        title = " ".join(process.cmdline()).strip()
        if title.startswith("fastserve: "):
            sizes[title.removeprefix("fastserve: ")] = process.memory_full_info().uss / _MIB
    return sizes


_HEAD = f"{'series':<8} {'at':>7} {'us':>7} {'per s':>8}  private MiB"


def _line(series: str, point: Point) -> str:
    memory = ", ".join(f"{name} {size:.1f}" for name, size in sorted(point.uss_mib.items()))
    disturbed = f"  disturbed ({point.others_share:.0%} by others)"
    mark = disturbed if point.others_share > 0.15 else ""
    return f"{series:<8} {point.at:>7} {point.cpu_us:>7.1f} {point.per_s:>8.0f}  {memory}{mark}"


def _arguments() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m bench flat", description=__doc__)
    arguments.add_argument("--requests", type=int, default=100_000, help="of the series served")
    arguments.add_argument("--slices", type=int, default=10, help="it is told in")
    arguments.add_argument("--streams", type=int, default=4096, help="at the most")
    arguments.add_argument("--step-ms", type=float, default=100.0, help="of the series streams")
    arguments.add_argument("--cores", type=int, nargs=2, default=(0, 1), metavar=("SERVER", "LOAD"))
    arguments.add_argument("--json", type=argparse.FileType("w"), metavar="FILE")
    return arguments
