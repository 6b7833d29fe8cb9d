"""The whole server's numbers as Prometheus reads them, from any acceptor.

Counters and histograms are summed over the acceptors' rows; gauges have one series each. Reading
drains nothing, so two scrapes of a server that rests are identical whoever answers. The sole owner
of prometheus-client, which is imported at the first scrape: it costs 40 ms and 5 MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastserve.metrics.catalog import METRICS, OFFSETS, PREFIX, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNumbers:
    """What the engine said in its last heartbeat, and how long ago in seconds."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    steps: int
    heartbeat_age_s: float


def expose(
    rows: Sequence[Sequence[float]], *, engine: EngineNumbers | None, info: dict[str, str]
) -> bytes:
    """Render every metric. `rows`: one per acceptor, in order. `info`: labels of build_info."""
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415

    registry = CollectorRegistry()
    registry.register(_Collector(rows, engine=engine, info=info))
    return generate_latest(registry)


class _Collector:
    """What prometheus-client calls a custom collector."""

    def __init__(
        self,
        rows: Sequence[Sequence[float]],
        *,
        engine: EngineNumbers | None,
        info: dict[str, str],
    ) -> None:
        self._rows = rows
        self._totals = [sum(column) for column in zip(*rows, strict=True)]
        self._engine = engine
        self._info = info

    def collect(self) -> Iterator[Any]:
        for metric in METRICS:
            match metric:
                case Counter():
                    yield self._counter(metric)
                case Histogram():
                    yield self._histogram(metric)
                case Gauge():
                    yield self._gauge(metric)
        yield from self._of_the_engine()
        yield self._build()

    def _counter(self, metric: Counter) -> Any:  # noqa: ANN401 (the library's own kind)
        from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

        family = CounterMetricFamily(PREFIX + metric.name, metric.help, labels=metric.labels)
        at = OFFSETS[metric.name]
        for index, values in enumerate(metric.series):
            family.add_metric(values, self._totals[at + index])
        return family

    def _histogram(self, metric: Histogram) -> Any:  # noqa: ANN401
        from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415

        at = OFFSETS[metric.name]
        counts = self._totals[at : at + len(metric.buckets) + 1]
        cumulated = [sum(counts[: index + 1]) for index in range(len(counts))]
        bounds = [*map(str, metric.buckets), "+Inf"]
        family = HistogramMetricFamily(PREFIX + metric.name, metric.help)
        family.add_metric(
            [],
            buckets=list(zip(bounds, cumulated, strict=True)),
            sum_value=self._totals[at + len(metric.buckets) + 1],
        )
        return family

    def _gauge(self, metric: Gauge) -> Any:  # noqa: ANN401
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

        family = GaugeMetricFamily(PREFIX + metric.name, metric.help, labels=["acceptor"])
        for lane, row in enumerate(self._rows):
            family.add_metric([str(lane)], row[OFFSETS[metric.name]])
        return family

    def _of_the_engine(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        engine = self._engine
        gauges = {
            "num_requests_running": ("Requests in the running batch.", "num_running"),
            "num_requests_waiting": ("Requests that wait for a place in it.", "num_waiting"),
            "kv_cache_usage_perc": ("The used share of the KV cache, 0 to 1.", "kv_cache_usage"),
            "engine_heartbeat_age_seconds": ("Since the last heartbeat.", "heartbeat_age_s"),
        }
        for name, (help_text, field) in gauges.items():
            value = getattr(engine, field) if engine else 0.0
            yield GaugeMetricFamily(PREFIX + name, help_text, value=value)
        yield GaugeMetricFamily(
            PREFIX + "engine_up", "Whether it was heard of.", value=bool(engine)
        )
        steps = engine.steps if engine else 0
        yield CounterMetricFamily(PREFIX + "engine_steps", "Steps finished.", value=steps)

    def _build(self) -> Any:  # noqa: ANN401
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

        family = GaugeMetricFamily(PREFIX + "build_info", "What runs.", labels=list(self._info))
        family.add_metric(list(self._info.values()), 1.0)
        return family
