"""What two looks at a server say of the time between them: rates and percentiles. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.top.scrape import Scrape

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptor:
    """One acceptor, as it is now."""

    lane: str
    connections: int
    requests_in_flight: int
    loop_lag_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """`*_per_s` and `*_ms` are of the last `window_s` seconds; percentiles are by share, and
    missing where nothing was measured. The rest is as it is now, or since the start."""

    window_s: float
    state: str
    model: str
    version: str
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    generation_tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    errors_per_s: float
    ttft_ms: dict[float, float]
    itl_ms: dict[float, float]
    e2e_ms: dict[float, float]
    requests_total: int
    aborts_total: int
    refusals_total: int
    respawns_total: int
    acceptors: tuple[Acceptor, ...]


def figures(before: Scrape, now: Scrape) -> Figures:
    """Compare two looks at one server. One that was started anew in between counts from zero."""
    window_s = max(now.at_s - before.at_s, 1e-9)

    def rate(name: str) -> float:
        return _growth(before.sum(name), now.sum(name)) / window_s

    codes_before, codes = (one.by("http_requests_total", "code") for one in (before, now))
    failed = [code for code in codes if code.startswith("5")]
    info = next(iter(now.samples.get("build_info", ())), None)
    labels = info.labels if info is not None else {}
    return Figures(
        window_s=window_s,
        state=str(now.health.get("status", "")),
        model=labels.get("model", ""),
        version=labels.get("version", ""),
        num_running=round(now.sum("num_requests_running")),
        num_waiting=round(now.sum("num_requests_waiting")),
        kv_cache_usage=now.sum("kv_cache_usage_perc"),
        generation_tokens_per_s=rate("generation_tokens_total"),
        prompt_tokens_per_s=rate("prompt_tokens_total"),
        requests_per_s=rate("http_requests_total"),
        errors_per_s=sum(_growth(codes_before.get(code, 0.0), codes[code]) for code in failed)
        / window_s,
        ttft_ms=quantiles_ms(before, now, "time_to_first_token_seconds"),
        itl_ms=quantiles_ms(before, now, "inter_token_latency_seconds"),
        e2e_ms=quantiles_ms(before, now, "e2e_request_latency_seconds"),
        requests_total=round(now.sum("http_requests_total")),
        aborts_total=round(now.sum("requests_aborted_total")),
        refusals_total=round(now.sum("admission_rejections_total")),
        respawns_total=round(now.sum("process_respawns_total")),
        acceptors=_acceptors(now),
    )


def quantiles_ms(before: Scrape, now: Scrape, name: str) -> dict[float, float]:
    """The percentiles of what a histogram counted between two looks; empty if it counted nothing.

    Within a bucket values are taken to be spread evenly, as PromQL's histogram_quantile does; of
    the last, which has no end, its beginning is told.
    """
    bounds = sorted(
        (float(bound), _growth(before.by(f"{name}_bucket", "le").get(bound, 0.0), count))
        for bound, count in now.by(f"{name}_bucket", "le").items()
    )
    total = bounds[-1][1] if bounds else 0.0
    if not total:
        return {}
    return {share: 1000 * _quantile(bounds, share * total) for share in QUANTILES}


def _quantile(bounds: list[tuple[float, float]], rank: float) -> float:
    """The value of that rank in cumulative `bounds`, (upper bound, count up to it)."""
    for (low, seen), (high, count) in pairwise([(0.0, 0.0), *bounds]):
        if count >= rank:
            if math.isinf(high):
                return low
            return low + (high - low) * (rank - seen) / max(count - seen, 1e-9)
    return bounds[-1][0]


def _growth(before: float, now: float) -> float:
    """How much a counter has grown; one that has shrunk began again."""
    return now - before if now >= before else now


def _acceptors(now: Scrape) -> tuple[Acceptor, ...]:
    in_flight = now.by("requests_in_flight", "acceptor")
    lag_s = now.by("loop_lag_seconds", "acceptor")
    return tuple(
        Acceptor(
            lane=lane,
            connections=round(number),
            requests_in_flight=round(in_flight.get(lane, 0.0)),
            loop_lag_ms=1000 * lag_s.get(lane, 0.0),
        )
        for lane, number in sorted(
            now.by("connections", "acceptor").items(), key=lambda item: (len(item[0]), item[0])
        )
    )
