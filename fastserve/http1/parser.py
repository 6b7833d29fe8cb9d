"""One complete request head to a RequestHead, or to a refusal.

httptools (llhttp) is trusted with the grammar of header fields and with nothing else: it takes
HTTP/0.9, RTSP and bad Hosts, has no limits, and drops the body of a request that offers an upgrade.
So it is fed exactly one head and forgotten. Request line, Host and framing are checked here, and
there must be as many fields as lines: then the two cannot disagree on where one ends.

Pure: bytes in, a value or a ProtocolError out. The only file that knows httptools.
"""

from __future__ import annotations

import re
from functools import lru_cache

import httptools

from fastserve.http1.message import ProtocolError, RequestHead

# RFC 9112 3.2.1, visible ASCII alone: what is not must be percent-encoded, and "#" never is sent.
_PATH = rb"(/[!\"$->@-~]*)(?:\?([!\"$-~]*))?"
_REQUEST_LINE = re.compile(rb"([A-Z]+) " + _PATH + rb" HTTP/1\.([01])\r\n")
# RFC 9112 3.2.2. The authority must be one that a Host field could carry.
_ABSOLUTE_LINE = re.compile(
    rb"([A-Z]+) (?i:https?)://([^/?#\s]+)(?:" + _PATH + rb"|\?([!\"$-~]*))? HTTP/1\.([01])\r\n",
)
_ASTERISK_LINE = re.compile(rb"OPTIONS \* HTTP/1\.([01])\r\n")
# A line with three parts that could be HTTP of another version (RFC 9110 15.6.6).
_OTHER_VERSION = re.compile(rb"[^ \r\n]+ [^ \r\n]+ HTTP/[0-9]\.[0-9]\r\n")
# RFC 9110 5.6.2, as far as a line goes; the method of a line that is not complete yet.
_METHOD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32})(?: |\Z)")
_METHOD_BYTES_MAX = 32
_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"OPTIONS", b"PUT", b"PATCH", b"DELETE"})
# RFC 9112 3.2, RFC 3986 3.2.2. "%" is in no class, or backtracking would be exponential.
_HOST = re.compile(
    rb"(?:\[[0-9A-Fa-f:.]+\]|(?=[^:])[A-Za-z0-9._~!$&'()*+,;=-]*"
    rb"(?:%[0-9A-Fa-f]{2}[A-Za-z0-9._~!$&'()*+,;=-]*)*)(?::[0-9]*)?"
)
# The fields that decide how a message is read.
_FRAMING = frozenset({b"host", b"connection", b"content-length", b"transfer-encoding", b"expect"})

RequestLine = tuple[str, str, str, int]
"""Method, path, query, minor version."""


def parse_head(raw: bytes, *, header_count_max: int, body_bytes_max: int) -> RequestHead:
    """Parse a head that ends in its first empty line (RFC 9112 2.1).

    Raises ProtocolError: 400, 413, 417, 431, 501 or 505.
    """
    method, path, query, minor = parse_request_line(raw[: raw.index(b"\r\n") + 2])
    headers = _parse_fields(raw, header_count_max=header_count_max)
    framing: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name in _FRAMING:
            framing.setdefault(name, []).append(value)
    _check_host(framing.get(b"host"), minor=minor)
    chunked = b"transfer-encoding" in framing
    if chunked:
        _check_chunked(framing, minor=minor)
    lengths = framing.get(b"content-length")
    return RequestHead(
        method,
        path,
        query,
        minor,
        tuple(headers),
        _keeps_alive(framing.get(b"connection"), minor=minor),
        _content_length(lengths, body_bytes_max=body_bytes_max) if lengths else 0,
        chunked,
        _expects_continue(framing.get(b"expect"), minor=minor),
    )


def parse_request_line(line: bytes) -> RequestLine:
    """Parse a request line, its CRLF included (RFC 9112 3). Raises ProtocolError: 400, 501, 505."""
    # A server is asked for the same few lines all day. Long ones are not kept: memory is bounded.
    return _cached_request_line(line) if len(line) <= 256 else _request_line(line)


def path_of(head: bytes | bytearray) -> str | None:
    """The path in the first line of a head that was refused; None if there is no such line."""
    try:
        return parse_request_line(bytes(head[: head.find(b"\n") + 1]))[1]
    except ProtocolError:
        return None


def check_beginning(line: bytes) -> None:
    """Refuse the beginning of a line that can no longer become a request line (400 or 501)."""
    match = _METHOD.match(line)
    if match is None:
        raise ProtocolError(400, "not an HTTP request")
    if match.end() > match.end(1):
        _check_method(match[1])


def _request_line(line: bytes) -> RequestLine:
    if match := _REQUEST_LINE.fullmatch(line):
        method, path, query, minor = match.groups()
    elif match := _ASTERISK_LINE.fullmatch(line):
        method, path, query, minor = b"OPTIONS", b"*", None, match[1]
    elif match := _ABSOLUTE_LINE.fullmatch(line):
        method, authority, path, query, lone_query, minor = match.groups()
        _check_method(method)
        path, query = path or b"/", query or lone_query
        if _HOST.fullmatch(authority) is None:
            raise ProtocolError(400, "the request target has an invalid authority")
    else:
        raise _line_refusal(line)
    _check_method(method)
    return method.decode(), path.decode(), (query or b"").decode(), int(minor)


_cached_request_line = lru_cache(maxsize=256)(_request_line)


def _line_refusal(line: bytes) -> ProtocolError:
    check_beginning(line)
    if _OTHER_VERSION.fullmatch(line) and not line.endswith((b"/1.0\r\n", b"/1.1\r\n")):
        return ProtocolError(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
    return ProtocolError(400, "malformed request line")


def _check_method(method: bytes) -> None:
    # As it would be before the line is complete: an answer does not depend on how bytes arrive.
    if len(method) > _METHOD_BYTES_MAX:
        raise ProtocolError(400, "not an HTTP request")
    # CONNECT and TRACE are among those not implemented: nothing is tunnelled or reflected.
    if method not in _METHODS:
        raise ProtocolError(501, f"method {method.decode()} is not implemented")


class _Fields:
    """Collects what httptools calls back with."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        # llhttp leaves the whitespace behind a value in place (RFC 9112 5.1: not part of it).
        self.pairs.append((name.lower(), value.rstrip(b" \t")))


def _parse_fields(raw: bytes, *, header_count_max: int) -> list[tuple[bytes, bytes]]:
    lines = raw.count(b"\r\n")
    # RFC 9112 2.2: a bare CR or LF is where two parsers come to disagree.
    if raw.count(b"\n") != lines or raw.count(b"\r") != lines:
        raise ProtocolError(400, "bare CR or LF in the header section")
    # The request line and the empty one are not fields.
    if lines - 2 > header_count_max:
        raise ProtocolError(431, f"more than {header_count_max} header fields")
    fields = _Fields()
    try:
        httptools.HttpRequestParser(fields).feed_data(raw)
    except httptools.HttpParserUpgrade:
        # Raised at the end of the head, when every field has been reported. An upgrade is an offer
        # (RFC 9110 7.8) that is never taken here: the request is served as it is, body and all.
        pass
    except httptools.HttpParserError as error:
        raise ProtocolError(400, f"malformed header section: {error}") from None
    if len(fields.pairs) != lines - 2:
        raise ProtocolError(400, "malformed header section")
    return fields.pairs


def _check_host(hosts: list[bytes] | None, *, minor: int) -> None:
    """RFC 9112 3.2: exactly one valid Host, which only HTTP/1.0 may leave out (CVE-2026-34525)."""
    if hosts is None:
        if minor == 0:
            return
        raise ProtocolError(400, "no Host field")
    if len(hosts) > 1 or _HOST.fullmatch(hosts[0]) is None:
        raise ProtocolError(400, "Host must be given once, as host or host:port")


def _check_chunked(framing: dict[bytes, list[bytes]], *, minor: int) -> None:
    """RFC 9112 6.1: `chunked`, once, in HTTP/1.1, and no Content-Length beside it."""
    # Both at once, or any coding in HTTP/1.0, is a smuggling attempt: refuse, do not repair.
    if b"content-length" in framing:
        raise ProtocolError(400, "both Transfer-Encoding and Content-Length")
    if minor == 0:
        raise ProtocolError(400, "Transfer-Encoding in HTTP/1.0")
    codings = [
        coding.strip(b" \t").lower()
        for value in framing[b"transfer-encoding"]
        for coding in value.split(b",")
    ]
    if codings == [b"chunked"]:
        return
    if codings[-1] == b"chunked" and b"" not in codings and codings.count(b"chunked") == 1:
        raise ProtocolError(501, "the only transfer coding understood is chunked")
    raise ProtocolError(400, "Transfer-Encoding must be chunked")


def _content_length(values: list[bytes], *, body_bytes_max: int) -> int:
    """RFC 9110 8.6: one decimal number. Equal repetitions are refused too."""
    # bytes.isdigit knows ASCII digits alone: no sign, no space, no underscore, no other script.
    if len(values) > 1 or not values[0].isdigit():
        raise ProtocolError(400, "Content-Length must be given once, as a decimal number")
    digits = values[0].lstrip(b"0") or b"0"
    # The number of digits is looked at first: int() of thousands of them is slow, or an error.
    if len(digits) > 19 or int(digits) > body_bytes_max:
        raise ProtocolError(413, f"the body is larger than {body_bytes_max} bytes")
    return int(digits)


def _keeps_alive(values: list[bytes] | None, *, minor: int) -> bool:
    """RFC 9112 9.3: HTTP/1.1 persists unless told to close, HTTP/1.0 only if asked to."""
    if values is None:
        return minor == 1
    if values == [b"keep-alive"]:
        return True
    options = {option.strip(b" \t").lower() for value in values for option in value.split(b",")}
    return b"close" not in options and (minor == 1 or b"keep-alive" in options)


def _expects_continue(values: list[bytes] | None, *, minor: int) -> bool:
    """RFC 9110 10.1.1: an HTTP/1.0 expectation is ignored, an unknown one is 417."""
    if values is None or minor == 0:
        return False
    if len(values) > 1 or values[0].lower() != b"100-continue":
        raise ProtocolError(417, "the only expectation understood is 100-continue")
    return True
