"""Responses, as bytes.

Pure but for the clock that Date is read from, once a second.
"""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.http1.message import Fields, Response

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


class _Date:
    """The fields that every response carries, rendered once a second."""

    def __init__(self) -> None:
        self._at_s = -1
        self._fields = b""

    def fields(self, now_s: int) -> bytes:
        if now_s != self._at_s:
            self._at_s = now_s
            date = formatdate(now_s, usegmt=True).encode()
            self._fields = b"Date: %b\r\nServer: fastserve\r\n" % date
        return self._fields


_date = _Date()


def render_head(
    status: int,
    *,
    request_id: str,
    content: bytes,
    headers: Fields = (),
    connection: bytes = b"",
) -> bytes:
    """Render a response's head, the empty line included.

    `content`: the lines that describe and frame the body. `connection`: its line, if any.
    Raises ValueError if a header would end its line early (response splitting, CVE-2020-7695).
    """
    lines = b""
    if headers:
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
            raise ValueError("a header of the response holds CR or LF")
    return b"%b%bX-Request-Id: %b\r\n%b%b%b\r\n" % (
        _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status,
        _date.fields(int(time.time())),
        request_id.encode(),
        content,
        lines,
        connection,
    )


def render_response(
    response: Response,
    *,
    request_id: str,
    headers: Fields = (),
    connection: bytes = b"",
    to_head: bool = False,
) -> bytes:
    """Render a whole response, with `headers` beside its own.

    An answer to HEAD (`to_head`) describes its body without having it.
    Raises ValueError as render_head does.
    """
    status, body = response.status, response.body
    if status in (204, 304):  # RFC 9110 8.6: there is no body to describe
        content = body = b""
    elif body:
        content = b"Content-Type: %b\r\nContent-Length: %d\r\n" % (response.content_type, len(body))
    else:
        content = b"Content-Length: 0\r\n"
    head = render_head(
        status,
        request_id=request_id,
        content=content,
        headers=response.headers + headers,
        connection=connection,
    )
    return head if to_head else head + body
