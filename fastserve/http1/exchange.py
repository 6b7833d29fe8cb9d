"""One request and its answer, as the application sees them.

The answer is either a whole response or a stream of events, given now or later. A client that goes
away turns all later writes into no-ops: the application is told once and need not check.

The hot path is `write`, called for each token: one formatting and one transport write (0.3 us plus
the transport's own). Nothing may be added to it.
"""

from __future__ import annotations

import itertools
import re
import secrets
from typing import TYPE_CHECKING

from fastserve.http1.response import CONTINUE, render_head, render_response
from fastserve.http1.sse import PING

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.http1.connection import Connection
    from fastserve.http1.message import Fields, RequestHead, Response

# What a client may choose as the id of its request; it is echoed into a header and into logs.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_made_prefix = secrets.token_hex(6)
_made_count = itertools.count()

# After 0, 1, 10 and 60 seconds: Go's client gives up at the sixth interim response.
_INTERIM_AT_LOOKS = frozenset({0, 4, 13, 63})
# Within the first second one comment in a stream is enough.
_EARLY_LOOKS = frozenset({1, 2, 3})

# What begins a chunk (RFC 9112 7.1) of so many bytes.
CHUNK_HEADS = tuple(b"%x\r\n" % size for size in range(1024))
CHUNK_TAIL = b"\r\n"

CLOSE = b"Connection: close\r\n"
# RFC 9112 9.3: HTTP/1.0 persists only where both sides say so.
_KEEP_ALIVE = b"Connection: keep-alive\r\n"
_STREAM = (
    b"Content-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache\r\n"
    b"X-Accel-Buffering: no\r\n"  # nginx would collect the stream
)
_STREAM_CHUNKED = _STREAM + b"Transfer-Encoding: chunked\r\n"


class Exchange:
    """Answer with `respond`, or with `start_stream`, any number of `write`, and `end`.

    `body` is whole and de-chunked. `request_id` is the client's X-Request-Id if it is well-formed,
    else made here. `writable` is False while more than the high water waits for the client: writes
    are still taken then, and are all held in memory. `ended`: no write does anything any more.
    `headers` are sent with whatever the answer is, beside its own.
    `on_disconnect` is called once if the client goes away before the answer has ended;
    `on_unwritable` each time `writable` turns False, and `on_writable` when it turns True again.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_send",
        "_send_event",
        "_started",
        "body",
        "ended",
        "head",
        "headers",
        "on_disconnect",
        "on_unwritable",
        "on_writable",
        "request_id",
        "writable",
    )

    def __init__(
        self,
        connection: Connection,
        *,
        head: RequestHead,
        body: bytes,
        send: Callable[[bytes], None],
    ) -> None:
        self.head = head
        self.body = body
        self.headers: Fields = ()
        self.request_id = _request_id(head)
        self.writable = True
        self.ended = False
        self.on_disconnect: Callable[[], None] | None = None
        self.on_unwritable: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self._connection = connection
        self._send = send
        self._send_event: Callable[[bytes], None] = _too_early
        self._started = False
        self._chunked = False

    @property
    def _persists(self) -> bool:
        return self.head.keep_alive and self._connection.persists

    def forget_request(self) -> None:
        """Keep neither the body nor the fields: nothing more will be read of them."""
        self.body = b""
        self.head = self.head.without_headers()

    def respond(self, response: Response) -> None:
        """Give the whole answer. The body of an answer to HEAD is described and not sent.

        Raises ValueError, having sent nothing, if a header holds CR or LF.
        """
        if self.ended:
            return
        assert not self._started, "a stream is ended, not responded to"
        close = response.close or not self._persists
        self._send(
            render_response(
                response,
                request_id=self.request_id,
                headers=self.headers,
                connection=self._connection_line(close=close),
                to_head=self.head.method == "HEAD",
            )
        )
        self._finish(close=close)

    def start_stream(self, headers: Fields = ()) -> None:
        """Begin a 200 of events: chunked in HTTP/1.1; in HTTP/1.0 it ends with the connection.

        Raises ValueError, having sent nothing, if a header holds CR or LF.
        """
        if self.ended:
            return
        assert not self._started, "an answer is started once"
        assert self.head.method != "HEAD", "an answer to HEAD has no body"
        chunked = self.head.minor == 1
        head = render_head(
            200,
            request_id=self.request_id,
            content=_STREAM_CHUNKED if chunked else _STREAM,
            headers=headers + self.headers,
            connection=self._connection_line(close=not chunked or not self._persists),
        )
        self._started = True
        self._chunked = chunked
        self._send_event = self._send
        self._send(head)

    def write(self, event: bytes) -> None:
        """Write a whole event, or several, as one chunk. Nothing is nothing, not the last chunk."""
        if event:
            send = self._send_event  # a local: CPython 3.11 calls those of slots the slow way
            send(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)

    def end(self, event: bytes = b"") -> None:
        """End the stream, after one last `event` in the same write."""
        if self.ended:
            return
        assert self._started, "only a stream is ended"
        if self._chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if event else b"0\r\n\r\n"
        else:
            last = event
        if last:
            self._send(last)
        self._finish(close=not self._chunked or not self._persists)

    def cut(self) -> None:
        """Give up: close so that the client can see that the answer is not complete."""
        if self.ended:
            return
        connection = self._connection
        # A missing last chunk is visible. In HTTP/1.0 only a reset is, since an orderly close is
        # the proper end of a stream; and before a head is out there is nothing to be flushed.
        self._detach()
        connection.cut(reset=not self._chunked)

    @property
    def write_chunk(self) -> Callable[[bytes], None] | None:
        """What takes a whole chunk, framed by the caller, until the answer has `ended`.

        None where the answer is not a chunked stream that has begun.
        """
        return self._send if self._chunked and self._started else None

    @property
    def started(self) -> bool:
        """Whether the head of a stream is out."""
        return self._started

    def probe(self) -> None:
        """Send what means nothing into a stream that has begun: proxies and clients see it live."""
        self.write(PING)

    # The rest is for the connection.

    def probe_at(self, look: int) -> None:
        """Send what means nothing to a client that may have gone, before the `look`-th look."""
        if self._started:
            if look not in _EARLY_LOOKS:
                self.probe()
        # RFC 9110 15.2: an HTTP/1.0 client is never sent an interim response.
        elif look in _INTERIM_AT_LOOKS and self.head.minor == 1:
            self._send(CONTINUE)

    def pause(self) -> None:
        """The client does not take what it is sent."""
        self.writable = False
        if self.on_unwritable is not None:
            self.on_unwritable()

    def resume(self) -> None:
        """It does again."""
        self.writable = True
        if self.on_writable is not None:
            self.on_writable()

    def disconnect(self) -> None:
        """The client is gone: whatever is written from now on is dropped."""
        callback = self.on_disconnect
        self._detach()
        if callback is not None:
            callback()

    def _finish(self, *, close: bool) -> None:
        connection = self._connection
        self._detach()
        connection.answered(close=close)

    def _detach(self) -> None:
        self.ended = True
        self.on_disconnect = self.on_unwritable = self.on_writable = None
        self._send = self._send_event = _drop

    def _connection_line(self, *, close: bool) -> bytes:
        if close:
            return CLOSE
        return b"" if self.head.minor == 1 else _KEEP_ALIVE


def _too_early(_event: bytes) -> None:
    raise AssertionError("a stream is started before it is written to")


def _drop(_bytes: bytes) -> None:
    """Where writes go once the answer is over."""


def _request_id(head: RequestHead) -> str:
    given = head.header(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return made_request_id()


def made_request_id() -> str:
    """Make an id that no other process makes: a random prefix and a count."""
    return f"{_made_prefix}-{next(_made_count):x}"
