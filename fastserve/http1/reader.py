"""Requests out of one buffer, one at a time.

The next message is looked for only when the caller asks: so answers cannot overtake each other,
and what follows a request is still only bytes when that one is refused or closes the connection.

Pure: bytes in, heads and bodies out, ProtocolError for a refusal. Knows nothing of time or sockets.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastserve.http1.body import ChunkedBody
from fastserve.http1.message import ProtocolError, RequestHead
from fastserve.http1.parser import check_beginning, parse_head, parse_request_line, path_of

if TYPE_CHECKING:
    from fastserve.http1.limits import Limits

_BARE_LF = re.compile(rb"(?<!\r)\n")


class RequestReader:
    """Feed it bytes; ask in turn for a head and its body. None means: not all there yet."""

    __slots__ = (
        "_buffer",
        "_chunked_body",
        "_empty_line_seen",
        "_head",
        "_limits",
        "_line_checked",
        "_scanned_bytes",
        "fed_bytes",
    )

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._head: RequestHead | None = None
        self._chunked_body: ChunkedBody | None = None
        self._empty_line_seen = False
        self._line_checked = False
        self._scanned_bytes = 0
        # All that ever came in: the caller measures the rate of a body with it.
        self.fed_bytes = 0

    def feed(self, data: bytes) -> None:
        self._buffer += data
        self.fed_bytes += len(data)

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    @property
    def held_bytes(self) -> int:
        """What is held of a body that is not whole yet, and what came with it."""
        decoded = 0 if self._chunked_body is None else self._chunked_body.decoded_bytes
        return len(self._buffer) + decoded

    @property
    def started(self) -> bool:
        """Whether anything of the next request has come, be it an empty line."""
        return self._empty_line_seen or bool(self._buffer)

    def next_head(self) -> RequestHead | None:
        """Return the next head when it is complete. Its body must be asked for or skipped next.

        Raises ProtocolError: 400, 413, 414, 417, 431, 501 or 505.
        """
        buffer = self._buffer
        if buffer and buffer[0] in b"\r\n" and not self._skip_empty_line():
            return None
        end = buffer.find(b"\r\n\r\n", self._scanned_bytes) + 4
        if not 4 <= end <= self._limits.header_bytes_max or not self._is_line_short(end):
            self._check_incomplete()
            return None
        raw = bytes(buffer[:end])
        del buffer[:end]
        self._scanned_bytes = 0
        self._empty_line_seen = self._line_checked = False
        try:
            self._head = parse_head(
                raw,
                header_count_max=self._limits.header_count_max,
                body_bytes_max=self._limits.body_bytes_max,
            )
        except ProtocolError as error:
            error.path = path_of(raw)
            raise
        return self._head

    def next_body(self) -> bytes | None:
        """Return the body of the head last returned, when it is complete: b"" if it has none.

        Raises ProtocolError: 400, 413 or 431.
        """
        head = self._head
        assert head is not None, "a body is asked for after its head, once"
        body = self._take_chunks() if head.chunked else self._take(head.content_length)
        if body is not None:
            self._head = self._chunked_body = None
        return body

    def skip_body(self) -> bool:
        """Drop the body of the head last returned, if it is all there; say whether it was.

        A chunked body is never skipped: telling where it ends would mean reading it.
        """
        head = self._head
        assert head is not None, "a body is skipped after its head, once"
        if head.chunked or len(self._buffer) < head.content_length:
            return False
        del self._buffer[: head.content_length]
        self._head = None
        return True

    def clear(self) -> None:
        """Forget everything: nothing of it will be looked at any more."""
        self._buffer = bytearray()
        self._head = self._chunked_body = None

    def _take(self, length: int) -> bytes | None:
        buffer = self._buffer
        if len(buffer) < length:
            return None
        if len(buffer) == length:
            body = bytes(buffer)
            buffer.clear()
            return body
        body = bytes(memoryview(buffer)[:length])
        del buffer[:length]
        return body

    def _take_chunks(self) -> bytes | None:
        if self._chunked_body is None:
            self._chunked_body = ChunkedBody(
                body_bytes_max=self._limits.body_bytes_max,
                line_bytes_max=self._limits.chunk_line_bytes_max,
                overhead_bytes_max=self._limits.chunk_overhead_bytes_max,
                trailer_count_max=self._limits.header_count_max,
            )
        return self._chunked_body.take(self._buffer)

    def _skip_empty_line(self) -> bool:
        """RFC 9112 2.2: one empty line before a request line is ignored; more are refused."""
        if self._empty_line_seen:
            raise ProtocolError(400, "not an HTTP request")
        if self._buffer == b"\r":
            return False
        if self._buffer[:2] != b"\r\n":
            raise ProtocolError(400, "not an HTTP request")
        del self._buffer[:2]
        self._empty_line_seen = True
        return True

    def _is_line_short(self, end: int) -> bool:
        return end <= self._limits.target_bytes_max or (
            self._buffer.find(b"\n", 0, self._limits.target_bytes_max) >= 0
        )

    def _check_incomplete(self) -> None:
        """Refuse what can no longer become a head, without waiting for the rest of it."""
        buffer = self._buffer
        if not buffer:
            return
        if not self._line_checked:
            end = buffer.find(b"\n", 0, self._limits.target_bytes_max) + 1
            if end == 0:
                check_beginning(bytes(buffer[:64]))
                if len(buffer) >= self._limits.target_bytes_max:
                    raise ProtocolError(414, "the request target is too long")
                return
            parse_request_line(bytes(buffer[:end]))
            self._line_checked = True
        if _BARE_LF.search(buffer, self._scanned_bytes):
            raise ProtocolError(400, "bare LF in the header section", path=path_of(buffer))
        if len(buffer) > self._limits.header_bytes_max:
            raise ProtocolError(431, "the header section is too large", path=path_of(buffer))
        # The empty line that ends a head may have begun in the last three bytes.
        self._scanned_bytes = max(0, len(buffer) - 3)
