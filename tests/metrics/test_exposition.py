"""What a scrape says, read back by Prometheus's own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from fastserve.metrics.board import Board
from fastserve.metrics.catalog import (
    ABORTS,
    CONNECTIONS,
    METRICS,
    PREFIX,
    PROMPT_TOKENS,
    REQUEST_SUCCESS,
    TIME_TO_FIRST_TOKEN,
    Counter,
)
from fastserve.metrics.exposition import EngineNumbers, expose
from fastserve.metrics.meter import Meter

ENGINE = EngineNumbers(
    num_running=3, num_waiting=1, kv_cache_usage=0.5, steps=9, heartbeat_age_s=0.25
)


def scrape(board: Board, engine: EngineNumbers | None = ENGINE) -> dict[str, float]:
    """Samples as `name{label=value}` to their values."""
    text = expose(board.all_numbers(), engine=engine, info={"version": "1"}).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_counters_are_summed_over_acceptors() -> None:
    board = Board.make(3)
    for lane in range(3):
        Meter(board.numbers(lane)).count(PROMPT_TOKENS, by=10)
    Meter(board.numbers(1)).count(REQUEST_SUCCESS, "length")
    samples = scrape(board)
    assert samples["fastserve_prompt_tokens_total"] == 30
    assert samples["fastserve_request_success_total{finished_reason=length}"] == 1
    assert samples["fastserve_request_success_total{finished_reason=stop}"] == 0


def test_a_histogram_counts_each_duration_once() -> None:
    board = Board.make(2)
    for lane, seconds in ((0, 0.004), (1, 0.005), (1, 1e9)):
        Meter(board.numbers(lane)).observe(TIME_TO_FIRST_TOKEN, seconds)
    samples = scrape(board)
    name = "fastserve_time_to_first_token_seconds"
    assert samples[f"{name}_bucket{{le=0.0025}}"] == 0
    assert samples[f"{name}_bucket{{le=0.005}}"] == 2  # a bound is part of its bucket
    assert samples[f"{name}_bucket{{le=600.0}}"] == 2
    assert samples[f"{name}_bucket{{le=+Inf}}"] == 3
    assert samples[f"{name}_count"] == 3
    assert samples[f"{name}_sum"] == 1e9 + 0.009


def test_gauges_have_one_series_each() -> None:
    board = Board.make(2)
    Meter(board.numbers(1)).set(CONNECTIONS, 5)
    samples = scrape(board)
    assert samples["fastserve_connections{acceptor=0}"] == 0
    assert samples["fastserve_connections{acceptor=1}"] == 5
    assert samples["fastserve_num_requests_running"] == 3
    assert samples["fastserve_kv_cache_usage_perc"] == 0.5
    assert samples["fastserve_engine_steps_total"] == 9


def test_every_family_is_there_before_the_first_request() -> None:
    samples = scrape(Board.make(1), engine=None)
    for metric in METRICS:
        name = PREFIX + metric.name + ("_total" if isinstance(metric, Counter) else "")
        assert any(sample.startswith(name) for sample in samples), name
    assert samples["fastserve_engine_up"] == 0


def test_what_is_not_declared_counts_as_other() -> None:
    board = Board.make(1)
    meter = Meter(board.numbers(0))
    meter.request("/v1/../etc", 299)
    assert scrape(board)["fastserve_http_requests_total{code=other,endpoint=other}"] == 1


def test_a_successor_goes_on_counting() -> None:
    board = Board.make(1)
    Meter(board.numbers(0)).count(ABORTS, "client_gone")
    board.slot(0)  # its other row begins anew
    Meter(board.numbers(0)).count(ABORTS, "client_gone")
    assert scrape(board)["fastserve_requests_aborted_total{reason=client_gone}"] == 2


def test_scrapes_of_a_resting_server_are_identical() -> None:
    board = Board.make(2)
    assert expose(board.all_numbers(), engine=ENGINE, info={}) == expose(
        board.all_numbers(), engine=ENGINE, info={}
    )
