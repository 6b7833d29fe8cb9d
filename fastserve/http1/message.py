"""What crosses the border between the layer and the application: one head in, one response out.

Values only. Names of fields are lower-case on the way in; on the way out they are written as given.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

Fields = tuple[tuple[bytes, bytes], ...]


class ProtocolError(Exception):
    """The peer broke HTTP or a limit. `status` is the answer; the connection closes after it.

    `path`: what was asked for, as far as the request could be read.
    """

    def __init__(self, status: int, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.path = path


# A named tuple and not a dataclass: a frozen dataclass of this size costs a microsecond more.
class RequestHead(NamedTuple):
    """A valid request, up to its body.

    `path` is the target without its query (absolute-form reduced to it, `*` for asterisk-form) and
    is not percent-decoded: a route is matched as it was sent. `query` has no question mark.
    `minor` is the N of HTTP/1.N. `headers` has lower-case names and values without outer
    whitespace, in the order received. `content_length` is 0 when there is none.
    """

    method: str
    path: str
    query: str
    minor: int
    headers: Fields
    keep_alive: bool
    content_length: int
    chunked: bool
    expect_continue: bool = False

    def header(self, name: bytes) -> bytes | None:
        """Look up the first value of the field `name` (lower-case); None if it is not there."""
        for field, value in self.headers:
            if field == name:
                return value
        return None

    def without_headers(self) -> RequestHead:
        """The same, for whoever keeps it and reads no field any more."""
        return RequestHead(*self[:4], (), *self[5:])

    @property
    def has_body(self) -> bool:
        return self.chunked or self.content_length > 0


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer. `close` ends the connection after it.

    The layer writes Date, Server, X-Request-Id, Content-Type, Content-Length and Connection;
    `headers` holds anything else.
    """

    status: int
    _: KW_ONLY
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: Fields = ()
    close: bool = False
