"""The whole server's numbers as Prometheus reads them, from any acceptor.

Counters and histograms are summed over everybody's rows; an acceptor's gauges have one series
each. Reading drains nothing, so two scrapes of a server that rests are identical whoever answers.
The sole owner of prometheus-client, which is imported at the first scrape: it costs 40 ms, 5 MB.
"""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, assert_never

from fastserve.metrics import catalog
from fastserve.metrics.catalog import METRICS, OFFSETS, PREFIX, Counter, Gauge, Histogram
from fastserve.metrics.names import DIALECTS, FASTSERVE, TRTLLM, VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fastserve.metrics.board import Numbers
    from fastserve.metrics.catalog import Metric
    from fastserve.metrics.names import Dialect

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What does not change while a server runs: shown as labels. `settings` are words for people.

    `names`: under which names everything is told (names.py).
    """

    version: str
    python: str = ""
    engine: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = (FASTSERVE,)


def expose(numbers: Numbers, *, info: ServerInfo, model: str, now_s: float) -> bytes:
    """Render every metric. `model` may be empty; `now_s` is what ages count from (monotonic)."""
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415

    registry = CollectorRegistry()
    registry.register(_Collector(numbers, info=info, model=model, now_s=now_s))
    return generate_latest(registry)


Labels = dict[str, str]


class _Collector:
    """What prometheus-client calls a custom collector."""

    def __init__(self, numbers: Numbers, *, info: ServerInfo, model: str, now_s: float) -> None:
        self._numbers = numbers
        rows = [*numbers.acceptors, numbers.engine, numbers.supervisor]
        self._totals = [sum(column) for column in zip(*rows, strict=True)]
        self._info = info
        self._model = model
        self._now_s = now_s

    def collect(self) -> Iterator[Any]:
        names = self._info.names
        if FASTSERVE in names:
            for metric in METRICS:
                yield self._family(metric, PREFIX + metric.name, {})
            yield from self._infos()
        for name, dialect in DIALECTS.items():
            if name in names:
                yield from self._in_dialect(dialect)
        if VLLM in names:
            yield self._http_requests()
        if TRTLLM in names:
            yield from self._of_trtllm()

    def _in_dialect(self, dialect: Dialect) -> Iterator[Any]:
        labels = self._labels_of(dialect)
        for alias in dialect.aliases:
            yield self._family(alias.metric, alias.name, labels)

    def _labels_of(self, dialect: Dialect) -> Labels:
        label, named = dialect.second
        return {"model_name": self._model, label: self._info.engine if named else "0"}

    def _family(self, metric: Metric, name: str, labels: Labels) -> Any:  # noqa: ANN401 (the library's own kind)
        match metric:
            case Counter():
                return self._counter(metric, name, labels)
            case Histogram():
                return self._histogram(metric, name, labels)
            case Gauge():
                return self._gauge(metric, name, labels)
            case _:
                assert_never(metric)

    def _counter(self, metric: Counter, name: str, labels: Labels) -> Any:  # noqa: ANN401
        at = OFFSETS[metric.name]
        totals = self._totals[at : at + metric.words]
        series = zip(metric.series, totals, strict=True)
        return _counters(
            name, metric.help, (*labels, *metric.labels), tuple(labels.values()), series
        )

    def _histogram(self, metric: Histogram, name: str, labels: Labels) -> Any:  # noqa: ANN401
        from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415
        from prometheus_client.utils import floatToGoString  # noqa: PLC0415

        at = OFFSETS[metric.name]
        counts = self._totals[at : at + len(metric.buckets) + 1]
        cumulated = [sum(counts[: index + 1]) for index in range(len(counts))]
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        family = HistogramMetricFamily(name, metric.help, labels=list(labels))
        family.add_metric(
            list(labels.values()),
            buckets=list(zip(bounds, cumulated, strict=True)),
            sum_value=self._totals[at + len(metric.buckets) + 1],
        )
        return family

    def _gauge(self, metric: Gauge, name: str, labels: Labels) -> Any:  # noqa: ANN401
        at, acceptors = OFFSETS[metric.name], self._numbers.acceptors
        if metric.of == "acceptor":
            values = [row[at] for row in acceptors]
        else:
            values = self._numbers.engine[at : at + (len(acceptors) if metric.of == "lane" else 1)]
        if metric.age:
            values = [self._now_s - value if value else 0.0 for value in values]
        if metric.of == "engine":
            return _gauges(name, metric.help, tuple(labels), [((*labels.values(),), values[0])])
        series = [((*labels.values(), str(lane)), value) for lane, value in enumerate(values)]
        return _gauges(name, metric.help, (*labels, metric.of), series)

    # ---- what is no metric of the catalog

    def _infos(self) -> Iterator[Any]:
        info = self._info
        what = {"version": info.version, "python": info.python, "model": self._model}
        how = {"engine": info.engine} | info.settings
        for name, help_text, labels in (
            ("build_info", "What runs.", what),
            ("config_info", "How it was asked to run.", how),
        ):
            yield _gauges(PREFIX + name, help_text, tuple(labels), [(tuple(labels.values()), 1.0)])

    def _http_by_code(self) -> Iterator[tuple[str, str, float]]:
        metric = catalog.HTTP_REQUESTS
        at = OFFSETS[metric.name]
        for index, (endpoint, code) in enumerate(metric.series):
            yield endpoint, code, self._totals[at + index]

    def _http_requests(self) -> Any:  # noqa: ANN401
        """The instrumentator's counter, whose statuses are classes. It knows no model."""
        tally: Tally[tuple[str, str]] = Tally()
        for endpoint, code, number in self._http_by_code():
            status = f"{code[0]}xx" if code.isdecimal() else code
            tally[endpoint, status] += number  # type: ignore[assignment] # a whole number in a double
        labels = ("handler", "status")
        return _counters("http_requests", "HTTP requests.", labels, (), tally.items())

    def _of_trtllm(self) -> Iterator[Any]:
        labels = self._labels_of(DIALECTS[TRTLLM])
        names, mine = tuple(labels), tuple(labels.values())
        errors: Tally[tuple[str, ...]] = Tally()
        for _, code, number in self._http_by_code():
            if code.isdecimal() and int(code) >= 400:
                errors[code,] += number  # type: ignore[assignment] # as above
        yield _counters(
            "trtllm_request_error", "Errors by status.", (*names, "http_code"), mine, errors.items()
        )
        at = OFFSETS[catalog.REQUEST_SUCCESS.name]
        completed = sum(self._totals[at : at + catalog.REQUEST_SUCCESS.words])
        yield _counters(
            "trtllm_num_requests_completed", "Choices that ended.", names, mine, [((), completed)]
        )
        queries, hits = (
            self._totals[OFFSETS[metric.name]]
            for metric in (catalog.PREFIX_CACHE_QUERIES, catalog.PREFIX_CACHE_HITS)
        )
        rate = hits / queries if queries else 0.0
        yield _gauges("trtllm_kv_cache_hit_rate", "Found of looked for.", names, [(mine, rate)])


def _counters(
    name: str,
    help_text: str,
    labels: tuple[str, ...],
    common: tuple[str, ...],
    series: Any,  # noqa: ANN401 (label values and a total, of whatever makes such pairs)
) -> Any:  # noqa: ANN401
    from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

    family = CounterMetricFamily(name, help_text, labels=labels)
    for values, total in series:
        family.add_metric((*common, *values), total)
    return family


def _gauges(
    name: str,
    help_text: str,
    labels: tuple[str, ...],
    series: Sequence[tuple[tuple[str, ...], float]],
) -> Any:  # noqa: ANN401
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

    family = GaugeMetricFamily(name, help_text, labels=labels)
    for values, value in series:
        family.add_metric(values, value)
    return family
