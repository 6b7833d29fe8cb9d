"""The headers of W3C Trace Context: what is taken, what is as good as not there."""

from __future__ import annotations

import pytest

from fastserve.frontend.trace_context import TraceContext, trace_context_of
from fastserve.http1.parser import parse_head

# The specification's own example (3.2.2.5), and 3.3's.
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"


def context_of(*headers: str) -> TraceContext | None:
    lines = ["POST / HTTP/1.1", "Host: x", *headers]
    raw = ("\r\n".join(lines) + "\r\n\r\n").encode()
    return trace_context_of(parse_head(raw, header_count_max=10, body_bytes_max=1))


def test_a_trace_is_read() -> None:
    assert context_of(f"Traceparent: {SAMPLED}") == TraceContext(
        trace_id=TRACE, span_id=PARENT, sampled=True
    )


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)]
)
def test_one_flag_says_whether_it_is_sampled(flags: str, sampled: bool) -> None:
    context = context_of(f"traceparent: 00-{TRACE}-{PARENT}-{flags}")
    assert context is not None
    assert context.sampled is sampled


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"cc-{TRACE}-{PARENT}-01x",
    ],
)
def test_what_is_malformed_is_as_good_as_not_there(value: str) -> None:
    assert context_of(f"traceparent: {value}", "tracestate: a=1") is None


def test_a_later_version_may_say_more() -> None:
    context = context_of(f"traceparent: cc-{TRACE}-{PARENT}-01-what-the-future-will-be-like")
    assert context == TraceContext(trace_id=TRACE, span_id=PARENT, sampled=True)


def test_two_parents_are_none() -> None:
    assert context_of(f"traceparent: {SAMPLED}", f"traceparent: {SAMPLED}") is None


def test_a_state_in_several_headers_is_one_list_and_is_handed_on() -> None:
    context = context_of(f"traceparent: {SAMPLED}", "tracestate: a=1", "tracestate: b=2,c=3")
    assert context is not None
    assert context.headers() == {"traceparent": SAMPLED, "tracestate": "a=1,b=2,c=3"}


@pytest.mark.parametrize("state", ["", "a=" + "x" * 511])
def test_a_state_that_is_empty_or_too_long_is_left_out(state: str) -> None:
    context = context_of(f"traceparent: {SAMPLED}", f"tracestate: {state}")
    assert context is not None
    assert context.headers() == {"traceparent": SAMPLED}


def test_a_state_alone_is_nothing() -> None:
    assert context_of("tracestate: a=1") is None
