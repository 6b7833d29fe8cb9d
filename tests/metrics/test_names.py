"""Our numbers under the names of others: same values, their labels."""

from __future__ import annotations

import pytest

from fastserve import config_observing
from fastserve.metrics.board import Board
from fastserve.metrics.catalog import (
    CACHED_TOKENS,
    KV_CACHE_USAGE,
    LAST_STEP_TIME,
    NUM_RUNNING,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUEST_SUCCESS,
    TIME_TO_FIRST_TOKEN,
)
from fastserve.metrics.meter import Meter
from fastserve.metrics.names import NAMES
from tests.metrics.test_exposition import scrape

# What the dashboards that vLLM and TensorRT-LLM ship read, and we have a number for.
VLLM = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum
vllm:e2e_request_latency_seconds_count vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:inter_token_latency_seconds_bucket vllm:time_per_output_token_seconds_bucket
vllm:num_requests_running vllm:num_requests_waiting vllm:time_to_first_token_seconds_bucket
vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc vllm:request_prompt_tokens_bucket
vllm:request_generation_tokens_bucket vllm:request_success_total
vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
vllm:request_decode_time_seconds_sum vllm:request_inference_time_seconds_bucket
vllm:request_max_num_generation_tokens_sum vllm:request_params_n_sum
vllm:request_params_max_tokens_sum vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
vllm:prompt_tokens_cached_total vllm:request_time_per_output_token_seconds_bucket
"""
TRTLLM = """
trtllm_request_success_total trtllm_e2e_request_latency_seconds_bucket
trtllm_time_to_first_token_seconds_bucket trtllm_time_per_output_token_seconds_bucket
trtllm_request_queue_time_seconds_bucket trtllm_request_prefill_time_seconds_bucket
trtllm_request_decode_time_seconds_bucket trtllm_request_inference_time_seconds_bucket
trtllm_prompt_tokens_total trtllm_generation_tokens_total trtllm_prompt_cached_tokens_total
trtllm_kv_cache_hit_rate trtllm_kv_cache_utilization trtllm_num_requests_running
trtllm_num_requests_waiting trtllm_num_requests_completed_total trtllm_iteration_latency_seconds
"""


@pytest.fixture
def board() -> Board:
    """A server that has done a little of everything, in two acceptors."""
    board = Board.make(2)
    for lane in range(2):
        meter = Meter(board.numbers(lane))
        meter.count(PROMPT_TOKENS, by=10)
        meter.count(CACHED_TOKENS, by=4)
        meter.count(REQUEST_SUCCESS, "stop")
        meter.observe(TIME_TO_FIRST_TOKEN, 0.25)
        meter.observe(QUEUE_TIME, 0.5)
        meter.request("/v1/completions", 200)
        meter.request("/v1/completions", 404)
        meter.request("/v1/models", 404)
    engine = Meter(board.engine_numbers())
    engine.set(NUM_RUNNING, 3)
    engine.set(KV_CACHE_USAGE, 0.5)
    engine.set(LAST_STEP_TIME, 0.02)
    engine.count(PREFIX_CACHE_QUERIES, by=20)
    engine.count(PREFIX_CACHE_HITS, by=5)
    return board


def test_vllm_names_have_its_labels(board: Board) -> None:
    samples = scrape(board, "vllm")
    assert samples["vllm:prompt_tokens_total{engine=0,model_name=m}"] == 20
    assert samples["vllm:prompt_tokens_cached_total{engine=0,model_name=m}"] == 8
    success = "vllm:request_success_total{engine=0,finished_reason=stop,model_name=m}"
    assert samples[success] == 2
    ttft = "vllm:time_to_first_token_seconds"
    assert samples[f"{ttft}_bucket{{engine=0,le=0.25,model_name=m}}"] == 2
    assert samples[f"{ttft}_sum{{engine=0,model_name=m}}"] == 0.5
    assert samples["vllm:num_requests_running{engine=0,model_name=m}"] == 3
    assert samples["vllm:kv_cache_usage_perc{engine=0,model_name=m}"] == 0.5
    assert samples["vllm:prefix_cache_hits_total{engine=0,model_name=m}"] == 5
    assert samples["http_requests_total{handler=/v1/completions,status=2xx}"] == 2
    assert samples["http_requests_total{handler=/v1/completions,status=4xx}"] == 2


def test_trtllm_names_have_its_labels(board: Board) -> None:
    samples = scrape(board, "trtllm")
    assert samples["trtllm_prompt_tokens_total{engine_type=sim,model_name=m}"] == 20
    assert samples["trtllm_prompt_cached_tokens_total{engine_type=sim,model_name=m}"] == 8
    assert samples["trtllm_request_queue_time_seconds_sum{engine_type=sim,model_name=m}"] == 1.0
    assert samples["trtllm_kv_cache_utilization{engine_type=sim,model_name=m}"] == 0.5
    assert samples["trtllm_kv_cache_hit_rate{engine_type=sim,model_name=m}"] == 0.25
    assert samples["trtllm_iteration_latency_seconds{engine_type=sim,model_name=m}"] == 0.02
    assert samples["trtllm_num_requests_completed_total{engine_type=sim,model_name=m}"] == 2
    error = "trtllm_request_error_total{engine_type=sim,http_code=404,model_name=m}"
    assert samples[error] == 4


@pytest.mark.parametrize(("name", "wanted"), [("vllm", VLLM), ("trtllm", TRTLLM)])
def test_what_their_dashboards_read_is_there(board: Board, name: str, wanted: str) -> None:
    told = {sample.partition("{")[0] for sample in scrape(board, name)}
    assert not set(wanted.split()) - told


def test_names_are_told_side_by_side_and_only_those_asked_for(board: Board) -> None:
    ours, theirs = scrape(board), scrape(board, "vllm")
    assert scrape(board, "fastserve", "vllm") == ours | theirs
    assert not any(name.startswith("fastserve_") for name in theirs)
    assert not ours.keys() & theirs.keys()


def test_the_setting_knows_every_name() -> None:
    assert config_observing.METRICS_NAMES == NAMES
