"""The model of many acceptors: arithmetic against a hand's, simulation against arithmetic."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.scale import (
    Costs,
    Traffic,
    as_text,
    frontends_needed,
    on_paper,
    quantile_ms,
    simulate,
    streams_most,
)

COSTS = Costs(
    acceptor_chunk=10.0,
    acceptor_message=100.0,
    acceptor_request=200.0,
    engine_token=1.0,
    engine_message=50.0,
    engine_request=20.0,
    kernel_chunk=5.0,
)
# 20,000 chunks and 200 requests in a second, 20 steps.
TRAFFIC = Traffic(streams=1000, tokens_per_s=20.0, tokens=100)


def test_a_load_is_costs_times_rates() -> None:
    loads = on_paper(COSTS, TRAFFIC, frontends=2)
    assert loads.acceptor == pytest.approx((10_000 * 10 + 20 * 100 + 100 * 200) / 1e6)
    assert loads.engine == pytest.approx((20_000 * 1 + 20 * 2 * 50 + 200 * 20) / 1e6)
    assert loads.kernel == pytest.approx(10_000 * 5 / 1e6)


def test_the_fewest_acceptors_are_those_of_which_none_is_too_busy() -> None:
    number = frontends_needed(COSTS, TRAFFIC, load_max=0.1)
    assert on_paper(COSTS, TRAFFIC, frontends=number).acceptor <= 0.1
    assert on_paper(COSTS, TRAFFIC, frontends=number - 1).acceptor > 0.1
    with pytest.raises(ValueError, match="no number"):
        frontends_needed(COSTS.times(1000), TRAFFIC, load_max=0.1)


def test_the_engine_is_full_at_the_most_streams_it_can_feed() -> None:
    most = streams_most(COSTS, TRAFFIC, frontends=8)
    full = Traffic(streams=most, tokens_per_s=20.0, tokens=100)
    assert on_paper(COSTS, full, frontends=8).engine == pytest.approx(0.7, rel=1e-3)


def test_without_chance_a_step_is_as_late_as_the_work_before_it() -> None:
    """One acceptor and next to no requests: the last of ten chunks is the sum of all parts."""
    traffic = Traffic(streams=10, tokens_per_s=20.0, tokens=10**9)
    late = simulate(COSTS, traffic, frontends=1, seconds=1.0)
    assert late.chunks.total() == 10 * 20
    engine_us = 50 + 10 * 1
    assert min(late.chunks) == engine_us + 100 + 10
    assert max(late.chunks) == engine_us + 100 + 10 * 10


def test_every_chunk_is_counted_and_more_acceptors_are_less_late() -> None:
    few, many = (simulate(COSTS, TRAFFIC, frontends=number, seconds=2.0) for number in (1, 8))
    assert few.chunks.total() == many.chunks.total() == 1000 * 40
    assert quantile_ms(many.chunks, 0.99) < quantile_ms(few.chunks, 0.99) / 2
    assert 300 < few.requests.total() < 500
    assert simulate(COSTS, TRAFFIC, frontends=8, seconds=2.0) == many, "the same in every run"


def test_a_quantile_is_what_that_share_does_not_exceed() -> None:
    assert quantile_ms(Counter({1000: 98, 5000: 2}), 0.5) == 1.0
    assert quantile_ms(Counter({1000: 98, 5000: 2}), 0.99) == 5.0


def test_the_table_says_who_falls_behind_and_how_many_are_needed() -> None:
    busy = Traffic(streams=5000, tokens_per_s=40.0, tokens=100)
    text = as_text(COSTS, busy, (1, 32))
    assert "falls behind" in text.splitlines()[3]
    assert "falls behind" not in text.splitlines()[4]
    assert f"{frontends_needed(COSTS, busy)} acceptors" in text
