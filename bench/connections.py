"""What a connection costs an acceptor in memory, by what it does.

    python bench/connections.py [--connections 5000] [-- --FLAG VALUE ...]

Starts a server with one acceptor and the sim engine, opens connections of one kind at a time, and
prints the KiB of private memory (USS) that the acceptor has grown by for each. What the kernel
holds for a socket is not in it. Flags after -- go to the server.

The bound, whatever clients do, is for each connection: http.header_bytes_max, twice
http.body_bytes_max (a body is copied once, when it is whole), http.read_buffer_bytes_max and
http.write_buffer_bytes_max, and about 16 KiB of objects; connections are bounded by
http.connections_max, and all bodies on their way together by http.bodies_bytes_max.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

GET = b"GET /health HTTP/1.1\r\nHost: bench\r\n\r\n"
BODY = b'{"prompt":[1],"max_tokens":4000,"stream":true}'
STREAM = (
    b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
SLOW_HEAD = b"GET /health HTTP/1.1\r\nHost: bench\r\nX-Slow: "
LARGE_HEAD = SLOW_HEAD + b"a\r\n" + b"".join(b"X-%d: %b\r\n" % (n, b"v" * 600) for n in range(90))
SLOW_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    b"Content-Length: 60000\r\n\r\n" + b" " * 30_000
)
SETTLE_S = 1.0
WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`request` is sent on each connection; `answered`: and some answer read."""

    name: str
    request: bytes
    answered: bool
    tls: bool = False
    share: float = 1.0


KINDS = (
    Kind(name="silent: nothing sent yet", request=b"", answered=False),
    Kind(name="idle: between requests", request=GET, answered=True),
    Kind(name="slow: a head that does not end", request=SLOW_HEAD, answered=False),
    Kind(name="slow: 56 KiB of head", request=LARGE_HEAD, answered=False),
    Kind(name="slow: 29 KiB of body", request=SLOW_BODY, answered=False),
    Kind(name="streaming", request=STREAM, answered=True),
    Kind(name="idle over TLS", request=GET, answered=True, tls=True, share=0.2),
)


def main() -> None:
    """Print a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = min(arguments.connections, hard - 200)
    if most < arguments.connections:
        print(f"only {most} connections: RLIMIT_NOFILE is {hard}")
    print(f"{'connection':<34}{'count':>8}{'KiB each':>10}{'acceptor MiB':>14}")
    for kind in KINDS:
        count = int(most * kind.share)
        with tempfile.TemporaryDirectory() as folder:
            grown_bytes, uss_bytes = measure(kind, count, Path(folder), arguments.flags)
        each_kib, whole_mib = grown_bytes / count / 1024, uss_bytes / 2**20
        print(f"{kind.name:<34}{count:>8}{each_kib:>10.1f}{whole_mib:>14.1f}", flush=True)


def measure(kind: Kind, count: int, folder: Path, flags: list[str]) -> tuple[int, int]:
    """Bytes that an acceptor grows by for `count` connections, and what it has then."""
    with serving(kind, count, folder, flags) as (port, acceptor):
        # Once, so that what is made for the first of its kind is there.
        with opened(kind, 50, port):
            time.sleep(SETTLE_S)
        time.sleep(SETTLE_S)
        before_bytes = acceptor.memory_full_info().uss
        with opened(kind, count, port):
            uss_bytes = settled_uss_bytes(acceptor)
            held = len(acceptor.net_connections("tcp")) - 1
            assert held >= count, f"the acceptor holds {held} of {count} connections"
        return uss_bytes - before_bytes, uss_bytes


def settled_uss_bytes(process: psutil.Process) -> int:
    """Its private memory once that changes no more: everything sent has been read."""
    deadline_s = time.monotonic() + WAIT_S
    before_bytes = 0
    while True:
        time.sleep(SETTLE_S)
        uss_bytes = int(process.memory_full_info().uss)
        if abs(uss_bytes - before_bytes) < 1 << 18 or time.monotonic() > deadline_s:
            return uss_bytes
        before_bytes = uss_bytes


@contextlib.contextmanager
def serving(
    kind: Kind, count: int, folder: Path, flags: list[str]
) -> Iterator[tuple[int, psutil.Process]]:
    """A server on a free port, and its acceptor."""
    port_file = folder / "port"
    slow = str(WAIT_S * 3)
    command = [
        sys.executable, "-m", "fastserve", "--engine", "sim", "--frontends", "1", "--port", "0",
        "--port-file", str(port_file), "--log-level", "warning", "--sim-step-ms", "1000",
        "--sim-max-batch-size", "65536", "--limits-requests-in-flight-max", str(count + 100),
        "--http-connections-max", str(count + 100), "--http-first-byte-timeout-s", slow,
        "--http-header-timeout-s", slow, "--http-body-timeout-s", slow, *flags,
    ]  # fmt: skip
    if kind.tls:
        command += certificate(folder)
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert b"ready" in server.stdout.readline(), "the server did not become ready"
        [acceptor] = [
            child
            for child in psutil.Process(server.pid).children()
            if "acceptor" in " ".join(child.cmdline())
        ]
        yield int(port_file.read_text()), acceptor
    finally:
        # Twice: the streams need not finish.
        server.send_signal(signal.SIGTERM)
        server.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.send_signal(signal.SIGTERM)
        server.wait(WAIT_S)


def certificate(folder: Path) -> list[str]:
    """Flags for a certificate made on the spot."""
    chain, key = folder / "chain.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-noenc", "-keyout", str(key), "-out", str(chain), "-days", "2", "-subj", "/CN=bench",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return ["--tls-certificate", str(chain), "--tls-key", str(key)]


@contextlib.contextmanager
def opened(kind: Kind, count: int, port: int) -> Iterator[None]:
    """`count` connections that have done what their kind does, open within the context."""
    clients: list[socket.socket] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        for number in range(count):
            client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
            if kind.tls:
                client = context.wrap_socket(client)
            clients.append(client)
            client.sendall(kind.request)
            # Not faster than the server can take them in.
            if number % 100 == 99:
                time.sleep(0.02)
        if kind.answered:
            wait_for_answers(clients)
        yield
    finally:
        for client in clients:
            client.close()


def wait_for_answers(clients: list[socket.socket]) -> None:
    """Wait until each connection has been sent something; it is read, and no more is."""
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client, selectors.EVENT_READ)
        deadline_s = time.monotonic() + WAIT_S
        while selector.get_map():
            assert time.monotonic() < deadline_s, f"{len(selector.get_map())} have no answer"
            for key, _ in selector.select(1.0):
                assert isinstance(key.fileobj, socket.socket)
                assert key.fileobj.recv(4096), "a connection was closed"
                selector.unregister(key.fileobj)


if __name__ == "__main__":
    main()
