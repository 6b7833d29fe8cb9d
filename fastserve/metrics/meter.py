"""An acceptor's row of numbers, and the calls that add to it.

One writer per row, so an addition is a plain one: read, add, write. Each costs about 0.1
microseconds, a histogram's 0.25. An incarnation goes on where the last one stopped, so that
nothing ever steps back.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from fastserve.metrics.catalog import CODES, ENDPOINTS, HTTP_REQUESTS, OFFSETS

if TYPE_CHECKING:
    from fastserve.metrics.catalog import Counter, Gauge, Histogram

_CODE_INDEX = {code: index for index, code in enumerate(CODES)}
_ENDPOINT_INDEX = {endpoint: index for index, endpoint in enumerate(ENDPOINTS)}
_OTHER_CODE = _CODE_INDEX["other"]
_OTHER_ENDPOINT = _ENDPOINT_INDEX["other"]
_HTTP_REQUESTS_AT = OFFSETS[HTTP_REQUESTS.name]


class Meter:
    """Adds to one row."""

    __slots__ = ("_row",)

    def __init__(self, row: memoryview[float]) -> None:
        self._row = row

    def count(self, counter: Counter, *values: str, by: float = 1.0) -> None:
        """Add to the series of `counter` with these label values, which must be declared."""
        at = OFFSETS[counter.name]
        if values:
            at += counter.series.index(values)
        self._row[at] += by

    def request(self, endpoint: str, status: int) -> None:
        """Count an HTTP request; what is not declared counts as `other`."""
        row = _ENDPOINT_INDEX.get(endpoint, _OTHER_ENDPOINT)
        column = _CODE_INDEX.get(str(status), _OTHER_CODE)
        self._row[_HTTP_REQUESTS_AT + row * len(CODES) + column] += 1.0

    def set(self, gauge: Gauge, value: float) -> None:
        """Say what is so now."""
        self._row[OFFSETS[gauge.name]] = value

    def observe(self, histogram: Histogram, seconds: float) -> None:
        """Count a duration in its bucket, and add it to the sum."""
        at = OFFSETS[histogram.name]
        buckets = histogram.buckets
        row = self._row
        row[at + bisect_left(buckets, seconds)] += 1.0
        row[at + len(buckets) + 1] += seconds
