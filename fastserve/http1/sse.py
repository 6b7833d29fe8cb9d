"""Server-sent events, as bytes (WHATWG HTML 9.2).

No `id:` or `retry:` field is ever sent: either would make the openai client fail on the next ping
(openai-python #2722). `event:` belongs to dialects whose events have types; completions have none.
"""

from __future__ import annotations

# A comment keeps proxies (30 to 60 s idle) and client read timeouts at bay.
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """Frame `data`, one line of UTF-8, as an event. The blank line that ends it is never left out:
    without it the last event of a stream would be dropped."""
    return b"data: %b\n\n" % data


def named_event(name: bytes, data: bytes) -> bytes:
    """Frame `data` as an event of type `name`, for the dialects whose events have types."""
    return b"event: %b\ndata: %b\n\n" % (name, data)
