"""Real sockets, on both event loops: what no fake can show is when a client is known to be gone."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import pytest
import uvloop

from fastserve.http1 import peer, sse
from fastserve.http1.connection import Connection
from fastserve.http1.connections import Connections
from fastserve.http1.limits import Limits
from fastserve.http1.message import RequestHead, Response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from fastserve.http1.exchange import Exchange

if sys.platform != "linux":
    pytest.skip("TCP_INFO is Linux's", allow_module_level=True)

POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
POST_10 = b"POST / HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# No wait of a test is longer.
PATIENCE_S = 10.0


class App:
    """Holds each exchange; tells when it was served and when its client went away."""

    def __init__(self) -> None:
        self.served: asyncio.Queue[Exchange] = asyncio.Queue()
        self.gone: asyncio.Queue[Exchange] = asyncio.Queue()

    def check(self, head: RequestHead) -> Response | None:
        return None

    def serve(self, exchange: Exchange) -> None:
        exchange.on_disconnect = partial(self.gone.put_nowait, exchange)
        self.served.put_nowait(exchange)

    def error_body(self, status: int, message: str, *, path: str | None) -> bytes:
        return b"{}"


class Server:
    """A listening socket, and clients of it."""

    def __init__(self, app: App, address: tuple[str, int] | str) -> None:
        self.app = app
        self.address = address

    async def connect(self, request: bytes) -> tuple[socket.socket, Exchange]:
        """Send `request` on a new connection; the client's socket and the server's exchange."""
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        client = socket.socket(family)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, self.address)
        await loop.sock_sendall(client, request)
        return client, await asyncio.wait_for(self.app.served.get(), PATIENCE_S)

    async def seconds_until_gone(self) -> float:
        start_s = time.monotonic()
        await asyncio.wait_for(self.app.gone.get(), PATIENCE_S)
        return time.monotonic() - start_s


async def read_all(client: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    parts: list[bytes] = []
    with client:
        while part := await asyncio.wait_for(loop.sock_recv(client, 65_536), PATIENCE_S):
            parts.append(part)
    return b"".join(parts)


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@asynccontextmanager
async def serving(*, path: Path | None = None) -> AsyncIterator[Server]:
    loop = asyncio.get_running_loop()
    app, connections = App(), Connections()
    limits = Limits(linger_timeout_s=0.2)
    factory = partial(Connection, app, limits=limits, connections=connections)
    server: asyncio.AbstractServer
    if path is None:
        server = await loop.create_server(factory, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
    else:
        server = await loop.create_unix_server(factory, str(path))
        address = str(path)
    try:
        yield Server(app, address)
    finally:
        server.close()
        connections.drain()
        connections.abort_all()
        assert await connections.wait_closed(timeout_s=PATIENCE_S)


class Run(Protocol):
    def __call__(self, test: Callable[[], Coroutine[None, None, None]], /) -> None: ...


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function on each kind of loop."""
    make_loop = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_on_loop(test: Callable[[], Coroutine[None, None, None]], /) -> None:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(test())

    return run_on_loop


def before_the_head(exchange: Exchange) -> None:
    """The request waits in a queue, or for its first token."""


def in_a_stream(exchange: Exchange) -> None:
    exchange.start_stream()
    exchange.write(sse.event(b"1"))


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])
@pytest.mark.parametrize("phase", [before_the_head, in_a_stream])
@pytest.mark.parametrize("request_", [POST, POST_10], ids=["HTTP/1.1", "HTTP/1.0"])
def test_a_client_that_leaves_is_missed_within_100_ms(
    run: Run,
    phase: Callable[[Exchange], None],
    leave: Callable[[socket.socket], None],
    request_: bytes,
) -> None:
    async def test() -> None:
        async with serving() as server:
            client, exchange = await server.connect(request_)
            phase(exchange)
            leave(client)
            assert await server.seconds_until_gone() < 0.1
            assert exchange.ended

    run(test)


def test_also_when_it_has_sent_more_than_is_read(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client, _ = await server.connect(POST)
            await asyncio.get_running_loop().sock_sendall(client, POST * 2000)
            await asyncio.sleep(0.05)
            client.close()
            assert await server.seconds_until_gone() < 2.5

    run(test)


def test_a_client_that_has_finished_sending_gets_its_answer(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client, exchange = await server.connect(POST)
            client.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.1)  # past the first looks: the client must not be taken for gone
            exchange.respond(Response(200, body=b"answer"))
            answer = await read_all(client)
            assert answer.startswith(CONTINUE + b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"answer")
            assert server.app.gone.empty()

    run(test)


def test_and_its_stream(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client, exchange = await server.connect(POST)
            exchange.start_stream()
            client.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.1)
            exchange.end(sse.DONE)
            body = (await read_all(client)).partition(b"\r\n\r\n")[2]
            assert body == b"8\r\n: ping\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

    run(test)


def test_and_the_answers_to_all_its_requests(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client, exchange = await server.connect(POST + POST)
            client.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.02)
            exchange.respond(Response(200, body=b"one"))
            (await server.app.served.get()).respond(Response(200, body=b"two"))
            answers = await read_all(client)
            assert answers.index(b"one") < answers.index(b"two")

    run(test)


def test_one_that_leaves_after_it_has_finished_sending_is_missed_too(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client, _ = await server.connect(POST)
            client.shutdown(socket.SHUT_WR)
            loop = asyncio.get_running_loop()
            assert await asyncio.wait_for(loop.sock_recv(client, 100), PATIENCE_S) == CONTINUE
            client.close()
            assert await server.seconds_until_gone() < 2.5

    run(test)


def test_on_a_unix_socket_the_end_of_input_is_the_end(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(path=tmp_path / "socket") as server:
            client, _ = await server.connect(POST)
            client.close()
            assert await server.seconds_until_gone() < 0.1
            client, exchange = await server.connect(POST)
            exchange.respond(Response(200, body=b"answer", close=True))
            assert (await read_all(client)).endswith(b"answer")

    run(test)


def test_a_cut_stream_is_seen_to_be_cut(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client, exchange = await server.connect(POST)
            exchange.start_stream()
            exchange.write(sse.event(b"1"))
            exchange.cut()
            assert (await read_all(client)).endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n")

    run(test)


def test_in_http10_by_a_reset(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client, exchange = await server.connect(POST_10)
            exchange.start_stream()
            exchange.cut()
            with pytest.raises(ConnectionResetError):
                await read_all(client)

    run(test)


def test_an_answer_is_read_by_a_client_that_is_still_sending(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client, exchange = await server.connect(POST)
            exchange.respond(Response(200, body=b"answer", close=True))
            await asyncio.get_running_loop().sock_sendall(client, b"x" * 200_000)
            assert (await read_all(client)).endswith(b"answer")

    run(test)


def test_answering_a_client_that_was_just_reset_raises_nothing(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client, exchange = await server.connect(POST)
            reset(client)
            # The loop has not had a chance to see it.
            exchange.respond(Response(200, body=b"x" * 300_000, close=True))
            await asyncio.sleep(0.01)

    run(test)


def test_a_host_that_vanishes_is_noticed_by_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer.detect_silence(server, timeout_s=30.0)
        tcp = socket.IPPROTO_TCP
        assert server.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert server.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 120_000
        assert server.getsockopt(tcp, socket.TCP_KEEPIDLE) == 10


def test_the_state_of_a_connection_is_the_kernels() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            client.shutdown(socket.SHUT_WR)
            assert accepted.recv(1) == b""
            assert not peer.is_gone(accepted)
            client.close()
            assert not peer.is_gone(accepted)
            accepted.send(b"x")
            deadline_s = time.monotonic() + PATIENCE_S
            while not peer.is_gone(accepted):
                assert time.monotonic() < deadline_s
        assert peer.is_gone(accepted)
