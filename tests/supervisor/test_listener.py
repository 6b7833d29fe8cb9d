"""One server has a port, whichever way it accepts, and says so at once if another has it."""

from __future__ import annotations

import itertools
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fastserve.errors import ConfigError
from fastserve.supervisor.listener import AcceptMode, Listener, Listeners, UnixListener

if TYPE_CHECKING:
    from collections.abc import Callable

MODES: list[AcceptMode] = ["shared", "reuseport"]


def bind(port: int, mode: AcceptMode) -> Listener:
    return Listener.bind("127.0.0.1", port, mode=mode, frontends=3, backlog=16)


@pytest.mark.parametrize("mode", MODES)
def test_port_0_is_one_real_port(mode: AcceptMode) -> None:
    listener = bind(0, mode)
    ports = {listener.socket_for(lane).getsockname()[1] for lane in range(3)}
    assert ports == {listener.port}
    assert listener.port > 0
    assert listener.url("http") == f"http://127.0.0.1:{listener.port}"
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


# ---- Unix sockets


def bind_unix(path: Path, *, mode: int = 0o600) -> UnixListener:
    return UnixListener.bind(path, mode=mode, backlog=16)


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_a_unix_socket_has_the_mode_asked_for_and_goes_with_its_server(
    mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    listener = bind_unix(path, mode=mode)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = bind_unix(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()


def test_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listener = bind_unix(path)
    with pytest.raises(ConfigError, match="in use by another server"):
        bind_unix(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))  # the first one is unharmed
    listener.close()


def test_nor_one_whose_queue_is_full(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as client:
        busy.bind(str(path))
        busy.listen(0)
        client.connect(str(path))
        with pytest.raises(ConfigError, match="in use by another server"):
            bind_unix(path)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["a file", "a folder"])
def test_what_is_no_socket_is_not_touched(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "socket"
    make(path)
    with pytest.raises(ConfigError, match="is there, and is no socket"):
        bind_unix(path)
    assert path.exists()


def test_a_successors_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first = bind_unix(path)
    path.unlink()
    second = bind_unix(path)
    first.close()
    assert path.is_socket()
    second.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/no/such/folder/socket", "No such file or directory"), ("/tmp/" + "x" * 200, "too long")],
)
def test_a_path_that_cannot_be_is_refused(path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^server.uds: .*{reason}$"):
        bind_unix(Path(path))


def test_of_servers_that_start_together_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    script = (
        "import sys, pathlib\n"
        "from fastserve.supervisor.listener import UnixListener\n"
        f"listener = UnixListener.bind(pathlib.Path({str(path)!r}), mode=0o600, backlog=1)\n"
        "print('bound', flush=True); sys.stdin.read()\n"
    )
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for _ in range(4)
    ]  # fmt: skip
    try:
        lines = []
        for start in starts:
            assert start.stdout is not None
            lines.append(start.stdout.readline())
        assert sorted(lines) == [b"", b"", b"", b"bound\n"]
    finally:
        for start in starts:
            start.communicate()


def test_a_server_may_listen_on_both_and_on_either(tmp_path: Path) -> None:
    def bound(*, tcp: bool, uds: bool) -> Listeners:
        return Listeners.bind(
            address=("127.0.0.1", 0) if tcp else None,
            uds=str(tmp_path / "socket") if uds else None,
            uds_mode=0o600,
            mode="reuseport",
            frontends=2,
            backlog=16,
        )

    both = bound(tcp=True, uds=True)
    assert [each.family for each in both.sockets_for(1)] == [socket.AF_INET, socket.AF_UNIX]
    assert both.url("https").startswith("https://127.0.0.1:")
    both.close()
    only = bound(tcp=False, uds=True)
    assert [each.family for each in only.sockets_for(0)] == [socket.AF_UNIX]
    assert only.url("https") == f"unix:{tmp_path / 'socket'}:"
    only.close()
    port = bound(tcp=True, uds=False)
    assert len(port.sockets_for(0)) == 1
    port.close()


def test_a_unix_socket_that_cannot_be_frees_the_port(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"server\.uds"):
            Listeners.bind(
                address=("127.0.0.1", port),
                uds=str(tmp_path),
                uds_mode=0o600,
                mode="shared",
                frontends=1,
                backlog=1,
            )
