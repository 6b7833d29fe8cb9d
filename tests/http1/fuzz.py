"""The parser and the connection under arbitrary input, and what must hold whatever comes.

    python -m tests.http1.fuzz -max_total_time=600       (libFuzzer's options; needs atheris)

An input is the bytes of a connection; within it FE and one more byte are something else that
happens: an answer, a timeout, an end. So every file of the corpus is an input as it is.
"""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve.http1.connections import Connections
from fastserve.http1.message import Response
from tests.http1.test_connection import CLOSE, CLOSE_WAIT, Wire
from tests.http1.test_corpus import CORPUS, load, outcomes

if TYPE_CHECKING:
    from collections.abc import Callable

HAPPENS = b"\xfe"
# Enough for several requests; what is longer only takes longer.
INPUT_BYTES_MAX = 4096
# Small, so that inputs of a few bytes reach them.
LIMITS: dict[str, Any] = {
    "target_bytes_max": 256,
    "header_bytes_max": 1024,
    "header_count_max": 8,
    "body_bytes_max": 512,
    "chunk_line_bytes_max": 64,
    "chunk_overhead_bytes_max": 128,
    "read_buffer_bytes_max": 64,
    "write_buffer_bytes_max": 128,
    "requests_per_connection_max": 20,
}
STATUSES = {100, 200, 204, 400, 404, 408, 413, 414, 417, 431, 501, 503, 505}


class Complaints(logging.Handler):
    """What the layer logs is a bug: every application here is well-behaved."""

    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(self.format(record))


_logger = logging.getLogger("fuzzed")
_logger.propagate = False
_logger.addHandler(Complaints())


class Play:
    """A connection, and things that happen to it."""

    def __init__(self, *, tls: bool = False) -> None:
        self.wire = Wire(
            connections=Connections(bodies_bytes_max=400),
            tcp=True,
            tls=tls,
            logger=_logger,
            **LIMITS,
        )
        self.lost = False
        # By the byte that calls for it, modulo their number.
        self.actions: tuple[Callable[[], None], ...] = (
            self.respond, self.start_stream, self.write, self.end, self.cut, self.client_stops,
            self.client_takes, self.client_finishes, self.client_closes, self.wait_a_moment,
            self.wait_long, self.drain, self.abort, self.lose,
        )  # fmt: skip

    # ---- what the client and its bytes do

    def send(self, data: bytes) -> None:
        transport = self.wire.transport
        if not self.lost and not transport.ending and transport.reading:
            self.wire.connection.data_received(data)

    def client_finishes(self) -> None:
        if not self.lost and not self.wire.transport.ending:
            self.wire.connection.eof_received()

    def client_closes(self) -> None:
        assert self.wire.transport.socket is not None
        self.wire.transport.socket.state = CLOSE

    def client_stops(self) -> None:
        assert self.wire.transport.socket is not None
        self.wire.transport.client_reads = False
        self.wire.transport.socket.state = CLOSE_WAIT

    def client_takes(self) -> None:
        if not self.lost:
            self.wire.transport.take(100)

    # ---- what the application does, to the last exchange or, after its end, to no effect

    def respond(self) -> None:
        for exchange in self.wire.app.exchanges[-1:]:
            if exchange.started:
                exchange.end()
            else:
                exchange.respond(Response(200, body=b"answer"))

    def start_stream(self) -> None:
        for exchange in self.wire.app.exchanges[-1:]:
            if not exchange.started and exchange.head.method != "HEAD":
                exchange.start_stream()

    def write(self) -> None:
        for exchange in self.wire.app.exchanges[-1:]:
            if exchange.started:
                exchange.write(b"data: x\n\n" * 8)

    def end(self) -> None:
        for exchange in self.wire.app.exchanges[-1:]:
            if exchange.started:
                exchange.end(b"data: end\n\n")

    def cut(self) -> None:
        for exchange in self.wire.app.exchanges[-1:]:
            exchange.cut()

    # ---- what time and the server do

    def wait_a_moment(self) -> None:
        self.wire.loop.advance(0.5)

    def wait_long(self) -> None:
        self.wire.loop.advance(45.0)

    def drain(self) -> None:
        self.wire.connections.drain()

    def abort(self) -> None:
        if not self.lost:
            self.wire.connections.abort_all()

    def lose(self) -> None:
        """The loop tells of the end of a connection once, and calls nothing of it afterwards."""
        if not self.lost:
            self.lost = True
            self.wire.transport.ending = "abort"
            self.wire.lose()
            assert all(timer.cancelled for timer in self.wire.loop.timers)
            assert all(exchange.ended for exchange in self.wire.app.exchanges)

    # ---- what holds

    def finish(self) -> None:
        """Whatever has happened, the connection comes to an end, and nothing of it stays."""
        wire = self.wire
        assert set(wire.statuses()) <= STATUSES, wire.statuses()
        assert len([one for one in wire.app.exchanges if not one.ended]) <= 1
        self.client_finishes()
        wire.transport.take(1 << 30)
        while any(not exchange.ended for exchange in wire.app.exchanges):
            self.respond()  # an answer lets the next request in
            wire.transport.take(1 << 30)
        wire.loop.advance(100_000)
        assert self.lost or wire.transport.ending, wire.connection
        self.lose()
        assert all(exchange.ended for exchange in wire.app.exchanges)
        assert len(wire.connections) == 0
        assert wire.connections.hold(400), "bodies that are no more are still counted"
        assert not wire.connections.hold(1)
        assert all(timer.cancelled for timer in wire.loop.timers)


def play(data: bytes, *, tls: bool = False) -> Play:
    """Have all of an input happen, and check what must hold."""
    one = Play(tls=tls)
    first, *rest = data[:INPUT_BYTES_MAX].split(HAPPENS)
    one.send(first)
    for piece in rest:
        if piece:
            one.actions[piece[0] % len(one.actions)]()
            one.send(piece[1:])
    one.finish()
    return one


def check_slicing(data: bytes) -> None:
    """The reader makes the same of an input however it is sliced."""
    data = data[:INPUT_BYTES_MAX]
    whole = outcomes(data)
    assert outcomes(*(data[at : at + 1] for at in range(len(data)))) == whole
    middle = len(data) // 2
    assert outcomes(data[:middle], data[middle:]) == whole


def target(data: bytes) -> None:
    """What the fuzzer calls."""
    play(data, tls=bool(len(data) & 1))
    check_slicing(data)


def main() -> None:
    """Fuzz until libFuzzer's options say that it is enough; its exit code is ours."""
    atheris = importlib.import_module("atheris")  # not on every machine, and without types

    for name in [name for name in sys.modules if name.startswith(("fastserve", "tests.http1"))]:
        del sys.modules[name]
    with atheris.instrument_imports(include=["fastserve.http1"]):
        from tests.http1 import fuzz  # again, now to be measured
    with tempfile.TemporaryDirectory() as folder:
        for path in CORPUS:
            (Path(folder) / path.stem).write_bytes(load(path)[0])
        atheris.Setup([*sys.argv, folder], fuzz.target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
