"""A model of many acceptors and one engine: who is busy, what is late, and what would break first.

    python -m bench.scale                       the table, from the costs below
    python -m bench.scale --measure             measure the costs on this machine first
    python -m bench.scale --streams 20000 --tokens-per-s 50 --tokens 500

A machine of many cores is not needed to know how busy each would be: an acceptor, the engine
process and the kernel's part of a write cost what they cost on one core, and acceptors share
nothing. On paper, a process's load is its costs times its rates. By simulation, a step's tokens
queue: the engine sends to its lanes one after the other, and each acceptor writes its chunks one
after the other, between requests that come when they like. What that cannot show (memory bandwidth,
the network card, cores that share a cache) is what `--slower` is for.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FRONTENDS = (2, 4, 8, 16, 32, 64)
# A process that is busier than this has no room for bursts: its queue grows without need.
LOAD_MAX = 0.7
_SIMULATED_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """CPU microseconds of each part. The defaults were measured by `--measure`, on two cores of a
    virtual machine (AMD EPYC, family 25, 2.6 GHz; CPython 3.11).

    The acceptor and the engine process of a whole server under load, at two concurrencies, which
    parts what is paid for each chunk from what is paid for each message; the latter has in it that
    a step finds the caches cold, also for the request or two that come with it. The engine process
    alone with 10,000 requests, on 1 and on 64 lanes.
    """

    acceptor_chunk: float = 8.3
    acceptor_message: float = 2070.0
    acceptor_request: float = 320.0
    engine_token: float = 0.18
    engine_message: float = 84.0
    engine_request: float = 65.0
    # A C program that only writes prepared chunks, one by one: the kernel's part of a chunk.
    kernel_chunk: float = 5.8

    def times(self, factor: float) -> Costs:
        """The same parts on a core that is `factor` times slower."""
        return Costs(**{name: cost * factor for name, cost in dataclasses.asdict(self).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """`streams` at once, of `tokens` each, at `tokens_per_s`: one chunk for each token."""

    streams: int = 10_000
    tokens_per_s: float = 50.0
    tokens: int = 250

    @property
    def step_s(self) -> float:
        return 1.0 / self.tokens_per_s

    @property
    def chunks_per_s(self) -> float:
        return self.streams * self.tokens_per_s

    @property
    def requests_per_s(self) -> float:
        return self.chunks_per_s / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Shares of a core: each acceptor's, the kernel's in that, and the engine process's."""

    acceptor: float
    engine: float
    kernel: float


@dataclass(slots=True)
class Late:
    """What the simulation saw, counted by microseconds: how long after its step a chunk was
    written, and how long a request waited for its acceptor before it was even read."""

    chunks: Counter[int] = field(default_factory=Counter)
    requests: Counter[int] = field(default_factory=Counter)


def on_paper(costs: Costs, traffic: Traffic, *, frontends: int) -> Loads:
    """Costs times rates."""
    chunks_per_s = traffic.chunks_per_s / frontends
    requests_per_s = traffic.requests_per_s / frontends
    acceptor_us = (
        chunks_per_s * costs.acceptor_chunk
        + traffic.tokens_per_s * costs.acceptor_message
        + requests_per_s * costs.acceptor_request
    )
    engine_us = (
        traffic.chunks_per_s * costs.engine_token
        + traffic.tokens_per_s * frontends * costs.engine_message
        + traffic.requests_per_s * costs.engine_request
    )
    return Loads(
        acceptor=acceptor_us / 1e6,
        engine=engine_us / 1e6,
        kernel=chunks_per_s * costs.kernel_chunk / 1e6,
    )


def frontends_needed(costs: Costs, traffic: Traffic, *, load_max: float = LOAD_MAX) -> int:
    """The fewest acceptors of which none is busier than `load_max`. Raises ValueError: none does,
    since what every acceptor pays for a message is too much by itself."""
    fixed_us = traffic.tokens_per_s * costs.acceptor_message
    if fixed_us >= load_max * 1e6:
        raise ValueError("no number of acceptors is enough")
    shared_us = (
        traffic.chunks_per_s * costs.acceptor_chunk
        + traffic.requests_per_s * costs.acceptor_request
    )
    return -int(-shared_us // (load_max * 1e6 - fixed_us))


def streams_most(costs: Costs, traffic: Traffic, *, frontends: int) -> int:
    """How many streams the engine process alone can feed at LOAD_MAX, through so many lanes."""
    per_stream_us = traffic.tokens_per_s * (
        costs.engine_token + costs.engine_request / traffic.tokens
    )
    lanes_us = traffic.tokens_per_s * frontends * costs.engine_message
    return max(int((LOAD_MAX * 1e6 - lanes_us) / per_stream_us), 0)


def simulate(
    costs: Costs,
    traffic: Traffic,
    *,
    frontends: int,
    seconds: float = _SIMULATED_S,
    seed: int = 0,
) -> Late:
    """Let steps and requests queue at every process, first come first served, each on its core."""
    chance = random.Random(seed)
    arrivals = [
        _arrivals(chance, rate=traffic.requests_per_s / frontends, seconds=seconds)
        for _ in range(frontends)
    ]
    late = Late()
    free_s = [0.0] * frontends
    engine_free_s = 0.0
    sizes = [
        traffic.streams // frontends + (lane < traffic.streams % frontends)
        for lane in range(frontends)
    ]
    for step in range(int(seconds / traffic.step_s)):
        step_s = step * traffic.step_s
        engine_free_s = max(engine_free_s, step_s)
        engine_free_s += traffic.requests_per_s * traffic.step_s * costs.engine_request / 1e6
        order = chance.sample(range(frontends), frontends)
        for lane in order:
            engine_free_s += (costs.engine_message + sizes[lane] * costs.engine_token) / 1e6
            now_s = _requests_before(
                engine_free_s, arrivals[lane], late, free_s=free_s[lane], costs=costs
            )
            now_s = max(now_s, engine_free_s) + costs.acceptor_message / 1e6
            for _ in range(sizes[lane]):
                now_s += costs.acceptor_chunk / 1e6
                late.chunks[round((now_s - step_s) * 1e6)] += 1
            free_s[lane] = now_s
    return late


def _arrivals(chance: random.Random, *, rate: float, seconds: float) -> list[float]:
    """When requests come, the last one first: they are taken from the end."""
    times: list[float] = []
    at_s = chance.expovariate(rate)
    while at_s < seconds:
        times.append(at_s)
        at_s += chance.expovariate(rate)
    return times[::-1]


def _requests_before(
    moment_s: float, arrivals: list[float], late: Late, *, free_s: float, costs: Costs
) -> float:
    """Serve the requests that an acceptor has read by `moment_s`; return when it is free again."""
    while arrivals and max(free_s, arrivals[-1]) <= moment_s:
        came_s = arrivals.pop()
        began_s = max(free_s, came_s)
        late.requests[round((began_s - came_s) * 1e6)] += 1
        free_s = began_s + costs.acceptor_request / 1e6
    return free_s


def quantile_ms(times: Counter[int], share: float) -> float:
    """The milliseconds that `share` of all times do not exceed."""
    rank, seen = share * times.total(), 0
    for time_us in sorted(times):
        seen += times[time_us]
        if seen >= rank:
            return time_us / 1000
    return 0.0


def as_text(costs: Costs, traffic: Traffic, frontends: Sequence[int]) -> str:
    """The table, and what it says."""
    what = (
        f"{traffic.streams:,} streams of {traffic.tokens_per_s:g} tokens/s, "
        f"{traffic.tokens} tokens each: {traffic.chunks_per_s:,.0f} chunks/s, "
        f"{traffic.requests_per_s:,.0f} requests/s"
    )
    heading = (
        f"{'K':>3} {'acceptor':>9} {'kernel':>7} {'engine':>7}  "
        f"{'chunk late p50':>14} {'p99':>8}  {'request waits p99':>17}"
    )
    lines = [what, "", heading]
    for number in frontends:
        loads = on_paper(costs, traffic, frontends=number)
        line = f"{number:>3} {loads.acceptor:>9.0%} {loads.kernel:>7.0%} {loads.engine:>7.0%}"
        if max(loads.acceptor, loads.engine) < 1:
            late = simulate(costs, traffic, frontends=number)
            half, most = (quantile_ms(late.chunks, share) for share in (0.5, 0.99))
            waits = quantile_ms(late.requests, 0.99)
            line += f"  {half:>11.1f} ms {most:>5.1f} ms  {waits:>14.1f} ms"
        else:
            line += "  falls behind"
        lines.append(line)
    needed = frontends_needed(costs, traffic)
    most_streams = streams_most(costs, traffic, frontends=needed)
    verdict = (
        f"At most {LOAD_MAX:.0%} of a core each: {needed} acceptors. Through that many lanes the "
        f"engine process can feed {most_streams:,} such streams."
    )
    return "\n".join([*lines, "", verdict])


def main() -> None:
    """Print the table."""
    usual = Traffic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=usual.streams)
    parser.add_argument("--tokens-per-s", type=float, default=usual.tokens_per_s)
    parser.add_argument("--tokens", type=int, default=usual.tokens)
    parser.add_argument("--slower", type=float, default=1.0, help="times every cost (%(default)s)")
    parser.add_argument("--measure", action="store_true", help="measure the costs here first")
    arguments = parser.parse_args()
    costs = Costs()
    if arguments.measure:
        from bench.scale_costs import measure  # noqa: PLC0415 - starts servers; the rest is arithmetic

        costs = measure()
        print(costs)
    traffic = Traffic(
        streams=arguments.streams, tokens_per_s=arguments.tokens_per_s, tokens=arguments.tokens
    )
    print(as_text(costs.times(arguments.slower), traffic, FRONTENDS))


if __name__ == "__main__":
    main()
