"""What is told of a request when it has ended: metrics, a log line, a record, a span.

Once a request, off the path of its tokens. Whoever ends one calls `finished`, and what each part
of it costs is in one place here.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from fastserve.frontend.trace_context import trace_context_of
from fastserve.frontend.tracing import Span, now_unix_s
from fastserve.generation import ANSWERED
from fastserve.log import get_logger
from fastserve.metrics.catalog import (
    CACHED_TOKENS,
    DECODE_TIME,
    E2E_REQUEST_LATENCY,
    INFERENCE_TIME,
    INTER_TOKEN_LATENCY,
    PREFILL_TIME,
    PREPROCESSING_TIME,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PARAMS_MAX_TOKENS,
    REQUEST_PARAMS_N,
    REQUEST_PROMPT_TOKENS,
    REQUEST_SUCCESS,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
)
from fastserve.metrics.recent import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.errors import FastserveError
    from fastserve.frontend.streams import Answer
    from fastserve.frontend.trace_context import TraceContext
    from fastserve.frontend.tracing import Attributes, Tracer
    from fastserve.generation import Finish
    from fastserve.http1.message import RequestHead
    from fastserve.lane.messages import Submit
    from fastserve.metrics.meter import Meter
    from fastserve.metrics.recent import RecentRequests

log = get_logger("frontend")

# With any other the engine may never have begun.


class Phases:
    """When a request came to what (monotonic; 0: never), and what the engine said at its end.

    One is made when the request has become tokens.
    """

    __slots__ = (
        "first_token_s",
        "last_token_s",
        "prepared_s",
        "queue_time_s",
        "submitted_s",
    )

    def __init__(self) -> None:
        self.prepared_s = time.monotonic()
        self.submitted_s = 0.0
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.queue_time_s: float | None = None

    def first_token(self, now_s: float, finish: Finish | None) -> None:
        """Something came of the engine: a token, unless it says that there will be none."""
        if finish is None or finish.reason in ANSWERED:
            self.first_token_s = now_s

    def finished(self, finish: Finish) -> None:
        """The engine has finished a choice: the request waited as long as the last of them."""
        if finish.reason in ANSWERED:
            self.queue_time_s = max(self.queue_time_s or 0.0, finish.queue_time_s)

    @property
    def scheduled_s(self) -> float:
        """When the engine first worked on it, as far as it told."""
        if self.queue_time_s is None or not self.submitted_s:
            return 0.0
        return self.submitted_s + self.queue_time_s


class Traces:
    """Which trace each request belongs to, and the span that is made of it, if any is."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer

    def begin(self, head: RequestHead) -> tuple[TraceContext | None, str | None]:
        """Return the context that the engine works in, and the id of the caller's span."""
        caller = trace_context_of(head)
        if self._tracer is None:
            return caller, None
        return self._tracer.begin(caller), caller.span_id if caller else None

    def end(self, answer: Answer, now_s: float, *, status: int, error: str | None) -> None:
        context = answer.trace
        if self._tracer is None or context is None or not context.sampled:
            return
        phases = answer.phases
        events = {
            "prepared": phases.prepared_s,
            "submitted": phases.submitted_s,
            "scheduled": phases.scheduled_s,
            "first_token": phases.first_token_s,
            "last_token": phases.last_token_s,
        }
        head = answer.exchange.head
        self._tracer.end(
            Span(
                context=context,
                parent_id=answer.parent_span_id,
                name=f"{head.method} {head.path}",
                began_unix_s=now_unix_s(answer.received_s),
                ended_unix_s=now_unix_s(now_s),
                attributes=_attributes(answer, now_s, status=status),
                events=[(name, now_unix_s(at_s)) for name, at_s in events.items() if at_s],
                error=error,
            )
        )


class Observer:
    """Tells of one acceptor's requests. `recent` is its ring, `log_prompts` a setting.

    `observe_gaps` takes the seconds between two deltas of a stream, and of how many streams.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        recent: RecentRequests,
        tracer: Tracer | None = None,
        log_prompts: bool = False,
    ) -> None:
        self.meter = meter
        self.observe_gaps = meter.timer(INTER_TOKEN_LATENCY)
        self.traces = Traces(tracer)
        self._recent = recent
        self._log_prompts = log_prompts

    def submitted(self, answer: Answer, submits: Sequence[Submit]) -> None:
        """A request went to the engine, in `submits`."""
        phases, meter = answer.phases, self.meter
        phases.submitted_s = time.monotonic()
        meter.observe(PREPROCESSING_TIME, phases.submitted_s - answer.received_s)
        meter.observe(REQUEST_PARAMS_N, answer.request.n)
        meter.observe(REQUEST_PARAMS_MAX_TOKENS, submits[0].sampling.max_tokens)
        if self._log_prompts:
            self._log_prompt(answer, submits)

    def _log_prompt(self, answer: Answer, submits: Sequence[Submit]) -> None:
        token_bytes = answer.model.tokenizer.token_bytes
        # Choices of one prompt share its list.
        prompts = {id(submit.prompt_token_ids): submit.prompt_token_ids for submit in submits}
        for prompt in prompts.values():
            text = b"".join([token_bytes[token_id] for token_id in prompt])
            log.info(
                "request prompt",
                id=answer.exchange.request_id,
                prompt=text.decode(errors="replace"),
            )

    def first_token(self, answer: Answer, now_s: float, finish: Finish | None) -> None:
        """The first that came of the engine for a request, be it only `finish`."""
        answer.phases.first_token(now_s, finish)
        if answer.phases.first_token_s:
            self._count_prompt(answer)

    def _count_prompt(self, answer: Answer) -> None:
        """Once for each request that the engine has taken: what it has refused, it never reads."""
        self.meter.count(PROMPT_TOKENS, by=answer.prompt_tokens)
        self.meter.observe(REQUEST_PROMPT_TOKENS, answer.prompt_tokens)

    def finished(self, answer: Answer, *, status: int, error: FastserveError | None) -> None:
        """A request has ended, well or not."""
        now_s = time.monotonic()
        if not answer.phases.first_token_s and (error is None or error.rejection is None):
            self._count_prompt(answer)  # its client left, or its time was up, before a token came
        cached_tokens = answer.num_cached_tokens or 0
        self._measure(answer, now_s, status=status, cached_tokens=cached_tokens)
        self._record(answer, now_s, status=status, cached_tokens=cached_tokens)
        self._log(answer, now_s, status=status, error=error)
        self.traces.end(answer, now_s, status=status, error=str(error) if error else None)

    def _measure(self, answer: Answer, now_s: float, *, status: int, cached_tokens: int) -> None:
        meter, phases = self.meter, answer.phases
        meter.request(answer.exchange.head.path, status)
        num_tokens = 0
        for choice in answer.choices:
            num_tokens += choice.num_tokens
            meter.observe(REQUEST_GENERATION_TOKENS, choice.num_tokens)
            if choice.finish_reason:
                meter.count(REQUEST_SUCCESS, choice.finish_reason)
        meter.observe(E2E_REQUEST_LATENCY, now_s - answer.received_s)
        if cached_tokens:
            meter.count(CACHED_TOKENS, by=cached_tokens)
        if phases.queue_time_s is not None and phases.submitted_s:
            meter.observe(QUEUE_TIME, phases.queue_time_s)
        if not phases.first_token_s:
            return
        meter.observe(TIME_TO_FIRST_TOKEN, phases.first_token_s - answer.received_s)
        after_first = num_tokens - len(answer.choices)
        if after_first > 0 and status == 200:
            took_s = now_s - phases.first_token_s
            meter.observe(TIME_PER_OUTPUT_TOKEN, took_s / after_first)
        if phases.last_token_s:
            self._measure_phases(phases, told_as_they_come=answer.request.stream)

    def _measure_phases(self, phases: Phases, *, told_as_they_come: bool) -> None:
        """Of a request that was answered. The tokens of a whole answer come all at once, so when
        the first of them was made is not known."""
        meter, scheduled_s = self.meter, phases.scheduled_s
        if told_as_they_come:
            meter.observe(DECODE_TIME, phases.last_token_s - phases.first_token_s)
        if scheduled_s:
            # What the engine says by its clock can be a little later than what came of it by ours.
            meter.observe(INFERENCE_TIME, max(phases.last_token_s - scheduled_s, 0.0))
            if told_as_they_come:
                meter.observe(PREFILL_TIME, max(phases.first_token_s - scheduled_s, 0.0))

    def _record(self, answer: Answer, now_s: float, *, status: int, cached_tokens: int) -> None:
        phases = answer.phases
        received_s = answer.received_s

        def after_s(at_s: float) -> float:
            return at_s - received_s if at_s else math.nan

        self._recent.write(
            RequestRecord(
                received_unix_s=now_unix_s(received_s),
                prepared_s=after_s(phases.prepared_s),
                submitted_s=after_s(phases.submitted_s),
                scheduled_s=after_s(phases.scheduled_s),
                first_token_s=after_s(phases.first_token_s),
                last_token_s=after_s(phases.last_token_s),
                finished_s=now_s - received_s,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=cached_tokens,
                generation_tokens=answer.num_tokens,
                num_choices=len(answer.choices),
                status=status,
                endpoint=answer.exchange.head.path,
                finish_reason=answer.choices[0].finish_reason if answer.choices else "",
                stream=answer.request.stream,
                request_id=answer.exchange.request_id,
                trace_id=answer.trace.trace_id if answer.trace else "",
            )
        )

    def _log(
        self, answer: Answer, now_s: float, *, status: int, error: FastserveError | None
    ) -> None:
        if error is None and not log.shows_info:
            return
        phases = answer.phases
        fields: dict[str, object] = {
            "id": answer.exchange.request_id,
            "status": status,
            "finish": ",".join(_finish_reasons(answer)),
            "prompt_tokens": answer.prompt_tokens,
            "tokens": answer.num_tokens,
            "total_s": round(now_s - answer.received_s, 4),
        }
        if phases.first_token_s:
            fields["ttft_s"] = round(phases.first_token_s - answer.received_s, 4)
        if answer.trace is not None:
            fields["trace_id"] = answer.trace.trace_id
        if error is None:
            log.info("request finished", **fields)
        else:
            log.failed("request failed", error, **fields)


def _finish_reasons(answer: Answer) -> list[str]:
    """Each reason once, in order."""
    return list(dict.fromkeys(choice.finish_reason for choice in answer.choices))


def _attributes(answer: Answer, now_s: float, *, status: int) -> Attributes:
    phases, head = answer.phases, answer.exchange.head
    attributes: Attributes = {
        "http.request.method": head.method,
        "http.route": head.path,
        "url.path": head.path,
        "http.response.status_code": status,
        "gen_ai.response.model": answer.model.card.name,
        "gen_ai.response.finish_reasons": _finish_reasons(answer),
        "gen_ai.response.id": answer.completion_id,
        "gen_ai.usage.input_tokens": answer.prompt_tokens,
        "gen_ai.usage.output_tokens": answer.num_tokens,
        "gen_ai.request.id": answer.exchange.request_id,
        "gen_ai.latency.e2e": now_s - answer.received_s,
    }
    if phases.first_token_s:
        ttft_s = phases.first_token_s - answer.received_s
        attributes["gen_ai.latency.time_to_first_token"] = ttft_s
    if phases.queue_time_s is not None:
        attributes["gen_ai.latency.time_in_queue"] = phases.queue_time_s
    return attributes
