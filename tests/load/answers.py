"""Answers, right and wrong ones, and a server that gives them as it is told."""

from __future__ import annotations

import shutil
import socketserver
import time
from dataclasses import dataclass, field

import pytest

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

BEGINNING = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def text(word: str) -> bytes:
    return (
        b'data: {"choices":[{"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % word.encode()
    )


FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def stream(*events: bytes) -> bytes:
    """A whole answer, each event a chunk of its own."""
    return BEGINNING + b"".join(map(chunk, events)) + END


def whole(body: bytes, *, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@dataclass
class Answering:
    """What the server does: the answer, sent in slices or at once, and what it was asked.

    `delay_s` is before each answer, `stalls_s` before the first ones, one after the other.
    """

    answer: bytes = b""
    slice_bytes: int = 1 << 20
    delay_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list)
    closes: bool = False
    asked: list[bytes] = field(default_factory=list)


class AnsweringHandler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, AnsweringServer)
        answering = server.answering
        while line := self.rfile.readline():
            head = line
            while not head.endswith(b"\r\n\r\n"):
                head += self.rfile.readline()
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            answering.asked.append(self.rfile.read(length))
            stall_s = answering.stalls_s.pop(0) if answering.stalls_s else 0.0
            if answering.delay_s or stall_s:
                time.sleep(answering.delay_s + stall_s)
            try:
                for at in range(0, len(answering.answer), answering.slice_bytes):
                    self.wfile.write(answering.answer[at : at + answering.slice_bytes])
            except ConnectionError:
                return
            if answering.closes:
                return


class AnsweringServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    request_queue_size = 128
    answering: Answering
