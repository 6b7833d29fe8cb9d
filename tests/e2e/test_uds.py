"""A Unix socket beside the port, and instead of it."""

from __future__ import annotations

import importlib
import shutil
import signal
import socket
import stat
from typing import TYPE_CHECKING

import openai
import orjson
import pytest

from tests.authority import self_signed
from tests.e2e.harness import DEADLINE_S, Server, failing, wait_until

if TYPE_CHECKING:
    from pathlib import Path

SIM = ("--engine", "sim", "--sim-step-ms", "2", "--served-model-name", "m")


def ask(path: Path, request: bytes) -> bytes:
    """Send a request that closes, and read to the end."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_S)
        client.connect(str(path))
        client.sendall(request)
        parts = []
        while part := client.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def get(path: Path, target: str) -> tuple[int, bytes]:
    answer = ask(path, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def stream(path: Path, *, max_tokens: int) -> bytes:
    body = orjson.dumps({"model": "m", "prompt": "a", "max_tokens": max_tokens, "stream": True})
    fields = b"Host: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\n" + fields
    return ask(path, head % len(body) + body)


@pytest.mark.parametrize("accept", ["shared", "reuseport"])
def test_beside_the_port(accept: str, tmp_path: Path) -> None:
    path = tmp_path / "fs.sock"
    with Server(
        *SIM, "--uds", str(path), "--uds-mode", "0660", "--accept", accept, "--api-key", "k"
    ) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        for _ in range(8):
            assert get(path, "/health")[0] == 200
            assert server.get("/health")[0] == 200
        # Keys hold here, too.
        assert get(path, "/v1/models")[0] == 401
        assert b" 401 " in stream(path, max_tokens=5).partition(b"\r\n")[0]
    assert not path.exists()


def test_instead_of_the_port(tmp_path: Path) -> None:
    """Also in the clear where a port would speak TLS."""
    path = tmp_path / "fs.sock"
    issued = self_signed(tmp_path, "server")
    with Server(
        *SIM, "--uds", str(path), "--no-tcp", "--port-file", "",
        "--tls-certificate", str(issued.certificate), "--tls-key", str(issued.key),
    ) as server:  # fmt: skip
        assert f"unix:{path}:/v1" in server.stdout
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        answer = stream(path, max_tokens=20)
        assert answer.count(b"data: {") == 21
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        for process in server.remember_processes().values():
            assert not [each for each in process.net_connections("tcp") if each.laddr]
    assert not path.exists()


def test_a_stale_socket_is_replaced_and_a_live_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "fs.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with Server(*SIM, "--uds", str(path), "--frontends", "1"):
        openais_client_speaks_to_it(path)
        with failing(*SIM, "--uds", str(path)) as second:
            assert second.wait_exit() == 2
            assert f"server.uds: {path} is in use by another server" in second.log
        assert get(path, "/health")[0] == 200
    assert not path.exists()


def openais_client_speaks_to_it(path: Path) -> None:
    # Whichever httpx openai is built on.
    httpx = importlib.import_module(openai.DefaultHttpxClient.__mro__[2].__module__.split(".")[0])
    http_client = openai.DefaultHttpxClient(transport=httpx.HTTPTransport(uds=str(path)))
    with openai.OpenAI(
        base_url="http://server/v1", api_key="none", http_client=http_client
    ) as client:
        chunks = list(client.completions.create(model="m", prompt="a", max_tokens=5, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_killed_servers_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "fs.sock"
    with failing(*SIM, "--uds", str(path)) as server:
        server.wait_ready()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        assert path.exists()
        server.port_file.unlink()
        wait_until(lambda: not server._alive())
        for each in server.run_parent.iterdir():  # the next server's to sweep, elsewhere tested
            shutil.rmtree(each)
    with Server(*SIM, "--uds", str(path)):
        assert get(path, "/health")[0] == 200
    assert not path.exists()


def test_a_file_that_is_no_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with failing(*SIM, "--uds", str(path)) as server:
        assert server.wait_exit() == 2
        assert "server.uds" in server.log
    assert path.read_text() == "data"
