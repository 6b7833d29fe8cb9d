"""The parts of aims.py: each starts servers, measures, and yields figures with their aims.

Knows nothing of how figures are shown.
"""

from __future__ import annotations

import contextlib
import http.client
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from bench.compare import OTHERS_SHARE_MAX, Options, measure
from bench.servers import Server, fastserve, running
from bench.works import Work
from fastserve.load.build import LoadError
from fastserve.load.chats import chat_bodies
from fastserve.load.cpu import Meter
from fastserve.load.plan import Plan, Request, poisson, target_of
from fastserve.load.run import run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.compare import Cell
    from bench.servers import Running
    from fastserve.load.run import Result

_START_TIMEOUT_S = 60.0
_DRAIN_S = 5.0
_ATTEMPTS_MAX = 3
_POLL_S = 0.01
# Until connections that were closed are gone, and acceptors have done what they start with.
_SETTLE_S = 1.0

ACCEPTOR_READY_S_MAX = 0.7
# The greatest departure from an equal share, in percent.
SPREAD_PERCENT_MAX = 10.0
TTFT_ADDED_MS_MAX = 3.0
ITL_ADDED_MS_MAX = 5.0

PACED = Work(stream=True, tokens=64, step_ms=10, concurrency=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much to measure, and on which cores; aims.py's flags say what each is for."""

    server_cores: frozenset[int]
    load_cores: frozenset[int]
    window_s: float
    frontends: int
    starts: int

    def options(self) -> Options:
        return Options(
            rounds=1,
            window_s=self.window_s,
            drain_s=_DRAIN_S,
            attempts_max=_ATTEMPTS_MAX,
            server_cores=self.server_cores,
            load_cores=self.load_cores,
            model=None,
            start_timeout_s=_START_TIMEOUT_S,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A value beside the most that it should be, if there is such a thing. `quiet`: undisturbed."""

    name: str
    value: float
    unit: str
    aim: float | None = None
    quiet: bool = True

    @property
    def met(self) -> bool | None:
        """None: there is no aim."""
        return None if self.aim is None else self.value <= self.aim


# ---- Starting


def startup(setting: Setting) -> Iterator[Figure]:
    """From an acceptor's process to its first answer, and from the command to a ready server.

    On all cores: a start is not measured against a load.
    """
    for frontends in dict.fromkeys((1, setting.frontends)):
        first_s, ready_s = zip(*(_start(frontends) for _ in range(setting.starts)), strict=True)
        yield Figure(
            name=f"K={frontends}: an acceptor answers",
            value=statistics.median(first_s),
            unit="s",
            aim=ACCEPTOR_READY_S_MAX if frontends == 1 else None,
        )
        yield Figure(
            name=f"K={frontends}: the server is ready", value=statistics.median(ready_s), unit="s"
        )


def _start(frontends: int) -> tuple[float, float]:
    """Seconds from an acceptor's process to an answer, and from the server's process to ready."""
    with running(
        fastserve(frontends=frontends), step_ms=1, model=None, cores=None,
        start_timeout_s=_START_TIMEOUT_S, until_models=False,
    ) as live:  # fmt: skip
        answered_s = _when(live.port, "/health", any_status=True)
        ready_s = _when(live.port, "/ready", any_status=False)
        began_s = psutil.Process(live.pid).create_time()
        acceptors_s = [process.create_time() for process in acceptors(live.pid)]
    return answered_s - min(acceptors_s), ready_s - began_s


def _when(port: int, path: str, *, any_status: bool) -> float:
    """The time of day at which `path` is first answered, or first answered with 200."""
    give_up_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < give_up_s:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_TIMEOUT_S)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", path)
            if connection.getresponse().status == 200 or any_status:
                return time.time()
        time.sleep(_POLL_S)
    raise LoadError(f"{path} was not answered within {_START_TIMEOUT_S:g} s")


def acceptors(pid: int) -> list[psutil.Process]:
    """The acceptors of a server."""
    return [
        process
        for process in psutil.Process(pid).children(recursive=True)
        if "acceptor" in " ".join(process.cmdline())
    ]


# ---- Connections


def spread(setting: Setting) -> Iterator[Figure]:
    """How far an acceptor's share of connections departs from an equal one, in percent."""
    server = fastserve(frontends=setting.frontends)
    with _server(setting, step_ms=1, server=server) as live:
        for number in (64, 800):
            time.sleep(_SETTLE_S)
            with contextlib.ExitStack() as stack:
                for _ in range(number):
                    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30.0)
                    stack.callback(connection.close)
                    connection.request("GET", "/version")
                    connection.getresponse().read()
                held = [_held(process) for process in acceptors(live.pid)]
            if sum(held) != number:
                raise LoadError(f"{sum(held)} of {number} connections are held")
            yield Figure(
                name=f"{number} kept-alive connections over {len(held)}",
                value=departure_percent(held),
                unit="% from equal",
                aim=SPREAD_PERCENT_MAX,
            )


def departure_percent(shares: Sequence[int]) -> float:
    """The greatest departure of a share from the mean, in percent of the mean."""
    mean = statistics.mean(shares)
    return max(abs(share - mean) for share in shares) / mean * 100


def _held(process: psutil.Process) -> int:
    return sum(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("tcp"))


# ---- Latency


def latency(setting: Setting) -> Iterator[Figure]:
    """What the host adds to the engine's own time, at 256 streams of 10 ms.

    The engine's own is what a request would wait with a host that takes no time: for the step that
    begins next, and that step. A Poisson arrival finds a step at any place of it, so that is a step
    and a half; in a closed loop whoever is answered asks again as the next step has just begun, and
    it is two.
    """
    with _server(setting, step_ms=PACED.step_ms) as live:
        cell = _quiet_cell(live, PACED, setting)
        yield from _latencies(
            "closed loop",
            cell.ttft_ms["p50"],
            cell.itl_ms["p99"],
            own_ms=2 * PACED.step_ms,
            quiet=cell.quiet,
        )
        meter = Meter(live.pid, cores=setting.server_cores)
        result = run(_arrivals(live, setting), cores=setting.load_cores, on_window_edge=meter.read)
        _check(result)
        yield from _latencies(
            "Poisson",
            result.ttft.quantile_ms(0.5),
            result.itl.quantile_ms(0.99),
            own_ms=1.5 * PACED.step_ms,
            quiet=meter.usage().others_share <= OTHERS_SHARE_MAX,
        )


def _latencies(
    loop: str, ttft_ms: float | None, itl_ms: float | None, *, own_ms: float, quiet: bool
) -> Iterator[Figure]:
    if ttft_ms is None or itl_ms is None:
        raise LoadError("no stream began in the window: it is too short")
    yield Figure(name=f"{loop}: the engine's own TTFT", value=own_ms, unit="ms", quiet=quiet)
    for name, value, aim in (
        ("TTFT p50 over the engine's", ttft_ms - own_ms, TTFT_ADDED_MS_MAX),
        ("ITL p99 over the step", itl_ms - PACED.step_ms, ITL_ADDED_MS_MAX),
    ):
        yield Figure(name=f"{loop}: {name}", value=value, unit="ms", aim=aim, quiet=quiet)


def _arrivals(live: Running, setting: Setting) -> Plan:
    """As many streams at once, on average, as PACED has, which come when they like."""
    bodies = chat_bodies(model=live.model, tokens=PACED.tokens, stream=True)
    warm_s = 2 * PACED.answer_s
    sends = poisson(
        rate_per_s=PACED.concurrency / PACED.answer_s,
        duration_s=warm_s + setting.window_s,
        num_requests=len(bodies),
        seed=0,
    )
    return Plan(
        target=target_of(f"http://127.0.0.1:{live.port}"),
        requests=tuple(Request(body=body, expected_chunks=PACED.tokens) for body in bodies),
        sends=tuple(sends),
        # So many that none ever waits for a free connection.
        connections=4 * PACED.concurrency,
        warm_s=warm_s,
        window_s=setting.window_s,
        drain_s=_DRAIN_S,
    )


# ---- Common to the parts


@contextlib.contextmanager
def _server(setting: Setting, *, step_ms: float, server: Server | None = None) -> Iterator[Running]:
    with running(
        server or fastserve(frontends=1),
        step_ms=step_ms,
        model=None,
        cores=setting.server_cores,
        start_timeout_s=_START_TIMEOUT_S,
    ) as live:
        _when(live.port, "/ready", any_status=False)
        yield live


def _quiet_cell(live: Running, work: Work, setting: Setting) -> Cell:
    """A cell that nobody disturbed, or else the last of some."""
    server = fastserve(frontends=1)
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        cell = measure(server, live, work, setting.options(), round_number=1)
        if cell.failures:
            raise LoadError(f"{work.name}: failures {cell.failures}")
        if cell.quiet or attempt == _ATTEMPTS_MAX:
            return cell
    raise AssertionError("an attempt returns")


def _check(result: Result) -> None:
    if +result.failures:
        raise LoadError(f"failures: {dict(+result.failures)} {result.notes}")
