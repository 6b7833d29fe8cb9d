"""Those who wait where no acceptor is any more: each hears why, and nobody is waited for long."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING

import pytest

from fastserve.errors import EngineDead, ShuttingDown
from fastserve.frontend.refusals import error_response
from fastserve.http1.response import render_response
from fastserve.supervisor.farewell import FAREWELLS_MAX, LINGER_S, answer, turn_away
from fastserve.supervisor.listener import Listeners

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fastserve.errors import FastserveError

REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[Listeners]:
    made = Listeners.bind(
        address=("127.0.0.1", 0), uds=str(tmp_path / "s"), uds_mode=0o600, mode="reuseport",
        frontends=2, backlog=64,
    )  # fmt: skip
    with contextlib.closing(made):
        yield made


def connected(listeners: Listeners, *, said: bytes) -> socket.socket:
    assert listeners.tcp is not None
    client = socket.create_connection(("127.0.0.1", listeners.tcp.port))
    client.sendall(said)
    return client


def heard(client: socket.socket) -> bytes:
    with client, client.makefile("rb") as file:
        return file.read()


@pytest.mark.parametrize("said", [b"", REQUEST[:20], REQUEST, REQUEST + b"x" * 100_000])
def test_everybody_hears_503(listeners: Listeners, said: bytes) -> None:
    clients = [connected(listeners, said=said) for _ in range(20)]
    assert listeners.uds is not None
    by_path = socket.socket(socket.AF_UNIX)
    by_path.connect(str(listeners.uds.path))
    by_path.sendall(said[:1000])
    began_s = time.monotonic()
    listeners.turn_away(tls=False, engine_died=None)
    assert time.monotonic() - began_s < LINGER_S + 5.0
    for client in [*clients, by_path]:
        head, _, body = heard(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 5" in head
        assert json.loads(body)["error"]["code"] == "shutting_down"
    assert listeners.tcp is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listeners.tcp.port))
    listeners.turn_away(tls=False, engine_died=None)  # again: there is nobody


def test_nobody_is_waited_for_where_nobody_waits(listeners: Listeners) -> None:
    gone = connected(listeners, said=REQUEST)
    gone.close()
    began_s = time.monotonic()
    listeners.turn_away(tls=False, engine_died=None)
    assert time.monotonic() - began_s < LINGER_S


def test_who_speaks_tls_would_not_understand(listeners: Listeners) -> None:
    client = connected(listeners, said=b"\x16\x03\x01")
    listeners.turn_away(tls=True, engine_died=None)
    listeners.close()
    with pytest.raises(ConnectionResetError):
        heard(client)


def test_sockets_that_acceptors_have_ended_are_no_matter() -> None:
    ended, closed = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    ended.shutdown(socket.SHUT_RD)
    closed.close()
    turn_away([ended, closed], engine_died=None)
    assert FAREWELLS_MAX > 0


def test_a_dead_engine_is_what_is_told(listeners: Listeners) -> None:
    client = connected(listeners, said=REQUEST)
    listeners.turn_away(tls=False, engine_died="killed by SIGKILL")
    error = json.loads(heard(client).partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["message"]) == ("engine_dead", "killed by SIGKILL")


@pytest.mark.parametrize("error", [ShuttingDown("closing time"), EngineDead("it died")])
def test_it_is_what_the_frontend_says(error: FastserveError) -> None:
    said = render_response(
        error_response(error), request_id="x", connection=b"Connection: close\r\n"
    )

    def without(data: bytes, names: tuple[bytes, ...]) -> set[bytes]:
        return {line for line in data.split(b"\r\n") if not line.startswith(names)}

    varying = (b"Date: ", b"X-Request-Id: ")
    assert without(answer(error), varying) == without(said, varying)
