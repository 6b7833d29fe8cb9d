"""Once nobody may connect any more, who has is served and who has not is refused, without a gap."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import pytest

from fastserve.listening import let_nobody_connect

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_is_in_the_queue_stays_and_nobody_comes_in(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("there is no such address here")
    address = listener.getsockname()[:2]
    with contextlib.closing(listener), socket.create_connection(address, timeout=10) as early:
        let_nobody_connect(listener)
        with socket.socket(family) as late:
            late.settimeout(0.2)
            with pytest.raises(TimeoutError):
                late.connect(address)
        listener.settimeout(0)
        connection, _ = listener.accept()
        with pytest.raises(BlockingIOError):
            listener.accept()
        with connection:
            early.sendall(b"what was asked")
            connection.settimeout(10)
            assert connection.recv(100) == b"what was asked"
            connection.sendall(b"is answered")
            assert early.recv(100) == b"is answered"


def test_who_tries_again_is_refused_once_it_is_closed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    let_nobody_connect(listener)
    with socket.socket() as late:
        late.setblocking(False)
        with pytest.raises(BlockingIOError):
            late.connect(listener.getsockname())
        listener.close()
        late.settimeout(10)
        with pytest.raises(ConnectionRefusedError):
            late.recv(1)


def test_of_a_unix_socket_too(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        listener, early, late = (
            stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)
        )
        listener.bind(path)
        listener.listen()
        early.connect(path)
        let_nobody_connect(listener)
        with pytest.raises(ConnectionRefusedError):
            late.connect(path)
        listener.setblocking(False)
        with listener.accept()[0] as connection:
            connection.sendall(b"is answered")
        assert early.recv(100) == b"is answered"
        with pytest.raises(BlockingIOError):
            listener.accept()
