"""A chunked body, decoded strictly.

RFC 9112 7.1 with nothing tolerated: every line ends in CRLF, a size is 1 to 16 hex digits, an
extension and a trailer follow their grammar and are dropped. Smuggling lives on leniency here
(CVE-2025-43859, CVE-2025-55315, CVE-2025-22871, CVE-2024-52304, CVE-2025-53643).

Pure: it takes what it can use from the front of a buffer.
"""

from __future__ import annotations

import enum
import re

from fastserve.http1.message import ProtocolError

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_QUOTED = rb"\"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*\""
_SIZE_LINE = re.compile(
    rb"([0-9A-Fa-f]{1,16})(?:;" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb"|" + _QUOTED + rb"))?)*"
)
_PLAIN_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_TRAILER_LINE = re.compile(rb"(" + _TOKEN + rb"):[\t -~\x80-\xff]*")
# RFC 9110 6.5.1: a trailer may not carry what frames, routes or describes the message.
_NOT_IN_TRAILERS = frozenset(
    {
        b"content-length",
        b"transfer-encoding",
        b"host",
        b"connection",
        b"expect",
        b"trailer",
        b"te",
        b"content-type",
        b"content-encoding",
        b"authorization",
    }
)
# A chunk's own framing is about this long when it is honest; see chunk_overhead_bytes_max.
_FRAMING_BYTES_PER_CHUNK = 16


class _Next(enum.Enum):
    SIZE = enum.auto()  # a line with the size of the next chunk
    DATA = enum.auto()  # the rest of a chunk's data
    CRLF = enum.auto()  # what must follow the data
    TRAILER = enum.auto()  # a trailer line, or the empty line that ends the body
    NOTHING = enum.auto()  # the body is complete


class ChunkedBody:
    """Decodes one body: feed it until it is complete."""

    __slots__ = (
        "_body",
        "_body_bytes_max",
        "_left_bytes",
        "_line_bytes_max",
        "_next",
        "_overhead_bytes_left",
        "_trailers_left",
    )

    def __init__(
        self,
        *,
        body_bytes_max: int,
        line_bytes_max: int,
        overhead_bytes_max: int,
        trailer_count_max: int,
    ) -> None:
        self._body_bytes_max = body_bytes_max
        self._line_bytes_max = line_bytes_max
        self._overhead_bytes_left = overhead_bytes_max
        self._trailers_left = trailer_count_max
        self._body = bytearray()
        self._left_bytes = 0
        self._next = _Next.SIZE

    @property
    def decoded_bytes(self) -> int:
        return len(self._body)

    def take(self, buffer: bytearray) -> bytes | None:
        """Take from the front of `buffer`; return the body once it is complete, else None.

        Raises ProtocolError: 400, 413 or 431.
        """
        position = 0
        try:
            while self._next is not _Next.NOTHING:
                taken = self._take_whole_chunk(buffer, position) or self._take_one(buffer, position)
                if taken == 0:
                    return None
                position += taken
        finally:
            del buffer[:position]
        return bytes(self._body)

    def _take_whole_chunk(self, buffer: bytearray, position: int) -> int:
        """Take a chunk that is all there and has no extension: a third of the steps' cost.

        0 for any other, be it good or bad: that is for the steps to tell.
        """
        if self._next is not _Next.SIZE:
            return 0
        match = _PLAIN_SIZE_LINE.match(buffer, position)
        if match is None:
            return 0
        start = match.end()
        size = int(match[1], 16)
        end = start + size
        fits = len(self._body) + size <= self._body_bytes_max
        if size == 0 or not fits or buffer[end : end + 2] != b"\r\n":
            return 0
        self._body += buffer[start:end]
        # At most ten bytes of framing: a plain chunk never uses up what it is allowed.
        self._overhead_bytes_left += _FRAMING_BYTES_PER_CHUNK - (start - position)
        return end + 2 - position

    def _take_one(self, buffer: bytearray, position: int) -> int:
        """Take one line, CRLF or run of data; the number of bytes taken, 0 to ask for more."""
        if self._next is _Next.DATA:
            data = buffer[position : position + self._left_bytes]
            self._body += data
            self._left_bytes -= len(data)
            if self._left_bytes == 0:
                self._next = _Next.CRLF
            return len(data)
        if self._next is _Next.CRLF:
            return self._take_crlf(buffer, position)
        line = self._line(buffer, position)
        if line is None:
            return 0
        if self._next is _Next.SIZE:
            self._on_size(line)
        else:
            self._on_trailer(line)
        self._overhead_bytes_left -= len(line) + 2
        if self._overhead_bytes_left < 0:
            raise ProtocolError(400, "too much framing around the chunks of the body")
        return len(line) + 2

    def _take_crlf(self, buffer: bytearray, position: int) -> int:
        found = buffer[position : position + 2]
        if found == b"\r\n":
            self._next = _Next.SIZE
            return 2
        if b"\r\n".startswith(found):
            return 0
        raise ProtocolError(400, "a chunk is not as long as it says")

    def _line(self, buffer: bytearray, position: int) -> bytes | None:
        """Look for a whole line at `position` and return it without its CRLF."""
        end = buffer.find(b"\n", position, position + self._line_bytes_max)
        if end < 0:
            if len(buffer) - position >= self._line_bytes_max:
                raise ProtocolError(400, "a line of chunk framing is too long")
            return None
        if end == position or buffer[end - 1] != 0x0D:
            raise ProtocolError(400, "bare LF in the framing of a chunked body")
        return bytes(buffer[position : end - 1])

    def _on_size(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise ProtocolError(400, "malformed chunk size")
        self._left_bytes = int(match[1], 16)
        if len(self._body) + self._left_bytes > self._body_bytes_max:
            raise ProtocolError(413, f"the body is larger than {self._body_bytes_max} bytes")
        self._overhead_bytes_left += _FRAMING_BYTES_PER_CHUNK
        self._next = _Next.DATA if self._left_bytes else _Next.TRAILER

    def _on_trailer(self, line: bytes) -> None:
        if not line:
            self._next = _Next.NOTHING
            return
        match = _TRAILER_LINE.fullmatch(line)
        if match is None or match[1].lower() in _NOT_IN_TRAILERS:
            raise ProtocolError(400, "malformed or forbidden trailer field")
        self._trailers_left -= 1
        if self._trailers_left < 0:
            raise ProtocolError(431, "too many trailer fields")
