"""Every work on every server, in rounds that interleave them.

The server has some cores and the load has others. Whatever else ran on the server's cores makes a
figure wrong, so a measurement that was disturbed is repeated, a few times, and marked if that does
not help. Rounds start every server anew: the figures are of several processes, not of one.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.servers import running
from fastserve.load.build import LoadError
from fastserve.load.chats import chat_bodies
from fastserve.load.cpu import Meter
from fastserve.load.plan import Plan, Request, target_of
from fastserve.load.run import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.servers import Running, Server
    from bench.works import Work
    from fastserve.load.run import Result

# The share of the server's cores that others may use before a measurement is not trusted.
OTHERS_SHARE_MAX = 0.15
# Above this share of its cores the load generator, not the server, may be what limits.
LOAD_SHARE_MAX = 0.9
# The load's steady state before the window: what a server must warm up for.
_SETTLE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to measure. Cores are numbers; `attempts_max` bounds the repetitions of one cell."""

    rounds: int
    window_s: float
    drain_s: float
    attempts_max: int
    server_cores: frozenset[int]
    load_cores: frozenset[int]
    model: str | None
    start_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One work on one server, once. `cpu_us` is per chunk of a stream, or per request."""

    server: str
    work: str
    round: int
    cpu_us: float | None
    per_s: float
    merged_share: float
    ttft_ms: dict[str, float | None]
    itl_ms: dict[str, float | None]
    latency_ms: dict[str, float | None]
    others_share: float
    load_share: float
    load_us: float | None
    failures: dict[str, int]
    unfinished: int
    notes: list[str]

    @property
    def quiet(self) -> bool:
        """Whether others left the server's cores alone."""
        return self.others_share <= OTHERS_SHARE_MAX


QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


def compare(
    servers: Sequence[Server],
    works: Sequence[Work],
    options: Options,
    *,
    say: Callable[[str], None],
) -> Iterator[Cell]:
    """Measure, and yield every cell as it is done, disturbed ones included."""
    broken: set[str] = set()
    steps_ms = list(dict.fromkeys(work.step_ms for work in works))
    for round_number in range(1, options.rounds + 1):
        for step_ms in steps_ms:
            for server in rotated(servers, round_number):
                if server.name in broken:
                    continue
                paced = [work for work in works if work.step_ms == step_ms]
                try:
                    yield from _on_server(server, paced, options, round_number, say)
                except LoadError as error:
                    broken.add(server.name)
                    say(f"{server.name} is left out: {error}")


def rotated(servers: Sequence[Server], by: int) -> list[Server]:
    """Another one is first in each round, lest order matter."""
    by %= len(servers)
    return [*servers[by:], *servers[:by]]


def _on_server(
    server: Server,
    works: Sequence[Work],
    options: Options,
    round_number: int,
    say: Callable[[str], None],
) -> Iterator[Cell]:
    with running(
        server,
        step_ms=works[0].step_ms,
        model=options.model,
        cores=options.server_cores,
        start_timeout_s=options.start_timeout_s,
    ) as live:
        for work in works:
            for attempt in range(1, options.attempts_max + 1):
                cell = measure(server, live, work, options, round_number=round_number)
                say(_line(cell, attempt=attempt))
                yield cell
                if cell.quiet:
                    break


def measure(
    server: Server, live: Running, work: Work, options: Options, *, round_number: int
) -> Cell:
    """One window of one work. Raises LoadError."""
    meter = Meter(live.pid, cores=options.server_cores)
    result = run(
        plan_of(work, live, options, check=server.paced),
        cores=options.load_cores,
        processes=len(options.load_cores),
        on_window_edge=meter.read,
    )
    if len(meter.readings) < 2:
        raise LoadError(f"it died during {work.name}")
    usage = meter.usage()
    done = result.chunks if work.stream else result.requests
    return Cell(
        server=server.name,
        work=work.name,
        round=round_number,
        cpu_us=usage.server_s / done * 1e6 if done else None,
        per_s=done / result.window_s,
        merged_share=result.merged / result.chunks if result.chunks else 0.0,
        ttft_ms={name: result.ttft.quantile_ms(share) for name, share in QUANTILES.items()},
        itl_ms={name: result.itl.quantile_ms(share) for name, share in QUANTILES.items()},
        latency_ms={name: result.latency.quantile_ms(share) for name, share in QUANTILES.items()},
        others_share=usage.others_share,
        load_share=result.cpu_s / result.window_s / len(options.load_cores),
        load_us=result.cpu_s / done * 1e6 if done else None,
        failures=dict(+result.failures),
        unfinished=result.unfinished,
        notes=_notes(result),
    )


def plan_of(work: Work, live: Running, options: Options, *, check: bool) -> Plan:
    """A closed loop whose clients come one by one over the time of an answer.

    So they are at all places of their answers, as independent users are, and a window of any length
    sees beginnings, middles and ends in their proportions. `check`: answers must be exactly as long
    as was asked for, which a real model may not make them.
    """
    bodies = chat_bodies(model=live.model, tokens=work.tokens, stream=work.stream)
    expected = work.tokens if check else 0
    return Plan(
        target=target_of(f"http://127.0.0.1:{live.port}"),
        requests=tuple(Request(body=body, expected_chunks=expected) for body in bodies),
        connections=work.concurrency,
        ramp_s=work.answer_s,
        warm_s=work.answer_s + _SETTLE_S,
        window_s=options.window_s,
        drain_s=options.drain_s + work.answer_s,
    )


def median_of(cells: Sequence[Cell], value: Callable[[Cell], float | None]) -> float | None:
    """The median over the quiet cells, or over all where none was quiet; None without values."""
    chosen = [cell for cell in cells if cell.quiet] or cells
    values = [found for cell in chosen if (found := value(cell)) is not None]
    return statistics.median(values) if values else None


def _notes(result: Result) -> list[str]:
    notes = list(result.notes)
    if result.unfinished:
        notes.append(f"{result.unfinished} answers did not end in time")
    return notes


def _line(cell: Cell, *, attempt: int) -> str:
    cost = "-" if cell.cpu_us is None else f"{cell.cpu_us:.1f}"
    marks = "" if cell.quiet else f" disturbed ({cell.others_share:.0%} by others)"
    marks += "" if attempt == 1 else f" attempt {attempt}"
    marks += f" failures {cell.failures}" if cell.failures else ""
    return (
        f"round {cell.round}  {cell.server:<20} {cell.work:<24} {cost:>7} us  "
        f"{cell.per_s:>8.0f}/s{marks}"
    )
