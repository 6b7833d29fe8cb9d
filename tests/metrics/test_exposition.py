"""What a scrape says, read back by Prometheus's own parser."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from fastserve.metrics.board import Board
from fastserve.metrics.catalog import (
    ABORTS,
    CONNECTIONS,
    ENGINE_STEPS,
    ENGINE_UP,
    HEARTBEAT_AGE,
    INTER_TOKEN_LATENCY,
    KV_CACHE_USAGE,
    LANE_FRAMES_HELD,
    METRICS,
    NUM_RUNNING,
    PREFIX,
    PROMPT_TOKENS,
    REQUEST_SUCCESS,
    TIME_TO_FIRST_TOKEN,
    Counter,
)
from fastserve.metrics.exposition import ServerInfo, expose
from fastserve.metrics.meter import Meter

NOW_S = 1000.0
INFO = ServerInfo(version="1", engine="sim", settings={"frontends": "2"})


def scrape(board: Board, *names: str) -> dict[str, float]:
    """Samples as `name{label=value}` to their values."""
    info = replace(INFO, names=names or INFO.names)
    text = expose(board.all_numbers(), info=info, model="m", now_s=NOW_S).decode()
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
    engine = Meter(board.engine_numbers())
    engine.set(NUM_RUNNING, 3)
    engine.set(KV_CACHE_USAGE, 0.5)
    engine.set(LANE_FRAMES_HELD, 7, lane=1)
    engine.set(HEARTBEAT_AGE, NOW_S - 0.25)
    samples = scrape(board)
    assert samples["fastserve_connections{acceptor=0}"] == 0
    assert samples["fastserve_connections{acceptor=1}"] == 5
    assert samples["fastserve_num_requests_running"] == 3
    assert samples["fastserve_kv_cache_usage_perc"] == 0.5
    assert samples["fastserve_engine_heartbeat_age_seconds"] == 0.25
    assert samples["fastserve_lane_frames_held{lane=1}"] == 7
    assert "fastserve_lane_frames_held{lane=2}" not in samples


def test_what_was_so_of_a_process_is_not_so_when_it_has_ended() -> None:
    board = Board.make(1)
    engine = Meter(board.engine_numbers())
    engine.set(ENGINE_UP, 1)
    engine.set(LANE_FRAMES_HELD, 7, lane=0)
    engine.count(ENGINE_STEPS, by=9)
    engine.clear_gauges()
    samples = scrape(board)
    assert samples["fastserve_engine_up"] == 0
    assert samples["fastserve_lane_frames_held{lane=0}"] == 0
    assert samples["fastserve_engine_steps_total"] == 9


def test_the_server_says_what_it_is_and_how_it_was_asked_to_run() -> None:
    samples = scrape(Board.make(1))
    assert samples["fastserve_build_info{model=m,python=,version=1}"] == 1
    assert samples["fastserve_config_info{engine=sim,frontends=2}"] == 1


def test_every_family_is_there_before_the_first_request() -> None:
    samples = scrape(Board.make(1))
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
    first, second = (
        expose(board.all_numbers(), info=INFO, model="m", now_s=now_s) for now_s in (1.0, 2.0)
    )
    assert first == second


def test_a_timer_counts_as_observe_does() -> None:
    board = Board.make(2)
    observed, timed = Meter(board.numbers(0)), Meter(board.numbers(1))
    observe = timed.timer(INTER_TOKEN_LATENCY)
    for each in (0.0, 0.001, 0.0011, 0.3, 0.3, 99.0):
        observed.observe(INTER_TOKEN_LATENCY, each)
    for each, times in ((0.0, 1), (0.001, 1), (0.0011, 1), (0.3, 2), (99.0, 1)):
        observe(each, times)
    assert any(board.numbers(0))
    assert list(board.numbers(0)) == list(board.numbers(1))
