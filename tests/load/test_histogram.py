from __future__ import annotations

import itertools
from collections import Counter

import pytest

from fastserve.load.histogram import Histogram, middle_ns

# Every bucket of histogram.h: 44 - 7 octaves of 128.
BUCKETS = 37 * 128


def test_buckets_follow_each_other_without_gaps_and_are_narrow() -> None:
    middles = [middle_ns(index) for index in range(BUCKETS)]
    assert middles[:128] == list(range(128))
    assert middles == sorted(set(middles))
    gaps = [(after - before) / before for before, after in itertools.pairwise(middles[128:])]
    assert max(gaps) <= 1 / 127


def test_a_quantile_is_a_value_that_this_share_does_not_exceed() -> None:
    histogram = Histogram(Counter({10: 50, 20: 49, 100: 1}), sum_ns=1580, max_ns=100)
    assert [histogram.quantile_ms(share) for share in (0.5, 0.51, 0.99, 0.999, 1.0)] == [
        pytest.approx(ns / 1e6) for ns in (10, 20, 20, 100, 100)
    ]
    assert histogram.mean_ms() == pytest.approx(15.8e-6)


def test_no_quantile_is_above_the_greatest_value() -> None:
    histogram = Histogram.from_json({"buckets": [[3000, 1]], "sum_ns": 7, "max_ns": 7})
    assert histogram.quantile_ms(0.99) == 7 / 1e6


def test_histograms_add_up() -> None:
    one = Histogram(Counter({5: 1}), sum_ns=5, max_ns=5)
    two = Histogram(Counter({5: 2, 9: 1}), sum_ns=19, max_ns=9)
    assert one + two == Histogram(Counter({5: 3, 9: 1}), sum_ns=24, max_ns=9)
    assert (one + two).total == 4


def test_nothing_has_no_quantiles() -> None:
    assert Histogram().quantile_ms(0.5) is None
    assert Histogram().mean_ms() is None
