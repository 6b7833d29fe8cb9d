"""The thin shell: one client's socket, its states and its deadlines.

Requests are answered one by one: what follows waits in the reader (and, above a limit, in the
kernel) until the answer before it has been taken. A request that comes whole and is answered at
once moves no timer. Nothing ever raises into the event loop.

Knows nothing of routes, JSON or generations: those are the Application's.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, cast

from fastserve.http1 import peer
from fastserve.http1.deadline import Deadline
from fastserve.http1.exchange import CLOSE, Exchange, made_request_id
from fastserve.http1.message import ProtocolError, Response
from fastserve.http1.reader import RequestReader
from fastserve.http1.response import CONTINUE, render_response
from fastserve.http1.state import NEXT, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.http1.application import Application
    from fastserve.http1.connections import Connections
    from fastserve.http1.limits import Limits
    from fastserve.http1.message import Fields, RequestHead

_READING = frozenset({State.NEW, State.IDLE, State.HEAD, State.BODY})
# A client may pipeline thousands of requests: after so many it is the others' turn.
_REQUESTS_AT_ONCE = 64


class Connection(asyncio.Protocol):
    """One client. Given to `loop.create_server` through a factory."""

    __slots__ = (
        "_advancing",
        "_app",
        "_body_due_s",
        "_close_after_answer",
        "_connections",
        "_deadline",
        "_eof",
        "_exchange",
        "_head",
        "_held_bytes",
        "_limits",
        "_logger",
        "_loop",
        "_reader",
        "_reading_paused",
        "_requests",
        "_socket",
        "_state",
        "_tls",
        "_transport",
        "_unsent_bytes",
        "_watch",
        "_writable",
    )

    _transport: asyncio.Transport
    _head: RequestHead

    def __init__(
        self,
        app: Application,
        *,
        limits: Limits,
        connections: Connections,
        logger: logging.Logger | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._app = app
        self._limits = limits
        self._connections = connections
        self._logger = logger or logging.getLogger(__name__)
        self._loop = loop or asyncio.get_running_loop()
        self._state = State.NEW
        self._reader = RequestReader(limits)
        self._exchange: Exchange | None = None
        self._requests = 0
        self._close_after_answer = False
        # Inside _advance: an answer given at once must not begin the next request by recursion.
        self._advancing = False
        self._writable = True
        self._reading_paused = False
        self._eof = False
        # Nothing can be said any more to a TLS client that has finished sending: loops close then.
        self._tls = False
        self._socket: peer.Socket | None = None
        self._deadline = Deadline(self._loop, self._on_deadline)
        self._unsent_bytes = 0
        # When a body is due that earns no time by coming fast.
        self._body_due_s = math.inf
        # What Connections has been told that this one holds of a body.
        self._held_bytes = 0
        # Of a client that has finished sending. None where the kernel cannot be asked.
        self._watch: peer.Watch | None = None

    def __repr__(self) -> str:
        return f"<Connection {self._state.name} requests={self._requests}>"

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes_max)
        sock = cast("peer.Socket | None", transport.get_extra_info("socket"))
        if sock is not None and peer.is_tcp(sock):
            self._socket = sock
            self._watch = peer.Watch(sock, self._loop, probe=self._probe, on_gone=self.abort)
            peer.detect_silence(sock, timeout_s=self._limits.write_stall_timeout_s)
        self._tls = transport.get_extra_info("sslcontext") is not None
        if not self._connections.admit(self):
            self._turn_away()
            return
        self._deadline.set(
            self._limits.drain_first_byte_timeout_s
            if self._connections.draining
            else self._limits.first_byte_timeout_s
        )

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state in _READING:
            self._reader.feed(data)
            self._advance()
        elif state is State.ANSWERING or state is State.FLUSHING:
            self._reader.feed(data)
            if self._reader.buffered_bytes > self._limits.read_buffer_bytes_max:
                self._pause_reading()

    def eof_received(self) -> bool:
        """Keep the connection open (True) if there is still something to be said on it."""
        if self._eof:
            return not self._tls
        self._eof = True
        if self._state is State.ANSWERING:
            self._start_watch()
        elif self._state in (State.HEAD, State.BODY):
            # RFC 9112 8: an incomplete request is not processed.
            self._refuse(ProtocolError(400, "the request ended before it was complete"))
        elif self._state is not State.FLUSHING:
            self._close()
        return not self._tls

    def pause_writing(self) -> None:
        self._writable = False
        self._expect_progress()
        if self._exchange is not None:
            self._call(self._exchange.pause)

    def resume_writing(self) -> None:
        self._writable = True
        if self._state is State.FLUSHING:
            self._proceed()
        elif self._exchange is not None:
            self._deadline.clear()
            self._call(self._exchange.resume)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- asyncio's signature
        self._enter(State.CLOSED)
        self._release_body()
        self._deadline.cancel()
        if self._watch is not None:
            self._watch.stop()
        self._connections.discard(self)
        self._disconnect()

    # What the exchange calls.

    @property
    def persists(self) -> bool:
        """Whether the connection goes on after the answer that is being given, if both want it."""
        return (
            not self._close_after_answer
            and not self._connections.draining
            and not (self._eof and not self._reader.buffered_bytes)
            and self._requests != self._limits.requests_per_connection_max
        )

    def answered(self, *, close: bool) -> None:
        """The answer is written, though perhaps not all of it sent."""
        self._exchange = None
        if close:
            self._close_after_answer = True
        if self._writable:
            self._proceed()
            return
        # The next request waits until this answer is taken: a client that sends and never reads
        # would otherwise fill the memory with answers.
        self._enter(State.FLUSHING)
        self._expect_progress()

    def cut(self, *, reset: bool) -> None:
        """The answer is given up in its middle."""
        self._exchange = None
        if not reset:
            self._linger()
            return
        if self._socket is not None:
            peer.close_with_reset(self._socket)
        self._transport.abort()

    # What the acceptor calls, through Connections.

    def drain(self) -> None:
        """Close at the next opportunity; what waits for its turn is that."""
        if self._state is State.IDLE and not self._reader.buffered_bytes:
            self._close()
        elif self._state is State.NEW:
            # Its request may be on its way: a client that has just connected is not turned away.
            self._deadline.set(self._limits.drain_first_byte_timeout_s)

    def abort(self) -> None:
        """Close now. The application hears of it at once, as of any client that goes away."""
        self._transport.abort()
        self._disconnect()

    # Requests, in order.

    def _advance(self) -> None:
        """Read and serve requests until something is missing, be it a byte or an answer."""
        self._advancing = True
        try:
            for _ in range(_REQUESTS_AT_ONCE):
                if self._state not in _READING or not self._read():
                    break
            else:
                self._pause_reading()  # what comes meanwhile would be read out of turn
                self._loop.call_soon(self._take_turn)
        except ProtocolError as error:
            self._refuse(error)
        except Exception:
            self._logger.exception("connection failed %r", self)
            if self._state in _READING:
                self._refuse(ProtocolError(500, "internal error"))
            else:
                self.abort()
        finally:
            self._advancing = False

    def _take_turn(self) -> None:
        if self._state in _READING:
            self._resume_reading()
            self._advance()

    def _read(self) -> bool:
        """Take the next piece of a request; False if it is not there yet."""
        head = None
        if self._state is not State.BODY:
            head = self._reader.next_head()
            if head is None:
                self._wait_for_head()
                return False
            self._head = head
            self._requests += 1
            self._enter(State.BODY)
            refusal = self._app.check(head)
            if refusal is not None:
                self._respond_early(refusal)
                return True
        body = self._reader.next_body()
        if body is None:
            if head is not None:
                self._wait_for_body(head)
            self._hold_body()
            return False
        self._serve(body)
        return True

    def _wait_for_head(self) -> None:
        if self._eof:
            self._close()
        elif not self._reader.started:
            self._deadline.set(self._limits.keep_alive_timeout_s)
        elif self._state is not State.HEAD:
            self._enter(State.HEAD)
            self._deadline.set(self._limits.header_timeout_s)

    def _wait_for_body(self, head: RequestHead) -> None:
        if self._eof:
            raise ProtocolError(400, "the request ended before it was complete")
        if head.expect_continue:
            self._transport.write(CONTINUE)
        self._reader.fed_bytes = 0
        self._deadline.set(self._limits.body_timeout_s)
        self._body_due_s = self._loop.time() + self._limits.body_timeout_s

    def _hold_body(self) -> None:
        """Have what has come of a body counted among those of all connections."""
        grown_bytes = self._reader.held_bytes - self._held_bytes
        self._held_bytes += grown_bytes
        if not self._connections.hold(grown_bytes):
            raise ProtocolError(503, "too many large requests at once")

    def _release_body(self) -> None:
        self._connections.hold(-self._held_bytes)
        self._held_bytes = 0

    def _serve(self, body: bytes) -> None:
        self._deadline.clear()
        exchange = self._open_exchange(body)
        try:
            self._app.serve(exchange)
        except Exception:
            self._logger.exception("application failed id=%s", exchange.request_id)
            if exchange.started:
                exchange.cut()
            else:
                refusal = self._refusal(500, "internal error", path=exchange.head.path)
                exchange.respond(refusal)
        if self._eof and not exchange.ended:
            self._start_watch()

    def _open_exchange(self, body: bytes) -> Exchange:
        self._enter(State.ANSWERING)
        if self._held_bytes:
            self._release_body()
        self._exchange = Exchange(self, head=self._head, body=body, send=self._transport.write)
        del self._head  # the exchange may last, and may not need all of it
        return self._exchange

    def _respond_early(self, refusal: Response) -> None:
        """Answer a request that the application refused by its head."""
        if not self._reader.skip_body():
            # Reading on would mean receiving what nobody wants; not reading on, that where the
            # next request begins is unknown. So this one was the last.
            self._close_after_answer = True
        self._open_exchange(b"").respond(refusal)

    def _refuse(self, error: ProtocolError) -> None:
        """Answer what is no request, or no longer one, and close: no next one can be found."""
        self._close_after_answer = True
        path = self._head.path if self._state is State.BODY else error.path
        refusal = self._refusal(error.status, error.message, path=path)
        if self._state is State.BODY:
            self._open_exchange(b"").respond(refusal)
            return
        self._transport.write(
            render_response(refusal, request_id=made_request_id(), connection=CLOSE)
        )
        self._linger()

    def _turn_away(self) -> None:
        """Answer a connection that is one too many, whatever it was going to say."""
        refusal = self._refusal(503, "too many connections")
        self._transport.write(
            render_response(refusal, request_id=made_request_id(), connection=CLOSE)
        )
        if self._connections.may_linger:
            self._linger()
        else:
            self._close()

    def _refusal(self, status: int, message: str, *, path: str | None = None) -> Response:
        headers: Fields = ((b"Retry-After", b"1"),) if status == 503 else ()
        try:
            body = self._app.error_body(status, message, path=path)
        except Exception:
            self._logger.exception("application failed to render an error")
            body = b""
        return Response(status, body=body, headers=headers)

    def _proceed(self) -> None:
        """Go on after an answer that has been taken."""
        if self._close_after_answer or self._connections.draining:
            self._linger()
            return
        self._enter(State.IDLE)
        if (
            self._reading_paused
            and self._reader.buffered_bytes <= self._limits.read_buffer_bytes_max
        ):
            self._resume_reading()
        if not self._advancing:
            self._advance()

    # Ends.

    def _linger(self) -> None:
        """Say that nothing follows, and read on for a moment: unread bytes at a close are answered
        with a reset, which would destroy the answer on its way (RFC 9112 9.6)."""
        transport = self._transport
        # A transport that has failed and not said so yet is closing, and raises if written to.
        if self._eof or transport.is_closing() or not transport.can_write_eof():
            self._close()
            return
        self._enter_lingering()
        try:
            transport.write_eof()
        except OSError:  # reset, and the loop has not seen it yet
            self.abort()
            return
        if self._reading_paused:
            self._resume_reading()

    def _close(self) -> None:
        """Close when everything written has been sent."""
        if self._state is not State.LINGERING:
            self._enter_lingering()
        self._transport.close()

    def _enter_lingering(self) -> None:
        self._enter(State.LINGERING)
        self._reader.clear()
        # Above any real size, so that the first look finds progress.
        self._unsent_bytes = 1 << 62
        self._deadline.set(self._limits.linger_timeout_s)

    def _enter(self, state: State) -> None:
        assert state in NEXT[self._state], f"{self._state.name} -> {state.name}"
        self._state = state

    def _disconnect(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._call(exchange.disconnect)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            self._logger.exception("application failed in a callback")

    # Time.

    def _on_deadline(self) -> None:
        state = self._state
        if state in (State.NEW, State.IDLE):
            self._close()
        elif state is State.HEAD:
            self._refuse(ProtocolError(408, "the header section took too long"))
        elif state is State.BODY:
            self._on_body_deadline()
        elif self._transport.get_write_buffer_size() not in (0, self._unsent_bytes):
            # Less: the client took some. More: it did too, and since then there was more to take.
            self._expect_progress()
        else:
            self.abort()

    def _on_body_deadline(self) -> None:
        earned_s = self._reader.fed_bytes / self._limits.body_bytes_per_s_min
        left_s = self._body_due_s + earned_s - self._loop.time()
        if left_s > 0:
            self._deadline.set(left_s)
        else:
            self._refuse(ProtocolError(408, "the body took too long"))

    def _expect_progress(self) -> None:
        """Have it looked at whether the client takes some of what waits for it."""
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._deadline.set(self._limits.write_stall_timeout_s)

    # Clients that are no longer heard.

    def _pause_reading(self) -> None:
        if self._reading_paused or self._eof or self._transport.is_closing():
            return
        self._reading_paused = True
        self._transport.pause_reading()
        # A loop that does not read does not report that the client has gone either.
        if self._watch is not None:
            self._watch.start_when_finished()

    def _resume_reading(self) -> None:
        self._reading_paused = False
        if self._watch is not None:
            self._watch.stop()
        if not self._eof and not self._transport.is_closing():
            self._transport.resume_reading()

    def _start_watch(self) -> None:
        """Find out whether a client that has finished sending still waits for its answer."""
        # HTTP/1.0 knows no interim response that could be sent to find out.
        exchange = self._exchange
        if self._watch is None or self._tls or exchange is None or exchange.head.minor == 0:
            self.abort()
        else:
            self._watch.start()

    def _probe(self, look: int) -> bool:
        """Send something that means nothing; False when there is no answer to wait for any more.

        A client that has gone answers it with a reset.
        """
        exchange = self._exchange
        if exchange is None:
            return False
        # Where much waits to be sent already, that will do.
        if self._writable:
            exchange.probe_at(look)
        return True
