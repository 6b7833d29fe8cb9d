"""What two looks say of the time between them, by hand."""

from __future__ import annotations

import pytest

from fastserve.top.figures import Acceptor, figures, quantiles_ms
from fastserve.top.scrape import Sample, Scrape


def look(at_s: float, *rows: tuple[str, dict[str, str], float], status: str = "ready") -> Scrape:
    samples: dict[str, list[Sample]] = {}
    for name, labels, value in rows:
        samples.setdefault(name, []).append(Sample(labels, value))
    return Scrape(at_s=at_s, health={"status": status}, samples=samples)


def buckets(*counts: tuple[str, float]) -> list[tuple[str, dict[str, str], float]]:
    return [("ttft_bucket", {"le": bound}, count) for bound, count in counts]


def test_rates_are_growth_by_time() -> None:
    before = look(10, ("generation_tokens_total", {}, 100), ("http_requests_total", {}, 7))
    now = look(12, ("generation_tokens_total", {}, 700), ("http_requests_total", {}, 12))
    found = figures(before, now)
    assert found.window_s == 2
    assert found.generation_tokens_per_s == 300
    assert found.requests_per_s == 2.5
    assert found.requests_total == 12


def test_a_server_that_was_started_anew_counts_from_zero() -> None:
    before = look(0, ("generation_tokens_total", {}, 1_000_000))
    now = look(1, ("generation_tokens_total", {}, 50))
    assert figures(before, now).generation_tokens_per_s == 50


def test_only_what_the_server_is_to_blame_for_is_an_error() -> None:
    def codes(at_s: float, fine: float, wrong: float, broken: float) -> Scrape:
        counts = {"200": fine, "400": wrong, "503": broken}
        rows = [("http_requests_total", {"code": code}, n) for code, n in counts.items()]
        return look(at_s, *rows)

    found = figures(codes(0, 5, 5, 5), codes(2, 15, 25, 11))
    assert found.errors_per_s == 3
    assert found.requests_per_s == 18


def test_percentiles_are_of_the_window_and_spread_within_a_bucket() -> None:
    before = look(0, *buckets(("0.1", 100), ("0.2", 100), ("+Inf", 100)))
    now = look(1, *buckets(("0.1", 150), ("0.2", 200), ("+Inf", 200)))
    found = quantiles_ms(before, now, "ttft")
    assert found[0.5] == pytest.approx(100)
    assert found[0.95] == pytest.approx(190)
    assert found[0.99] == pytest.approx(198)


def test_of_a_bucket_without_an_end_its_beginning_is_told() -> None:
    now = look(1, *buckets(("0.1", 0), ("0.5", 0), ("+Inf", 10)))
    assert quantiles_ms(look(0), now, "ttft")[0.99] == pytest.approx(500)


def test_nothing_measured_has_no_percentiles() -> None:
    same = buckets(("0.1", 5), ("+Inf", 9))
    assert quantiles_ms(look(0, *same), look(1, *same), "ttft") == {}
    assert quantiles_ms(look(0), look(1), "ttft") == {}


def test_acceptors_are_in_the_order_of_their_numbers() -> None:
    lanes = ("10", "2", "0")
    rows = [("connections", {"acceptor": lane}, float(lane)) for lane in lanes]
    rows += [("loop_lag_seconds", {"acceptor": lane}, 0.002) for lane in lanes]
    rows += [("requests_in_flight", {"acceptor": "2"}, 1.0)]
    found = figures(look(0), look(1, *rows)).acceptors
    assert [one.lane for one in found] == ["0", "2", "10"]
    assert found[1] == Acceptor(lane="2", connections=2, requests_in_flight=1, loop_lag_ms=2.0)


def test_model_version_and_state_are_told() -> None:
    now = look(1, ("build_info", {"version": "1.2", "model": "m"}, 1.0), status="stalled")
    found = figures(look(0), now)
    assert (found.version, found.model, found.state) == ("1.2", "m", "stalled")
