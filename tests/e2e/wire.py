"""A client of bare sockets, for what openai's client cannot do or hides.

It sends a request, reads as much of the answer as it is told to, and goes away in any way there is.
"""

from __future__ import annotations

import concurrent.futures
import select
import socket
import struct
from typing import TYPE_CHECKING, Any, Self, TypeVar

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# No single read of a healthy server takes nearly as long.
READ_TIMEOUT_S = 30.0
DONE = "[DONE]"


T = TypeVar("T")


class Wire:
    """One connection. `receive_bytes` is the size of its receive buffer: small for a slow reader.

    It advertises what its buffer had room for when it connected, so that is set before.
    """

    def __init__(self, port: int, *, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(READ_TIMEOUT_S)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", port))
        self._file = self.socket.makefile("rb")
        self.status = 0
        self.headers: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- there

    def post(self, path: str, **fields: Any) -> Self:
        """Send a request with `fields` for its JSON body. `timeout_ms` is a header's."""
        timeout_ms = fields.pop("timeout_ms", None)
        body = orjson.dumps(fields)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
        )
        if timeout_ms is not None:
            head += f"X-Request-Timeout-Ms: {timeout_ms}\r\n"
        head += "\r\n"
        self.socket.sendall(head.encode() + body)
        return self

    def complete(self, token_ids: Iterable[int] | None = None, **fields: Any) -> Self:
        """Ask for a completion; with `token_ids`, of exactly these."""
        if token_ids is not None:
            fields["sim"] = {"token_ids": list(token_ids)} | fields.get("sim", {})
        return self.post("/v1/completions", **{"prompt": "x", "max_tokens": 4096} | fields)

    # ---- and back

    def readable(self) -> bool:
        """Whether anything has come that was not read, or the connection has ended."""
        return bool(select.select([self.socket], [], [], 0)[0])

    def read_head(self) -> int:
        """Read to the end of the headers; return the status. Interim responses are passed over."""
        while True:
            line = self._line()
            self.status = int(line.split()[1])
            self.headers = {}
            while header := self._line():
                name, _, value = header.partition(":")
                self.headers[name.lower()] = value.strip()
            if self.status >= 200:
                return self.status

    def read_json(self) -> Any:
        """Read a whole answer, status and JSON."""
        self.read_head()
        return orjson.loads(self._file.read(int(self.headers["content-length"])))

    def read_chunk(self) -> bytes:
        """Read one chunk of the body; b"" is the end of it."""
        size = int(self._line(), 16)
        data = self._file.read(size)
        assert len(data) == size, "the connection ended inside a chunk"
        assert self._line() == ""
        return data

    def blocks(self) -> Iterator[str]:
        """Read what stands between blank lines, events and comments, to the end of the body."""
        text = ""
        while chunk := self.read_chunk().decode():
            *whole, text = (text + chunk).split("\n\n")
            yield from whole
        assert text == "", "the stream ended inside an event"

    def events(self) -> Iterator[str]:
        """Read the head, and then the data of each event to the end of the body."""
        self.read_head()
        assert self.status == 200, self._file.read(int(self.headers["content-length"]))
        for block in self.blocks():
            if not block.startswith(":"):
                assert block.startswith("data: "), block
                yield block.removeprefix("data: ")

    def chunks(self) -> list[Any]:
        """Read a stream that ends as it should; return its objects."""
        *objects, last = self.events()
        assert last == DONE
        return [orjson.loads(each) for each in objects]

    def text(self) -> str:
        """Read a stream of one completion; return what it said."""
        return "".join(choice["text"] for chunk in self.chunks() for choice in chunk["choices"])

    def at_end(self) -> bool:
        """Whether the server has closed, be it by a reset. Waits for it."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True

    # ---- and gone

    def close(self) -> None:
        """Go away as a process does that exits."""
        self._file.close()
        self.socket.close()

    def reset(self) -> None:
        """Go away as a process does that exits with unread data: by a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def finish_sending(self) -> None:
        """Say that nothing more will be sent, and stay to read."""
        self.socket.shutdown(socket.SHUT_WR)

    def _line(self) -> str:
        line = self._file.readline()
        assert line.endswith(b"\r\n"), f"the connection ended after {line!r}"
        return line[:-2].decode()


def in_parallel(*calls: Callable[[], T]) -> list[T]:
    """Run every call at the same time, each in a thread."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
