"""A process's row of numbers, and the calls that add to it.

One writer per row, so an addition is a plain one: read, add, write. Each costs about 0.1
microseconds, a histogram's 0.25. An incarnation goes on where the last one stopped, so that
nothing ever steps back; what is so only now is cleared by whoever sees a process end.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

from fastserve.metrics.catalog import (
    CODES,
    ENDPOINTS,
    HTTP_REQUESTS,
    METRICS,
    OFFSETS,
    ROW_WORDS,
    SERIES_AT,
    Gauge,
)

if TYPE_CHECKING:
    from fastserve.metrics.catalog import Counter, Histogram

_CODE_INDEX = {code: index for index, code in enumerate(CODES)}
_ENDPOINT_INDEX = {endpoint: index for index, endpoint in enumerate(ENDPOINTS)}
_OTHER_CODE = _CODE_INDEX["other"]
_OTHER_ENDPOINT = _ENDPOINT_INDEX["other"]
_HTTP_REQUESTS_AT = OFFSETS[HTTP_REQUESTS.name]


class Observe(Protocol):
    """Counts a value in a histogram, as if it had come so many `times`."""

    def __call__(self, value: float, times: int = 1) -> None: ...


class Meter:
    """Adds to one row."""

    __slots__ = ("_row",)

    def __init__(self, row: memoryview[float]) -> None:
        self._row = row

    @classmethod
    def unread(cls) -> Meter:
        """Make a meter whose numbers nobody reads."""
        return cls(memoryview(array("d", bytes(8 * ROW_WORDS))))

    def count(self, counter: Counter, *values: str, by: float = 1.0) -> None:
        """Add to the series of `counter` with these label values, which must be declared."""
        self._row[SERIES_AT[counter.name, values]] += by

    def request(self, endpoint: str, status: int) -> None:
        """Count an HTTP request; what is not declared counts as `other`."""
        row = _ENDPOINT_INDEX.get(endpoint, _OTHER_ENDPOINT)
        column = _CODE_INDEX.get(str(status), _OTHER_CODE)
        self._row[_HTTP_REQUESTS_AT + row * len(CODES) + column] += 1.0

    def set(self, gauge: Gauge, value: float, *, lane: int = 0) -> None:
        """Say what is so now; `lane` is for what is told of each lane."""
        self._row[OFFSETS[gauge.name] + lane] = value

    def observe(self, histogram: Histogram, value: float) -> None:
        """Count a duration or a number in its bucket, and add it to the sum."""
        at = OFFSETS[histogram.name]
        buckets = histogram.buckets
        row = self._row
        row[at + bisect_left(buckets, value)] += 1.0
        row[at + len(buckets) + 1] += value

    def timer(self, histogram: Histogram) -> Observe:
        """Return `observe` for one histogram, for where it is called often."""
        row, buckets, first = self._row, histogram.buckets, OFFSETS[histogram.name]
        sum_at = first + len(buckets) + 1

        def observe(value: float, times: int = 1) -> None:
            row[first + bisect_left(buckets, value)] += times
            row[sum_at] += value * times

        return observe

    def clear_gauges(self) -> None:
        """Say that nothing is so any more: the row's process has ended."""
        for metric in METRICS:
            if isinstance(metric, Gauge):
                at = OFFSETS[metric.name]
                for word in range(at, at + metric.words):
                    self._row[word] = 0.0
