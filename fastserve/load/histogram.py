"""Times in a log-linear histogram, as histogram.h counts them: see there for the buckets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

_SUB_BITS = 7
_SUB_BUCKETS = 1 << _SUB_BITS


@dataclass(slots=True)
class Histogram:
    """Counts by bucket. Histograms of several programs add up exactly."""

    counts: Counter[int] = field(default_factory=Counter)
    sum_ns: int = 0
    max_ns: int = 0

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(Counter(dict(value["buckets"])), value["sum_ns"], value["max_ns"])

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            self.counts + other.counts,
            self.sum_ns + other.sum_ns,
            max(self.max_ns, other.max_ns),
        )

    @property
    def total(self) -> int:
        return self.counts.total()

    def quantile_ms(self, share: float) -> float | None:
        """The time that `share` of all values do not exceed; None if there are no values.

        The middle of a bucket, so at most 1 part in 256 off; never more than the greatest value.
        """
        rank = max(1.0, share * self.total)
        seen = 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if seen >= rank:
                return min(middle_ns(index), self.max_ns) / 1e6
        return None

    def mean_ms(self) -> float | None:
        return self.sum_ns / self.total / 1e6 if self.total else None


def middle_ns(index: int) -> float:
    """The middle of a bucket."""
    octave, within = divmod(index, _SUB_BUCKETS)
    if octave == 0:
        return within
    width_ns = 1 << (octave - 1)
    return (_SUB_BUCKETS + within) * width_ns + (width_ns - 1) / 2
