"""What is told of a request that has ended: numbers, a line, a record."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastserve.errors import EngineDead
from fastserve.generation import Finish, FinishReason
from tests.frontend.stage import FAILED, LENGTH, Asked, Stage

if TYPE_CHECKING:
    from fastserve.generation import ModelCard

WAITED = Finish(reason=FinishReason.STOP, queue_time_s=0.25, cached_tokens=1)
TRACEPARENT = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def ask(stage: Stage, *headers: str, **fields: Any) -> Asked:
    body = orjson.dumps({"prompt": "ab"} | fields)
    return stage.request("POST", "/v1/completions", body=body, headers=headers)


def get(stage: Stage, path: str) -> Asked:
    asked = stage.request("GET", path)
    stage.run_call()
    return asked


def numbers(stage: Stage) -> dict[str, float]:
    text = get(stage, "/metrics").sent.split(b"\r\n\r\n", 1)[1].decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return {name: value for name, value in samples.items() if value}


def last(stage: Stage) -> dict[str, Any]:
    told: dict[str, Any] = get(stage, "/perf_metrics").json()[-1]
    return told


def line(caplog: pytest.LogCaptureFixture, event: str) -> dict[str, Any]:
    [record] = [each for each in caplog.records if each.getMessage() == event]
    fields: dict[str, Any] = record.__dict__["fields"]
    return fields


def test_a_stream_is_measured_by_its_phases(stage: Stage) -> None:
    ask(stage, stream=True)
    stage.say(b"xy")
    stage.say(b"z", WAITED)
    told = numbers(stage)
    assert told["fastserve_prompt_tokens_total"] == 2
    assert told["fastserve_prompt_tokens_cached_total"] == 1
    assert told["fastserve_generation_tokens_total"] == 3
    assert told["fastserve_request_queue_time_seconds_sum"] == 0.25
    assert told["fastserve_request_params_max_tokens_sum"] == 16
    phases = ("prefill_time", "decode_time", "inference_time", "preprocessing_time")
    for name in (*(f"request_{phase}" for phase in phases), "inter_token_latency"):
        assert told[f"fastserve_{name}_seconds_count"] == 1, name


def test_of_a_whole_answer_nobody_knows_when_its_first_token_was_made(stage: Stage) -> None:
    ask(stage)
    stage.say(b"xyz", WAITED)
    told = numbers(stage)
    assert told["fastserve_request_inference_time_seconds_count"] == 1
    assert told["fastserve_e2e_request_latency_seconds_count"] == 1
    for name in ("prefill", "decode"):
        assert f"fastserve_request_{name}_time_seconds_count" not in told


def test_of_several_choices_the_longest_wait_counts_and_every_token(stage: Stage) -> None:
    ask(stage, n=2)
    stage.say(b"x", WAITED, request=0)
    stage.say(b"yz", LENGTH, request=1)
    told = numbers(stage)
    assert told["fastserve_request_queue_time_seconds_sum"] == 0.25
    assert told["fastserve_request_queue_time_seconds_count"] == 1
    assert told["fastserve_request_generation_tokens_count"] == 2
    assert told["fastserve_request_generation_tokens_sum"] == 3
    assert told["fastserve_request_params_n_sum"] == 2
    assert told["fastserve_request_success_total{finished_reason=length}"] == 1
    assert told["fastserve_request_success_total{finished_reason=stop}"] == 1
    assert (last(stage)["num_choices"], last(stage)["completion_tokens"]) == (2, 3)


def test_what_comes_too_late_is_no_token_of_anybody(stage: Stage) -> None:
    asked = ask(stage, stream=True)
    stage.say(b"x")
    asked.exchange.disconnect()
    stage.say(b"yz")
    told = numbers(stage)
    assert told["fastserve_generation_tokens_total"] == 1
    assert told["fastserve_lane_drops_total{reason=late}"] == 1
    assert (last(stage)["status"], last(stage)["finish_reason"]) == (499, "abort")


def test_a_failure_before_the_first_token_has_none(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastserve")
    ask(stage, stream=True)
    stage.say(b"", FAILED)
    told = numbers(stage)
    assert "fastserve_time_to_first_token_seconds_count" not in told
    assert "fastserve_request_queue_time_seconds_count" not in told
    assert last(stage)["perf_metrics"]["timing_metrics"]["first_token_time"] is None
    fields = line(caplog, "request failed")
    assert (fields["status"], fields["finish"], fields["tokens"]) == (500, "error", 0)
    assert "ttft_s" not in fields
    assert "out of luck" in str(fields["error"])


def test_an_answer_of_no_tokens_never_was_in_the_engine(stage: Stage) -> None:
    ask(stage, max_tokens=0, echo=True)
    assert "fastserve_request_queue_time_seconds_count" not in numbers(stage)
    timings = last(stage)["perf_metrics"]["timing_metrics"]
    assert timings["arrival_time"] is timings["first_scheduled_time"] is None
    assert timings["prepared_time"] <= timings["finished_time"]


def test_a_line_has_what_is_asked_after_most(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastserve")
    ask(stage, "X-Request-Id: mine", TRACEPARENT, stream=True)
    stage.say(b"x", LENGTH)
    fields = line(caplog, "request finished")
    assert fields["id"] == "mine"
    assert (fields["status"], fields["finish"]) == (200, "length")
    assert (fields["prompt_tokens"], fields["tokens"]) == (2, 1)
    assert 0 < fields["ttft_s"] <= fields["total_s"]
    assert fields["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    told = last(stage)
    assert (told["request_id"], told["trace_id"]) == ("mine", fields["trace_id"])
    assert told["stream"] is True


@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"]])
def test_a_prompt_is_written_only_where_that_is_asked_for(
    card: ModelCard, caplog: pytest.LogCaptureFixture, prompt: str | list[str]
) -> None:
    caplog.set_level(logging.DEBUG, "fastserve")
    ask(Stage(card), prompt=prompt)
    assert not [each for each in caplog.records if "ab" in str(each.__dict__)]
    ask(Stage(card, log_prompts=True), prompt=prompt, n=2)
    written = [
        each.__dict__["fields"]["prompt"]
        for each in caplog.records
        if each.getMessage() == "request prompt"
    ]
    assert written == ([prompt] if isinstance(prompt, str) else prompt)


def test_the_end_of_the_engine_is_told_for_each_request(stage: Stage) -> None:
    for _ in range(3):
        ask(stage, stream=True)
    stage.frontend.fail_all(EngineDead("it died"))
    told = numbers(stage)
    assert told["fastserve_http_requests_total{code=503,endpoint=/v1/completions}"] == 3
    assert told["fastserve_request_success_total{finished_reason=error}"] == 3
    assert [each["status"] for each in get(stage, "/perf_metrics").json()] == [503] * 3
