"""One server has a port, whichever way it accepts, and says so at once if another has it."""

from __future__ import annotations

import itertools
import socket

import pytest

from fastserve.errors import ConfigError
from fastserve.supervisor.listener import AcceptMode, Listener

MODES: list[AcceptMode] = ["shared", "reuseport"]


def bind(port: int, mode: AcceptMode) -> Listener:
    return Listener.bind("127.0.0.1", port, mode=mode, frontends=3, backlog=16)


@pytest.mark.parametrize("mode", MODES)
def test_port_0_is_one_real_port(mode: AcceptMode) -> None:
    listener = bind(0, mode)
    ports = {listener.socket_for(lane).getsockname()[1] for lane in range(3)}
    assert ports == {listener.port}
    assert listener.port > 0
    assert listener.url == f"http://127.0.0.1:{listener.port}"
    listener.close()


@pytest.mark.parametrize(("first", "second"), list(itertools.product(MODES, MODES)))
def test_a_second_server_is_refused(first: AcceptMode, second: AcceptMode) -> None:
    listener = bind(0, first)
    with pytest.raises(ConfigError, match="in use by another server"):
        bind(listener.port, second)
    listener.close()
    bind(listener.port, second).close()


@pytest.mark.parametrize("mode", MODES)
def test_a_stranger_with_so_reuseport_holds_the_port(mode: AcceptMode) -> None:
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        with pytest.raises(ConfigError, match="in use"):
            bind(stranger.getsockname()[1], mode)


@pytest.mark.parametrize("mode", MODES)
def test_connections_do_not_wait_for_acks(mode: AcceptMode) -> None:
    listener = bind(0, mode)
    with socket.create_connection(("127.0.0.1", listener.port)):
        for lane in range(3):
            listener.socket_for(lane).setblocking(False)
            try:
                accepted, _ = listener.socket_for(lane).accept()
            except BlockingIOError:
                continue
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            accepted.close()
            break
        else:
            pytest.fail("nobody got the connection")
    listener.close()


def test_a_name_that_is_no_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"server\.host: 'no\.such\.invalid'"):
        Listener.bind("no.such.invalid", 0, mode="shared", frontends=1, backlog=1)
