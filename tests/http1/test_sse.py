"""Events, as a client's parser sees them (WHATWG HTML 9.2.6)."""

from __future__ import annotations

import pytest

from fastserve.http1 import sse


def parse(stream: bytes) -> list[tuple[bytes, bytes]]:
    """Dispatch events as the standard says: (type, data), a type of b"" being `message`."""
    events = []
    name, data = b"", list[bytes]()
    for line in stream.split(b"\n"):
        field, _, value = line.partition(b":")
        if line == b"":
            if data:
                events.append((name, b"\n".join(data)))
            name, data = b"", []
        elif field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
        else:
            assert field == b"", f"a field that is never to be sent: {line!r}"
    assert data == [], "the last event was not dispatched"
    return events


@pytest.mark.parametrize("data", [b"{}", b'{"text":"caf\xc3\xa9: a"}', b" leading", b"a:b"])
def test_data_arrives_as_it_was(data: bytes) -> None:
    assert parse(sse.event(data)) == [(b"", data)]


def test_a_named_event_has_a_type() -> None:
    assert parse(sse.named_event(b"message_stop", b"{}")) == [(b"message_stop", b"{}")]


def test_a_ping_is_nothing_wherever_it_comes() -> None:
    stream = sse.PING + sse.event(b"1") + sse.PING + sse.event(b"2") + sse.DONE + sse.PING
    assert parse(stream) == [(b"", b"1"), (b"", b"2"), (b"", b"[DONE]")]
