"""A span for each request, as a collector gets it."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

import pytest

from fastserve.config_observing import TracingConfig
from fastserve.frontend.trace_context import TraceContext
from fastserve.frontend.tracing import Tracer
from fastserve.generation import Finish, FinishReason
from fastserve.metrics.board import Board
from fastserve.metrics.catalog import SERIES_AT, TRACE_SPANS
from fastserve.metrics.meter import Meter
from tests.collector import attributes, collecting
from tests.frontend.stage import FAILED, Asked, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastserve.generation import ModelCard

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STOPPED = Finish(reason=FinishReason.STOP, queue_time_s=0.25, cached_tokens=1)


class Tracing:
    """A tracer, and what it counts."""

    def __init__(self, endpoint: str, **options: float) -> None:
        quick = {"export_interval_s": 0.05, "export_timeout_s": 5.0}
        config = TracingConfig(otlp_endpoint=endpoint, **quick | options)  # type: ignore[arg-type] # all of them are numbers
        self.row = Board.make(1).numbers(0)
        self.tracer = Tracer(config, meter=Meter(self.row), lane=4)

    def counted(self, outcome: str) -> float:
        return self.row[SERIES_AT[TRACE_SPANS.name, (outcome,)]]


@contextlib.contextmanager
def tracing(endpoint: str, **options: float) -> Iterator[Tracing]:
    tracing = Tracing(endpoint, **options)
    try:
        yield tracing
    finally:
        tracing.tracer.close()


def complete(stage: Stage, *headers: str, finish: Finish = STOPPED) -> Asked:
    body = b'{"prompt":"ab","stream":true}'
    asked = stage.request("POST", "/v1/completions", body=body, headers=headers)
    if finish.reason is not FinishReason.ERROR:
        stage.say(b"x")
    stage.say(b"y", finish)
    return asked


def test_a_request_is_a_span_whose_phases_are_events(card: ModelCard) -> None:
    began_ns = time.time_ns()
    with collecting() as collector:
        with tracing(collector.url) as used:
            asked = complete(Stage(card, tracer=used.tracer))
        [span] = collector.spans
        [resource] = collector.resources
        assert used.counted("exported") == 1
    assert resource["service.name"] == "fastserve"
    assert resource["service.instance.id"] == "acceptor-4"
    assert (span.name, span.kind) == ("POST /v1/completions", span.SPAN_KIND_SERVER)
    assert span.parent_span_id == b""
    told = attributes(span.attributes)
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.request.id"] == asked.header("x-request-id")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (2, 2)
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["gen_ai.latency.time_in_queue"] == 0.25
    assert 0 < told["gen_ai.latency.time_to_first_token"] < told["gen_ai.latency.e2e"]
    events = {event.name: event.time_unix_nano for event in span.events}
    assert list(events) == ["prepared", "submitted", "scheduled", "first_token", "last_token"]
    in_order = [events[name] for name in ("prepared", "submitted", "first_token", "last_token")]
    ends = [span.start_time_unix_nano, *in_order, span.end_time_unix_nano]
    assert ends == sorted(ends)
    # Two clocks are compared, and one of them may be set.
    assert abs(ends[0] - began_ns) < 60e9


def test_a_span_is_the_child_of_the_callers_and_the_engines_parent(card: ModelCard) -> None:
    with collecting() as collector:
        with tracing(collector.url) as used:
            stage = Stage(card, tracer=used.tracer)
            complete(stage, f"traceparent: 00-{TRACE}-{PARENT}-01", "tracestate: a=1")
        [span] = collector.spans
    assert span.trace_id.hex() == TRACE
    assert span.parent_span_id.hex() == PARENT
    assert span.trace_state == "a=1"
    assert stage.submits[0].trace_headers == {
        "traceparent": f"00-{TRACE}-{span.span_id.hex()}-01",
        "tracestate": "a=1",
    }


def test_who_is_not_sampled_has_no_span(card: ModelCard) -> None:
    with collecting() as collector:
        with tracing(collector.url) as used:
            stage = Stage(card, tracer=used.tracer)
            complete(stage, f"traceparent: 00-{TRACE}-{PARENT}-00")
            complete(stage, f"traceparent: 00-{'1' * 32}-{PARENT}-01")
        assert [span.trace_id.hex() for span in collector.spans] == ["1" * 32]
    headers = stage.submits[0].trace_headers
    assert headers is not None
    assert headers["traceparent"].endswith("-00")


def test_a_failure_is_an_error_of_the_span(card: ModelCard) -> None:
    with collecting() as collector:
        with tracing(collector.url) as used:
            complete(Stage(card, tracer=used.tracer), finish=FAILED)
        [span] = collector.spans
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert "out of luck" in span.status.message
    assert attributes(span.attributes)["http.response.status_code"] == 500
    assert "first_token" not in [event.name for event in span.events]


def test_a_share_of_those_without_a_parent_is_sampled() -> None:
    with tracing("http://127.0.0.1:9/", sample_ratio=0.25) as used:
        contexts = [used.tracer.begin(None) for _ in range(4000)]
    assert 800 < sum(context.sampled for context in contexts) < 1200
    assert len({context.trace_id for context in contexts}) == 4000
    assert len({context.span_id for context in contexts}) == 4000


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_none_and_all_are_none_and_all(ratio: float) -> None:
    with tracing("http://127.0.0.1:9/", sample_ratio=ratio) as used:
        assert {used.tracer.begin(None).sampled for _ in range(100)} == {bool(ratio)}


def test_what_waits_is_bounded_and_the_rest_is_counted(card: ModelCard) -> None:
    with collecting() as collector:
        with tracing(collector.url, spans_waiting_max=3, export_interval_s=30) as used:
            stage = Stage(card, tracer=used.tracer)
            for _ in range(5):
                complete(stage)
            assert used.counted("dropped") == 2
        assert len(collector.spans) == used.counted("exported") == 3


def test_what_the_collector_does_not_take_is_counted_and_harms_nobody(
    card: ModelCard, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with collecting() as collector:
        collector.status = 400
        with tracing(collector.url) as used:
            asked = complete(Stage(card, tracer=used.tracer))
            assert asked.status == 200
            assert collector.asked.acquire(timeout=20)
        assert used.counted("failed") == 1
    assert "spans not taken" in caplog.text


def test_a_closed_port_does_not_hold_the_end_for_longer_than_an_export(card: ModelCard) -> None:
    began_s = time.monotonic()
    with tracing("http://127.0.0.1:9/v1/traces", export_timeout_s=1.0) as used:
        complete(Stage(card, tracer=used.tracer))
    assert time.monotonic() - began_s < 10


def test_without_a_tracer_a_trace_is_still_handed_on(stage: Stage) -> None:
    complete(stage, f"traceparent: 00-{TRACE}-{PARENT}-01")
    assert stage.submits[0].trace_headers == {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    complete(stage)
    assert stage.submits[1].trace_headers is None


def test_a_context_says_nothing_of_a_state_that_is_not_there() -> None:
    context = TraceContext(trace_id=TRACE, span_id=PARENT, sampled=False)
    assert context.headers() == {"traceparent": f"00-{TRACE}-{PARENT}-00"}
