"""A strict reader of what the server may send: HTTP/1.1 with a length or in chunks, and events.

Whatever it does not know is a fault, and an early end is no fault: what that means depends on who
was killed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.asking import Heard

_STATUS_FIRST = b"HTTP/1.1 "


class Fault(Exception):
    """The server sent what no server may send."""


class _Ended(Exception):
    """The connection ended."""


async def hear(
    reader: asyncio.StreamReader, heard: Heard, *, on_event: Callable[[], None] = lambda: None
) -> None:
    """Read one answer into `heard`, to its end or the connection's."""
    try:
        await _read_head(reader, heard)
        if "transfer-encoding" in heard.headers:
            await _read_events(reader, heard, on_event)
        else:
            heard.body = await _exactly(reader, _length(heard))
        heard.complete = True
    except Fault as fault:
        heard.fault = str(fault)
    except (_Ended, ConnectionError):
        pass


async def _read_head(reader: asyncio.StreamReader, heard: Heard) -> None:
    while True:
        line = await _line(reader)
        if not (line.startswith(_STATUS_FIRST) and line[9:12].isdigit()):
            raise Fault(f"no status line: {line[:100]!r}")
        status = int(line[9:12])
        headers = {}
        while header := await _line(reader):
            name, colon, value = header.decode("latin-1").partition(":")
            if not colon or name.lower() in headers:
                raise Fault(f"header: {header[:100]!r}")
            headers[name.lower()] = value.strip()
        if status >= 200:
            heard.status, heard.headers = status, headers
            return


def _length(heard: Heard) -> int:
    text = heard.headers.get("content-length", "")
    if not text.isdigit():
        raise Fault(f"content-length: {text!r}")
    return int(text)


async def _read_events(
    reader: asyncio.StreamReader, heard: Heard, on_event: Callable[[], None]
) -> None:
    if heard.headers["transfer-encoding"] != "chunked" or "content-length" in heard.headers:
        raise Fault(f"framing: {heard.headers}")
    if not heard.headers.get("content-type", "").startswith("text/event-stream"):
        raise Fault(f"a stream of {heard.headers.get('content-type')}")
    while True:
        line = await _line(reader)
        try:
            size = int(line, 16)
        except ValueError:
            raise Fault(f"chunk size: {line[:100]!r}") from None
        chunk = await _exactly(reader, size)
        if await _line(reader):
            raise Fault("a chunk that is longer than its size")
        if not size:
            return
        # Our own server's promise: a chunk is one or several whole events.
        if not chunk.endswith(b"\n\n"):
            raise Fault(f"a chunk ends inside an event: {chunk[-100:]!r}")
        for block in chunk.decode()[:-2].split("\n\n"):
            if block.startswith(":"):
                continue
            if not block.startswith("data: ") or "\n" in block:
                raise Fault(f"no event: {block[:100]!r}")
            heard.events.append(block.removeprefix("data: "))
            on_event()


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readuntil(b"\r\n")
    except asyncio.IncompleteReadError:
        raise _Ended from None
    except asyncio.LimitOverrunError:
        raise Fault("a line without an end") from None
    return line[:-2]


async def _exactly(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        raise _Ended from None
