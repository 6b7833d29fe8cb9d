"""One connection, over a transport and a clock that the test holds."""

from __future__ import annotations

import asyncio
import re
import socket
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve.http1 import sse
from fastserve.http1.connection import Connection
from fastserve.http1.connections import Connections
from fastserve.http1.limits import Limits
from fastserve.http1.message import RequestHead, Response

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from fastserve.http1.exchange import Exchange

GET = b"GET /now HTTP/1.1\r\nHost: a\r\n\r\n"
LATER = b"GET /later HTTP/1.1\r\nHost: a\r\n\r\n"
LATER_10 = b"GET /later HTTP/1.0\r\n\r\n"
# linux/tcp_states.h
ESTABLISHED, CLOSE, CLOSE_WAIT = 1, 7, 8
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def post(body: bytes, *, fields: bytes = b"", target: bytes = b"/echo") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST " + target + b" HTTP/1.1\r\nHost: a\r\n" + length + fields + b"\r\n" + body


class Timer:
    def __init__(self, at_s: float, callback: Callable[[], None]) -> None:
        self.at_s = at_s
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[Timer] = []
        self.timers_made = 0
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def run_soon(self) -> None:
        while self.soon:
            self.soon.pop(0)()

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, callback: Callable[[], None]) -> Timer:
        self.timers_made += 1
        self.timers.append(Timer(at_s, callback))
        return self.timers[-1]

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return self.call_at(self.now_s + delay_s, callback)

    def advance(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        while True:
            self.timers = [timer for timer in self.timers if not timer.cancelled]
            due = [timer for timer in self.timers if timer.at_s <= end_s]
            if not due:
                break
            first = min(due, key=lambda timer: timer.at_s)
            self.timers.remove(first)
            self.now_s = max(self.now_s, first.at_s)
            first.callback()
        self.now_s = end_s


class Socket:
    """A TCP socket whose state the test sets, as the kernel would."""

    family = socket.AF_INET

    def __init__(self) -> None:
        self.state = ESTABLISHED

    def getsockopt(self, level: int, option: int, length: int, /) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return bytes([self.state])

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        pass


class Transport(asyncio.Transport):
    """Keeps what is written; the client takes it at once, or after `stop_reading` when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.protocol: Connection | None = None
        self.unsent_bytes = 0
        self.high = 0
        self.client_reads = True
        self.reading = True
        self.eof_written = False
        self.ending: str = ""
        self.socket: Socket | None = None
        self.tls = False

    @property
    def sent(self) -> bytes:
        return b"".join(self.writes)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return object() if self.tls else default
        return self.socket if name == "socket" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.eof_written, "written to after the end"
        if self.ending:
            return
        self.writes.append(bytes(data))
        if not self.client_reads:
            was_bytes, self.unsent_bytes = self.unsent_bytes, self.unsent_bytes + len(data)
            if was_bytes <= self.high < self.unsent_bytes:
                assert self.protocol is not None
                self.protocol.pause_writing()

    def take(self, size: int) -> None:
        """The client reads `size` bytes more of what waits for it."""
        was_bytes, self.unsent_bytes = self.unsent_bytes, max(0, self.unsent_bytes - size)
        if self.unsent_bytes <= self.high // 4 < was_bytes:
            assert self.protocol is not None
            self.protocol.resume_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high or 0

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return not self.tls

    def write_eof(self) -> None:
        self.eof_written = True

    def is_closing(self) -> bool:
        return bool(self.ending)

    def close(self) -> None:
        self.ending = self.ending or "close"

    def abort(self) -> None:
        self.ending = "abort"


class App:
    """/now and /echo answer at once, /later when the test says so; /refused fails the check."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.disconnects = 0

    def check(self, head: RequestHead) -> Response | None:
        if head.path == "/check-fails":
            raise RuntimeError("a bug in check")
        return Response(404, body=b"{}") if head.path == "/refused" else None

    def serve(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        exchange.on_disconnect = self._on_disconnect
        match exchange.head.path:
            case "/later":
                pass
            case "/fails":
                raise RuntimeError("a bug in serve")
            case "/fails-later":
                exchange.start_stream()
                raise RuntimeError("a bug in a stream")
            case "/splits":
                exchange.respond(Response(200, headers=((b"X", b"a\r\nSet-Cookie: b"),)))
            case "/empty":
                exchange.respond(Response(204))
            case _:
                exchange.respond(Response(200, body=exchange.body or b"now"))

    def error_body(self, status: int, message: str, *, path: str | None) -> bytes:
        return b'{"error":{"message":"%b"}}' % message.encode()

    def _on_disconnect(self) -> None:
        self.disconnects += 1


class Wire:
    """A connection and everything around it."""

    def __init__(
        self,
        *,
        connections: Connections | None = None,
        tcp: bool = False,
        tls: bool = False,
        logger: logging.Logger | None = None,
        **limits: Any,
    ) -> None:
        self.app = App()
        self.loop = Loop()
        self.transport = Transport()
        self.connections = Connections() if connections is None else connections
        self.connection = Connection(
            self.app,
            limits=Limits(**limits),
            connections=self.connections,
            logger=logger,
            loop=cast("asyncio.AbstractEventLoop", self.loop),
        )
        self.transport.protocol = self.connection
        self.transport.tls = tls
        if tcp or tls:
            self.transport.socket = Socket()
        self.connection.connection_made(self.transport)

    def send(self, *pieces: bytes) -> Wire:
        for piece in pieces:
            self.connection.data_received(piece)
            self.loop.run_soon()
        return self

    @property
    def exchange(self) -> Exchange:
        return self.app.exchanges[-1]

    @property
    def sent(self) -> bytes:
        return self.transport.sent

    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", self.sent)]

    def bodies(self) -> list[bytes]:
        """The bodies of answers that are framed by their length."""
        found, rest = [], self.sent
        while match := re.search(rb"Content-Length: (\d+)\r\n(?:.+\r\n)*\r\n", rest):
            end = match.end() + int(match[1])
            found.append(rest[match.end() : end])
            rest = rest[end:]
        return found

    def is_over(self) -> bool:
        """Whether the client has been told that nothing follows."""
        return self.transport.eof_written or bool(self.transport.ending)

    def lose(self) -> None:
        """What the loop does at last."""
        self.connection.connection_lost(None)


# Answers.


def test_an_answer_carries_what_every_answer_must() -> None:
    head = Wire().send(GET).sent.partition(b"\r\n\r\n")[0]
    assert re.fullmatch(
        rb"HTTP/1\.1 200 OK\r\n"
        rb"Date: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n"
        rb"Server: fastserve\r\n"
        rb"X-Request-Id: [0-9a-f]{12}-[0-9a-f]+\r\n"
        rb"Content-Type: application/json\r\n"
        rb"Content-Length: 3",
        head,
    )


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (b"req_1.a-B", True),
        (b"a" * 128, True),
        (b"a" * 129, False),
        (b"a b", False),
        (b"<script>", False),
        (b"", False),
    ],
)
def test_a_request_id_is_echoed_if_it_is_harmless(given: bytes, echoed: bool) -> None:
    wire = Wire().send(post(b"x", fields=b"X-Request-ID: " + given + b"\r\n"))
    assert (b"X-Request-Id: %b\r\n" % given in wire.sent) is echoed
    assert b"X-Request-Id: %b\r\n" % wire.exchange.request_id.encode() in wire.sent


def test_made_request_ids_differ() -> None:
    wire = Wire().send(GET * 3)
    assert len({exchange.request_id for exchange in wire.app.exchanges}) == 3


def test_head_is_answered_without_a_body_and_stays_in_step() -> None:
    wire = Wire().send(GET.replace(b"GET", b"HEAD") + GET)
    assert wire.sent.count(b"Content-Length: 3\r\n") == 2
    assert wire.sent.count(b"now") == 1


def test_no_content_is_not_described() -> None:
    wire = Wire().send(GET.replace(b"/now", b"/empty"))
    assert wire.statuses() == [204]
    assert b"Content" not in wire.sent.partition(b"\r\n")[2]


@pytest.mark.parametrize(
    ("request_", "announced", "over"),
    [
        (GET, b"", False),
        (GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b"close", True),
        (b"GET /now HTTP/1.0\r\n\r\n", b"close", True),
        (b"GET /now HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", b"keep-alive", False),
    ],
)
def test_persistence_is_announced_and_kept(request_: bytes, announced: bytes, over: bool) -> None:
    wire = Wire().send(request_)
    assert re.findall(rb"Connection: (.*)\r\n", wire.sent) == ([announced] if announced else [])
    assert wire.is_over() is over


def test_the_last_request_that_a_connection_may_carry_is_answered_with_close() -> None:
    wire = Wire(requests_per_connection_max=2).send(GET * 3)
    assert wire.statuses() == [200, 200]
    assert wire.sent.count(b"Connection: close") == 1
    assert wire.is_over()


# Order.


def test_pipelined_requests_are_answered_in_order() -> None:
    wire = Wire().send(post(b"one") + GET + post(b"two"))
    assert wire.bodies() == [b"one", b"now", b"two"]


def test_thousands_in_one_packet_need_no_stack() -> None:
    assert len(Wire().send(GET * 5000).statuses()) == 5000


def test_after_some_requests_it_is_the_turn_of_others() -> None:
    wire = Wire()
    wire.connection.data_received(GET * 150)
    turns = [len(wire.statuses())]
    while wire.loop.soon:
        assert wire.transport.reading is False, "what comes later is read later"
        wire.loop.soon.pop(0)()
        turns.append(len(wire.statuses()))
    assert turns == [64, 128, 150]
    assert wire.transport.reading is True


def test_whoever_waits_for_a_turn_is_served_before_the_connection_is_drained() -> None:
    wire = Wire()
    wire.connection.data_received(GET * 100)
    wire.connection.drain()
    wire.loop.run_soon()
    assert len(wire.statuses()) > 64
    assert set(wire.statuses()) == {200}


def test_a_request_waits_for_the_answer_before_it() -> None:
    wire = Wire().send(LATER + GET)
    assert wire.statuses() == []
    wire.exchange.respond(Response(202, body=b"later"))
    assert wire.bodies() == [b"later", b"now"]


def test_garbage_is_refused_after_what_came_before_it() -> None:
    wire = Wire().send(LATER + b"\x00\x01garbage")
    assert wire.statuses() == []
    wire.exchange.respond(Response(200))
    assert wire.statuses() == [200, 400]
    assert wire.is_over()


def test_nothing_is_read_after_a_request_that_closes() -> None:
    wire = Wire().send(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + GET)
    wire.send(GET)
    assert wire.statuses() == [200]


def test_bytes_beyond_the_limit_stay_in_the_kernel_until_there_is_room() -> None:
    wire = Wire(read_buffer_bytes_max=100).send(LATER, GET)
    assert wire.transport.reading
    wire.send(GET * 4)
    assert not wire.transport.reading
    wire.exchange.respond(Response(200))
    assert wire.transport.reading
    assert len(wire.statuses()) == 6


# Refusals.


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01", 400),
        (b"GET /" + b"a" * 40_000, 414),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000, 431),
        (post(b"").replace(b": 0", b": 99999999999"), 413),
        (post(b"", fields=b"Expect: x\r\n"), 417),
        (b"BREW / HTTP/1.1\r\n", 501),
        (b"GET / HTTP/3.0\r\n", 505),
    ],
)
def test_a_refusal_is_rendered_by_the_application_and_closes(request_: bytes, status: int) -> None:
    wire = Wire().send(request_)
    assert wire.statuses() == [status]
    assert wire.bodies()[0].startswith(b'{"error":{"message":"')
    assert b"Connection: close\r\n" in wire.sent
    assert b"X-Request-Id: " in wire.sent
    assert wire.transport.eof_written
    wire.send(GET)
    assert wire.statuses() == [status]


def test_a_refusal_by_head_leaves_the_body_unread_and_closes() -> None:
    wire = Wire().send(post(b"a" * 9, target=b"/refused")[:-1])
    assert wire.statuses() == [404]
    assert wire.app.exchanges == []
    assert b"Connection: close\r\n" in wire.sent
    assert wire.is_over()


def test_unless_the_body_is_there_already() -> None:
    wire = Wire().send(post(b"a" * 9, target=b"/refused") + GET)
    assert wire.statuses() == [404, 200]
    assert not wire.is_over()


def test_a_chunked_body_is_never_skipped() -> None:
    head = b"POST /refused HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire = Wire().send(head + b"0\r\n\r\n" + GET)
    assert wire.statuses() == [404]
    assert wire.is_over()


# 100-continue.


def test_the_body_is_asked_for_at_once() -> None:
    head, body = post(b"hello", fields=b"Expect: 100-continue\r\n")[:-5], b"hello"
    wire = Wire().send(head)
    assert wire.sent == CONTINUE
    wire.send(body[:2])
    assert wire.sent == CONTINUE
    wire.send(body[2:])
    assert wire.bodies() == [b"hello"]


@pytest.mark.parametrize(
    ("request_", "statuses"),
    [
        pytest.param(post(b"x", fields=b"Expect: 100-continue\r\n"), [200], id="body is there"),
        pytest.param(
            post(b"xy", fields=b"Expect: 100-continue\r\n", target=b"/refused")[:-1],
            [404],
            id="refused",
        ),
        pytest.param(
            post(b"", fields=b"Expect: 100-continue\r\n").replace(b": 0", b": 99999999"),
            [413],
            id="too large",
        ),
        pytest.param(
            post(b"xy", fields=b"Expect: 100-continue\r\n").replace(b"1.1", b"1.0")[:-1],
            [],
            id="HTTP/1.0",
        ),
    ],
)
def test_a_body_that_is_not_wanted_is_not_asked_for(request_: bytes, statuses: list[int]) -> None:
    assert Wire().send(request_).statuses() == statuses


# Streams.


def test_an_event_is_a_chunk_and_a_write() -> None:
    wire = Wire().send(LATER)
    wire.exchange.start_stream(headers=((b"X-A", b"b"),))
    assert b"\r\nContent-Type: text/event-stream; charset=utf-8\r\n" in wire.sent
    assert b"\r\nCache-Control: no-cache\r\n" in wire.sent
    assert b"\r\nX-Accel-Buffering: no\r\n" in wire.sent
    assert b"\r\nTransfer-Encoding: chunked\r\n" in wire.sent
    assert b"\r\nX-A: b\r\n" in wire.sent
    wire.exchange.write(sse.event(b'{"a":1}'))
    wire.exchange.end(sse.DONE)
    assert wire.transport.writes[1:] == [
        b'f\r\ndata: {"a":1}\n\n\r\n',
        b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    ]
    assert wire.send(GET).statuses() == [200, 200]


def test_to_http10_a_stream_ends_with_the_connection() -> None:
    wire = Wire().send(LATER_10)
    wire.exchange.start_stream()
    wire.exchange.write(sse.event(b"1"))
    wire.exchange.end(sse.DONE)
    head, _, body = wire.sent.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    assert b"Connection: close" in head
    assert body == b"data: 1\n\ndata: [DONE]\n\n"
    assert wire.is_over()


def test_a_stream_may_end_without_a_last_event() -> None:
    wire = Wire().send(LATER)
    wire.exchange.start_stream()
    wire.exchange.end()
    assert wire.transport.writes[1:] == [b"0\r\n\r\n"]


def test_writing_nothing_does_not_end_a_stream() -> None:
    wire = Wire().send(LATER)
    wire.exchange.start_stream()
    wire.exchange.write(b"")
    assert len(wire.transport.writes) == 1


def test_a_cut_stream_has_no_last_chunk() -> None:
    wire = Wire().send(LATER + GET)
    wire.exchange.start_stream()
    wire.exchange.write(sse.event(b"1"))
    wire.exchange.cut()
    assert not wire.sent.endswith(b"0\r\n\r\n")
    assert wire.is_over()
    assert wire.statuses() == [200]


def test_a_stream_is_started_before_it_is_written_to() -> None:
    wire = Wire().send(LATER)
    with pytest.raises(AssertionError, match="started before"):
        wire.exchange.write(sse.event(b"1"))


def test_what_is_written_after_the_end_goes_nowhere() -> None:
    wire = Wire().send(LATER)
    exchange = wire.exchange
    exchange.start_stream()
    exchange.end(sse.DONE)
    sent = wire.sent
    exchange.write(sse.PING)
    exchange.end(sse.DONE)
    exchange.respond(Response(200))
    exchange.cut()
    assert exchange.ended
    assert wire.sent == sent


# Failures of the application.


def test_a_bug_is_a_500_and_the_connection_lives(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire().send(GET.replace(b"/now", b"/fails") + GET)
    assert wire.statuses() == [500, 200]
    assert "a bug in serve" in caplog.text
    assert "bug" not in wire.sent.decode()


def test_a_bug_in_a_stream_cuts_it(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire().send(GET.replace(b"/now", b"/fails-later"))
    assert wire.statuses() == [200]
    assert wire.is_over()
    assert not wire.sent.endswith(b"0\r\n\r\n")
    assert "a bug in a stream" in caplog.text


def test_a_bug_in_the_check_is_a_500_that_closes(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire().send(GET.replace(b"/now", b"/check-fails") + GET)
    assert wire.statuses() == [500]
    assert wire.is_over()
    assert "a bug in check" in caplog.text


def test_a_header_cannot_split_a_response(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire().send(GET.replace(b"/now", b"/splits"))
    assert wire.statuses() == [500]
    assert b"Set-Cookie" not in wire.sent
    assert "CR or LF" in caplog.text


# Deadlines.


def test_a_silent_connection_is_closed_without_an_answer() -> None:
    wire = Wire(first_byte_timeout_s=10)
    wire.loop.advance(9.9)
    assert not wire.is_over()
    wire.loop.advance(0.2)
    assert wire.transport.ending == "close"
    assert wire.sent == b""


def test_an_idle_connection_is_closed_after_the_keep_alive_time() -> None:
    wire = Wire(keep_alive_timeout_s=120)
    wire.loop.advance(5)
    wire.send(GET)
    wire.loop.advance(119)
    assert not wire.is_over()
    wire.send(GET)
    wire.loop.advance(119)
    assert not wire.is_over()
    wire.loop.advance(2)
    assert wire.transport.ending == "close"


@pytest.mark.parametrize("first", [b"", GET], ids=["first request", "second request"])
def test_a_head_that_trickles_is_cut(first: bytes) -> None:
    wire = Wire(header_timeout_s=10).send(first) if first else Wire(header_timeout_s=10)
    for byte in b"\r\nGET / HT":
        wire.send(bytes([byte]))
        wire.loop.advance(0.99)
    assert wire.statuses() == [200] * bool(first)
    wire.send(b"T")
    wire.loop.advance(0.2)
    assert wire.statuses() == [200] * bool(first) + [408]


def test_a_body_that_trickles_is_cut() -> None:
    wire = Wire(body_timeout_s=30).send(post(b"a" * 1000)[:-900])
    for _ in range(30):
        wire.loop.advance(0.99)
        wire.send(b"a")
    assert wire.statuses() == []
    wire.loop.advance(0.5)
    assert wire.statuses() == [408]
    assert wire.is_over()


def test_a_large_body_that_keeps_coming_earns_time() -> None:
    wire = Wire(body_timeout_s=30, body_bytes_per_s_min=1000).send(post(b"a" * 100_000)[:-99_000])
    for _ in range(45):
        wire.loop.advance(1)
        wire.send(b"a" * 2000)
    assert wire.statuses() == []
    wire.send(b"a" * 9000)
    assert wire.statuses() == [200]


def test_an_answer_may_take_for_ever() -> None:
    wire = Wire().send(LATER)
    wire.loop.advance(100_000)
    wire.exchange.respond(Response(200))
    assert wire.statuses() == [200]


def test_after_the_last_word_the_client_has_a_moment() -> None:
    wire = Wire(linger_timeout_s=2).send(b"\x00")
    assert wire.transport.eof_written
    wire.loop.advance(1.9)
    assert not wire.transport.is_closing()
    wire.loop.advance(0.2)
    assert wire.transport.ending == "abort"


def test_requests_that_come_whole_make_no_timers() -> None:
    wire = Wire().send(GET)
    made = wire.loop.timers_made
    wire.send(*[GET] * 100)
    assert wire.loop.timers_made == made


# Clients that read slowly, or not at all.


def stalled() -> Wire:
    wire = Wire(write_buffer_bytes_max=1000, write_stall_timeout_s=30).send(LATER)
    wire.transport.client_reads = False
    wire.exchange.start_stream()
    wire.exchange.write(b"x" * 2000)
    return wire


def test_the_writer_is_told_to_hold_back_and_to_go_on() -> None:
    wire = stalled()
    called: list[bool] = []
    wire.exchange.on_writable = lambda: called.append(wire.exchange.writable)
    assert not wire.exchange.writable
    wire.transport.take(10_000)
    assert called == [True]


def test_a_client_that_takes_nothing_is_aborted() -> None:
    wire = stalled()
    wire.loop.advance(29.9)
    assert wire.app.disconnects == 0
    wire.loop.advance(0.2)
    assert wire.transport.ending == "abort"
    assert wire.app.disconnects == 1
    wire.lose()
    assert wire.app.disconnects == 1


def test_a_client_that_takes_a_little_is_not() -> None:
    wire = stalled()
    for _ in range(10):
        wire.loop.advance(29)
        wire.transport.take(50)
    assert not wire.is_over()


def test_the_next_request_waits_until_the_answer_is_taken() -> None:
    wire = stalled()
    exchange = wire.exchange
    wire.send(GET)
    exchange.end(sse.DONE)
    assert wire.statuses() == [200]
    wire.transport.take(10_000)
    assert wire.statuses() == [200, 200]


def test_a_slow_reader_of_a_last_answer_is_not_cut_off_by_the_linger_time() -> None:
    wire = Wire(write_buffer_bytes_max=1000)
    wire.transport.client_reads = False
    wire.send(post(b"x" * 5000, fields=b"Connection: close\r\n"))
    for _ in range(6):
        wire.loop.advance(20)
        wire.transport.take(800)
        assert not wire.transport.ending
    wire.transport.take(5000)
    assert wire.transport.eof_written


# Clients that go away.


def test_the_application_is_told_once() -> None:
    wire = Wire().send(LATER)
    exchange = wire.exchange
    wire.lose()
    assert wire.app.disconnects == 1
    assert exchange.ended
    exchange.start_stream()
    exchange.write(b"x")
    exchange.end()
    assert wire.sent == b""


def test_it_is_not_told_of_one_that_has_its_answer() -> None:
    wire = Wire().send(LATER)
    wire.exchange.respond(Response(200))
    wire.lose()
    assert wire.app.disconnects == 0


def test_where_the_kernel_cannot_be_asked_the_end_of_input_is_the_end() -> None:
    wire = Wire().send(LATER)
    assert wire.connection.eof_received()
    assert wire.transport.ending == "abort"
    assert wire.app.disconnects == 1


def test_half_a_request_is_not_served() -> None:
    wire = Wire().send(post(b"hello")[:-1])
    wire.connection.eof_received()
    assert wire.app.exchanges == []
    assert wire.statuses() == [400]
    assert wire.transport.ending == "close"


def test_an_idle_connection_closes_with_its_client() -> None:
    wire = Wire().send(GET)
    wire.connection.eof_received()
    assert wire.transport.ending == "close"


def test_a_callback_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire().send(LATER)
    wire.exchange.on_disconnect = lambda: (_ for _ in ()).throw(RuntimeError("a bug"))
    wire.lose()
    assert "a bug" in caplog.text
    assert len(wire.connections) == 0


# Clients that have finished sending, and may have gone.


def half_closed(request: bytes) -> tuple[Wire, Socket]:
    wire = Wire(tcp=True).send(request)
    sock = wire.transport.socket
    assert sock is not None
    sock.state = CLOSE_WAIT
    assert wire.connection.eof_received()
    return wire, sock


def test_one_that_has_gone_is_missed_at_the_first_look() -> None:
    wire, sock = half_closed(LATER)
    assert wire.sent == CONTINUE
    sock.state = CLOSE  # the answer to what was sent
    wire.loop.advance(0.011)
    assert wire.app.disconnects == 1
    assert wire.transport.ending == "abort"


def test_one_that_waits_is_sent_few_interim_responses() -> None:
    wire, _ = half_closed(LATER)
    times_s: list[int] = []
    for second in range(600):
        wire.loop.advance(1)
        if wire.sent == CONTINUE * (len(times_s) + 2):
            times_s.append(second)
    assert len(times_s) == 3
    assert times_s[-1] < 61
    wire.exchange.respond(Response(200, body=b"answer"))
    assert wire.sent.endswith(b"answer")
    assert wire.transport.ending == "close"


def test_in_a_stream_it_is_sent_a_comment_a_second() -> None:
    wire = Wire(tcp=True).send(LATER)
    wire.exchange.start_stream()
    wire.connection.eof_received()
    wire.loop.advance(10.5)
    assert 10 <= wire.sent.count(b"8\r\n: ping\n\n\r\n") <= 12
    assert CONTINUE not in wire.sent


def test_in_http10_it_has_gone() -> None:
    wire, _ = half_closed(LATER_10)
    assert wire.sent == b""
    assert wire.app.disconnects == 1


def test_nobody_looks_when_the_answer_is_out() -> None:
    wire, _ = half_closed(LATER + LATER)
    wire.exchange.respond(Response(200))
    assert len(wire.app.exchanges) == 2
    wire.exchange.respond(Response(200))
    wire.lose()
    assert all(timer.cancelled for timer in wire.loop.timers)


def test_one_that_is_not_read_is_looked_at_all_the_same() -> None:
    wire = Wire(tcp=True, read_buffer_bytes_max=10).send(LATER, GET)
    assert not wire.transport.reading
    assert wire.transport.socket is not None
    wire.loop.advance(5)
    assert wire.sent == b""
    wire.transport.socket.state = CLOSE_WAIT
    wire.loop.advance(1)
    assert wire.sent == CONTINUE
    wire.transport.socket.state = CLOSE
    wire.loop.advance(0.1)
    assert wire.app.disconnects == 1


# TLS, where who has finished sending can be told nothing more.


def test_over_tls_the_end_of_input_is_the_end() -> None:
    wire = Wire(tls=True).send(LATER)
    assert not wire.connection.eof_received(), "the loop warns of True"
    assert wire.transport.ending == "abort"
    assert wire.app.disconnects == 1
    idle = Wire(tls=True).send(GET)
    assert not idle.connection.eof_received()
    assert idle.transport.ending == "close"


def test_over_tls_the_last_answer_is_followed_by_a_close() -> None:
    wire = Wire(tls=True).send(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert wire.statuses() == [200]
    assert not wire.transport.eof_written
    assert wire.transport.ending == "close"


# One too many.


def test_a_connection_too_many_is_told_so_before_it_sends_anything() -> None:
    connections = Connections(admitted_max=2, refused_max=1)
    admitted = [Wire(connections=connections) for _ in range(2)]
    assert [wire.sent for wire in admitted] == [b"", b""]
    refused = Wire(connections=connections)
    assert refused.statuses() == [503]
    assert b"Retry-After: 1\r\nConnection: close\r\n\r\n" in refused.sent
    assert refused.transport.eof_written
    assert not refused.transport.is_closing(), "it may read on until it has seen why"
    refused.send(GET)
    assert refused.statuses() == [503]
    assert refused.app.exchanges == []
    refused.loop.advance(2.1)
    assert refused.transport.ending == "abort"
    assert len(connections) == 2
    assert admitted[0].send(GET).statuses() == [200]


def test_where_those_have_no_place_left_either_it_is_closed_at_once() -> None:
    connections = Connections(admitted_max=1, refused_max=1)
    Wire(connections=connections)
    Wire(connections=connections)
    third = Wire(connections=connections)
    assert third.statuses() == [503]
    assert third.transport.ending == "close"


def test_places_that_become_free_are_taken() -> None:
    connections = Connections(admitted_max=1, refused_max=1)
    first, refused = Wire(connections=connections), Wire(connections=connections)
    for wire in (first, refused):
        wire.lose()
    assert len(connections) == 0
    assert Wire(connections=connections).send(GET).statuses() == [200]


def test_those_refused_are_waited_for_and_aborted_like_the_others() -> None:
    connections = Connections(admitted_max=1, refused_max=1)
    wires = [Wire(connections=connections) for _ in range(2)]
    wires[0].lose()

    async def wait() -> bool:
        return await connections.wait_closed(timeout_s=0.001)

    assert not asyncio.run(wait())
    connections.abort_all()
    assert wires[1].transport.ending == "abort"
    wires[1].lose()
    assert asyncio.run(wait())


# Bodies on their way, all together.


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_on_their_way_are_bounded_all_together(chunked: bool) -> None:
    connections = Connections(bodies_bytes_max=100)
    begin = (
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n50\r\n"
        if chunked
        else post(b"x" * 80).removesuffix(b"x" * 80)
    )
    end = b"x" * 30 + (b"\r\n0\r\n\r\n" if chunked else b"")
    first, second = Wire(connections=connections), Wire(connections=connections)
    first.send(begin, b"x" * 50)
    second.send(begin, b"x" * 40)
    assert second.send(b"x" * 20).statuses() == [503]
    assert b"Retry-After: 1" in second.sent
    assert second.is_over()
    # What it held is free again, and the first one is served.
    assert first.send(end).statuses() == [200]
    for _ in range(3):
        assert Wire(connections=connections).send(begin, b"x" * 50, end).statuses() == [200]


def test_a_body_that_will_not_be_whole_holds_nothing_in_the_end() -> None:
    connections = Connections(bodies_bytes_max=100)
    begin = post(b"x" * 90)[:-10]
    for leave in (Wire.lose, lambda wire: wire.loop.advance(100)):
        wire = Wire(connections=connections).send(begin)
        leave(wire)
    assert Wire(connections=connections).send(begin + b"x" * 10).statuses() == [200]


# Headers beside the answer's own.


def test_an_exchange_may_have_headers_whatever_its_answer_is() -> None:
    wire = Wire().send(LATER)
    wire.exchange.headers = ((b"Vary", b"Origin"),)
    wire.exchange.respond(Response(200, headers=((b"Retry-After", b"1"),)))
    assert b"Retry-After: 1\r\nVary: Origin\r\n" in wire.sent
    wire = Wire().send(LATER)
    wire.exchange.headers = ((b"Vary", b"Origin"),)
    wire.exchange.start_stream(((b"X", b"y"),))
    assert b"X: y\r\nVary: Origin\r\n" in wire.sent
    assert Wire().send(GET).sent.count(b"Vary") == 0


# Draining.


def test_draining_closes_what_is_idle() -> None:
    wire = Wire().send(GET)
    wire.connections.drain()
    assert wire.transport.ending == "close"


def test_draining_lets_an_answer_finish_and_says_that_it_is_the_last() -> None:
    wire = Wire().send(LATER + GET)
    wire.connections.drain()
    assert not wire.is_over()
    wire.exchange.respond(Response(200))
    assert b"Connection: close\r\n" in wire.sent
    assert wire.statuses() == [200]
    assert wire.is_over()


def test_draining_lets_a_stream_finish() -> None:
    wire = Wire().send(LATER)
    wire.exchange.start_stream()
    wire.connections.drain()
    wire.exchange.end(sse.DONE)
    assert wire.sent.endswith(b"0\r\n\r\n")
    assert wire.is_over()


def test_draining_waits_for_the_request_of_one_who_has_just_connected() -> None:
    wire = Wire(drain_first_byte_timeout_s=1)
    wire.connections.drain()
    wire.loop.advance(0.5)
    wire.send(GET)
    assert b"Connection: close\r\n" in wire.sent
    silent = Wire(connections=wire.connections, drain_first_byte_timeout_s=1)
    silent.loop.advance(1.1)
    assert silent.transport.ending == "close"


def test_the_end_of_the_last_connection_can_be_waited_for() -> None:
    async def wait() -> tuple[bool, bool]:
        wire = Wire().send(LATER)
        early = await wire.connections.wait_closed(timeout_s=0.001)
        wire.connections.abort_all()
        asyncio.get_running_loop().call_soon(wire.lose)
        return early, await wire.connections.wait_closed(timeout_s=5)

    assert asyncio.run(wait()) == (False, True)


# Whatever comes.

VALID = [
    GET,
    LATER,
    post(b"hello"),
    post(b"hello", fields=b"Expect: 100-continue\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"),
    (
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nX: y\r\n\r\n"
    ),
    b"OPTIONS * HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
]
Mutation = tuple[int, int, bytes]


@settings(max_examples=300)
@given(
    messages=st.lists(st.sampled_from(VALID), min_size=1, max_size=4),
    mutations=st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 3), st.binary(max_size=3)), max_size=4
    ),
    cuts=st.lists(st.integers(0, 600), max_size=5),
)
def test_no_mutation_raises_or_leaves_the_connection_in_a_muddle(
    messages: list[bytes], mutations: list[Mutation], cuts: list[int]
) -> None:
    data = b"".join(messages)
    for position, removed, inserted in mutations:
        at = position % (len(data) + 1)
        data = data[:at] + inserted + data[at + removed :]
    wire = Wire()
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in pairwise(borders):
        wire.send(data[start:end])
        for exchange in wire.app.exchanges:
            exchange.respond(Response(200, body=b"later"))
    # 500 would be an exception that was caught and logged.
    assert set(wire.statuses()) <= {100, 200, 400, 404, 413, 417, 501, 505}
    assert wire.connection.eof_received()
    wire.loop.advance(100_000)
    assert wire.transport.ending
    wire.lose()
    assert wire.loop.timers == [] or all(timer.cancelled for timer in wire.loop.timers)
