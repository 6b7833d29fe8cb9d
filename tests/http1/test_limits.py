"""What happens at each limit on bytes, and one byte below it."""

from __future__ import annotations

import time

import pytest

from fastserve.http1.limits import Limits
from fastserve.http1.message import ProtocolError
from fastserve.http1.reader import RequestReader

LIMITS = Limits(
    target_bytes_max=100,
    header_bytes_max=300,
    header_count_max=5,
    body_bytes_max=50,
    chunk_line_bytes_max=40,
    chunk_overhead_bytes_max=60,
)
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def get(*, target: bytes = b"/", fields: bytes = b"") -> bytes:
    return b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n" + fields + b"\r\n"


def sized(size: int) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size


def read(message: bytes, *, limits: Limits = LIMITS, piece_bytes: int = 1 << 20) -> bytes | None:
    """The body of the request, or None where it would still be waited for."""
    reader = RequestReader(limits)
    head = body = None
    for start in range(0, len(message), piece_bytes):
        reader.feed(message[start : start + piece_bytes])
        head = head or reader.next_head()
        if head is not None:
            body = reader.next_body()
    return body


# The line is 15 bytes longer than its target, the head of `get` 27 bytes longer than its fields.
AT_THE_LIMIT = [
    pytest.param(get(target=b"/" + b"a" * 84), b"", id="target"),
    pytest.param(get(fields=b"X: %b\r\n" % (b"a" * 268)), b"", id="head"),
    pytest.param(get(fields=b"X: a\r\n" * 4), b"", id="number of fields"),
    pytest.param(sized(50) + b"a" * 50, b"a" * 50, id="body"),
    pytest.param(CHUNKED + b"32\r\n" + b"a" * 50 + b"\r\n0\r\n\r\n", b"a" * 50, id="chunked body"),
    pytest.param(
        CHUNKED + b"1;" + b"a" * 36 + b"\r\na\r\n0\r\n\r\n", b"a", id="line of chunk framing"
    ),
    pytest.param(CHUNKED + b"1\r\na\r\n" * 50 + b"0\r\n\r\n", b"a" * 50, id="chunks of one byte"),
    pytest.param(CHUNKED + b"0\r\n" + b"X: a\r\n" * 5 + b"\r\n", b"", id="number of trailers"),
]
ABOVE_THE_LIMIT = [
    pytest.param(get(target=b"/" + b"a" * 85), 414, id="target"),
    pytest.param(b"GET /" + b"a" * 100, 414, id="target that does not end"),
    pytest.param(b"A" * 33, 400, id="method that does not end"),
    pytest.param(get(fields=b"X: %b\r\n" % (b"a" * 269)), 431, id="head"),
    pytest.param(get()[:-2] + b"X: " + b"a" * 300, 431, id="field that does not end"),
    pytest.param(get()[:-2] + b"X" * 300, 431, id="name that does not end"),
    pytest.param(get(fields=b"X: a\r\n" * 5), 431, id="number of fields"),
    pytest.param(sized(51), 413, id="body, by its head alone"),
    pytest.param(sized(10**18), 413, id="length of 19 digits"),
    pytest.param(sized(10**30), 400, id="length that overflows 64 bits"),
    pytest.param(CHUNKED + b"33\r\n", 413, id="chunked body, by the size alone"),
    pytest.param(CHUNKED + b"32\r\n" + b"a" * 50 + b"\r\n1\r\n", 413, id="sum of chunks"),
    pytest.param(CHUNKED + b"1;" + b"a" * 38, 400, id="line of chunk framing"),
    pytest.param(CHUNKED + b"0" * 40, 400, id="zeros of a chunk size"),
    pytest.param(CHUNKED + (b"1;" + b"a" * 30 + b"\r\na\r\n") * 4, 400, id="sum of extensions"),
    pytest.param(CHUNKED + b"0\r\n" + b"X: a\r\n" * 6, 431, id="number of trailers"),
    pytest.param(CHUNKED + b"0\r\n" + b"X: aaaaaaaaaaaaaaa\r\n" * 5, 400, id="sum of trailers"),
]


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize(("message", "body"), AT_THE_LIMIT)
def test_what_is_at_a_limit_is_accepted(message: bytes, body: bytes, piece_bytes: int) -> None:
    assert read(message, piece_bytes=piece_bytes) == body


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize(("message", "status"), ABOVE_THE_LIMIT)
def test_what_is_above_it_is_refused(message: bytes, status: int, piece_bytes: int) -> None:
    with pytest.raises(ProtocolError) as refusal:
        read(message, piece_bytes=piece_bytes)
    assert refusal.value.status == status


@pytest.mark.parametrize(
    "host",
    [b"a" * 60_000 + b"@", b"%41" * 20_000 + b"%4", b"." * 60_000 + b"[", b":" * 60_000],
    ids=["plain", "encoded", "dots", "colons"],
)
def test_an_invalid_host_is_found_in_linear_time(host: bytes) -> None:
    message = b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
    start_s = time.process_time()
    with pytest.raises(ProtocolError):
        read(message, limits=Limits())
    assert time.process_time() - start_s < 1.0


def test_a_large_body_in_small_pieces_costs_linear_time() -> None:
    body = b"a" * (4 << 20)
    start_s = time.process_time()
    assert read(sized(len(body)) + body, limits=Limits(), piece_bytes=4096) == body
    assert time.process_time() - start_s < 2.0


@pytest.mark.parametrize("name", ["header_timeout_s", "body_bytes_max", "header_count_max"])
def test_a_limit_of_nothing_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})


def test_the_number_of_requests_may_be_unlimited() -> None:
    assert Limits(requests_per_connection_max=0).requests_per_connection_max == 0
