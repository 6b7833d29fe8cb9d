"""A span for each request, exported by a thread: the sole owner of OpenTelemetry.

The event loop puts a few values in a queue, which is bounded: what does not fit is dropped and
counted. The thread makes spans of them and hands them to the library's exporter. Names of
attributes are OpenTelemetry's (HTTP and GenAI conventions), and for latencies, which have none
yet, vLLM's.

OpenTelemetry is imported when the first span is due: nobody else pays for it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastserve.frontend.trace_context import TraceContext
from fastserve.log import get_logger
from fastserve.metrics.catalog import TRACE_SPANS

if TYPE_CHECKING:
    from fastserve.config_observing import TracingConfig
    from fastserve.metrics.meter import Meter

log = get_logger("tracing")

# The collector's own limits are in MiB; so many spans are less than one.
_BATCH_SPANS_MAX = 512
_ID_BITS = 64

Attributes = dict[str, str | int | float | bool | list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A request that has ended. `parent_id` None: nobody sent a traceparent. Times are Unix time.

    `events` are the phases that it came to, each with when.
    """

    context: TraceContext
    parent_id: str | None
    name: str
    began_unix_s: float
    ended_unix_s: float
    attributes: Attributes
    events: list[tuple[str, float]]
    error: str | None


class Tracer:
    """Decides which requests have a span, and exports these."""

    def __init__(self, config: TracingConfig, *, meter: Meter, lane: int) -> None:
        self._config = config
        self._meter = meter
        self._lane = lane
        # A trace id is random, so a bound on its low half is a share of all (as TraceIdRatioBased).
        self._ids_below = round(config.sample_ratio * (1 << _ID_BITS))
        self._random = random.SystemRandom()
        self._waiting: deque[Span] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def begin(self, caller: TraceContext | None) -> TraceContext:
        """Return the context of a new span; its `sampled` says whether it is to be exported."""
        span_id = f"{self._random.getrandbits(_ID_BITS) or 1:016x}"
        if caller is not None:
            return replace(caller, span_id=span_id)
        trace_id = self._random.getrandbits(2 * _ID_BITS) or 1
        return TraceContext(
            trace_id=f"{trace_id:032x}",
            span_id=span_id,
            sampled=trace_id % (1 << _ID_BITS) < self._ids_below,
        )

    def end(self, span: Span) -> None:
        """Have `span` exported, if there is room for it to wait. Never blocks."""
        if len(self._waiting) >= self._config.spans_waiting_max:
            self._meter.count(TRACE_SPANS, "dropped")
            return
        self._waiting.append(span)

    def close(self) -> None:
        """Export what waits, for as long as one export may take."""
        self._closing = True
        self._wake.set()
        self._thread.join(self._config.export_timeout_s)

    # ---- in the thread, whose words of the meter's row nobody else writes

    def _run(self) -> None:
        try:
            exporter = _Exporter(self._config, lane=self._lane)
            while not self._closing or self._waiting:
                self._wake.wait(self._config.export_interval_s)
                while self._waiting:
                    self._export(exporter)
            exporter.close()
        except Exception:
            log.exception("tracing failed", next="requests go on without spans")

    def _export(self, exporter: _Exporter) -> None:
        number = min(len(self._waiting), _BATCH_SPANS_MAX)
        spans = [self._waiting.popleft() for _ in range(number)]
        taken = exporter.export(spans)
        if not taken:
            log.warning_burst("spans not taken", endpoint=self._config.otlp_endpoint, spans=number)
        self._meter.count(TRACE_SPANS, "exported" if taken else "failed", by=number)


class _Exporter:
    """The library's exporter, and what all spans have in common."""

    def __init__(self, config: TracingConfig, *, lane: int) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

        self._exporter = OTLPSpanExporter(
            endpoint=config.otlp_endpoint, timeout=config.export_timeout_s
        )
        self._resource = Resource.create(
            {"service.name": config.service_name, "service.instance.id": f"acceptor-{lane}"}
        )
        self._scope = InstrumentationScope("fastserve")

    def export(self, spans: list[Span]) -> bool:
        """Whether the collector has taken them; it may take `export_timeout_s` to say so."""
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415

        result = self._exporter.export([self._readable(span) for span in spans])
        return result is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # the library's

    def _readable(self, span: Span) -> Any:  # noqa: ANN401 (the library's own kind)
        from opentelemetry.sdk.trace import Event, ReadableSpan  # noqa: PLC0415
        from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415

        status = Status(StatusCode.ERROR, span.error) if span.error else Status()
        return ReadableSpan(
            name=span.name,
            context=_span_context(span.context, span.context.span_id, is_remote=False),
            parent=_span_context(span.context, span.parent_id, is_remote=True),
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(name, timestamp=_nanoseconds(at_s)) for name, at_s in span.events],
            kind=SpanKind.SERVER,
            status=status,
            start_time=_nanoseconds(span.began_unix_s),
            end_time=_nanoseconds(span.ended_unix_s),
            instrumentation_scope=self._scope,
        )


def _span_context(context: TraceContext, span_id: str | None, *, is_remote: bool) -> Any:  # noqa: ANN401
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState  # noqa: PLC0415

    if span_id is None:
        return None
    return SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(span_id, 16),
        is_remote=is_remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([context.state]) if context.state else None,
    )


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e9)


def now_unix_s(now_s: float) -> float:
    """What the clock of the wall said at `now_s` (monotonic)."""
    return time.time() - (time.monotonic() - now_s)
