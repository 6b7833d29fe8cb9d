"""The trace that a request belongs to, as its headers say (W3C Trace Context, level 1). Pure.

What is malformed is as good as not there (3.2.2.3): a trace is never a reason to refuse a request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.http1.message import RequestHead

# 3.2.2: version, trace id, parent id, flags, in lower-case. A later version may go on after a dash.
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
# 3.3.1.5: this much should be carried on, and nobody must carry more.
_STATE_BYTES_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Ids in lower-case hexadecimal. `span_id` is whose child comes next: the caller's span, or
    ours once there is one. `state` is other people's, handed on as it is."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""

    def headers(self) -> dict[str, str]:
        """The headers by which whoever works for this request belongs to the same trace."""
        flags = _SAMPLED if self.sampled else 0
        headers = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{flags:02x}"}
        return headers | {"tracestate": self.state} if self.state else headers


def trace_context_of(head: RequestHead) -> TraceContext | None:
    """Return what the request says of its trace, None if that is nothing or nonsense."""
    if head.header(b"traceparent") is None:
        return None
    given = [value for name, value in head.headers if name == b"traceparent"]
    match = _TRACEPARENT.fullmatch(given[0])
    if len(given) > 1 or match is None:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    if version == b"ff" or (version == b"00" and rest is not None):
        return None
    if not trace_id.strip(b"0") or not parent_id.strip(b"0"):
        return None
    # 3.3.1: it may come in several headers, which are one list.
    state = b",".join(value for name, value in head.headers if name == b"tracestate" and value)
    well_formed = len(state) <= _STATE_BYTES_MAX and state.isascii()
    return TraceContext(
        trace_id=trace_id.decode(),
        span_id=parent_id.decode(),
        sampled=bool(int(flags, 16) & _SAMPLED),
        state=state.decode() if well_formed else "",
    )
