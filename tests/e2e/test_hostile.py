"""Slow and hostile clients: they get what they deserve, and everyone else's tokens keep coming."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import DEADLINE_S, Server, wait_until
from tests.e2e.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psutil

STEP_MS = 5
# A stream's tokens come every STEP_MS. On a busy machine with two cores an attack may delay some;
# what must not be is that they wait for the attacker, whose patience is measured in seconds.
GAP_S_MAX = 0.75
TIMEOUT_S = 2.0
SIM = (
    "--engine", "sim", "--sim-step-ms", str(STEP_MS), "--served-model-name", "m",
    "--lane-heartbeat-interval-s", "0.05", "--log-level", "warning",
)  # fmt: skip
FLAGS = (
    *SIM, "--frontends", "1", "--http-header-timeout-s", str(TIMEOUT_S),
    "--http-body-timeout-s", str(TIMEOUT_S), "--http-write-stall-timeout-s", str(TIMEOUT_S),
    "--http-first-byte-timeout-s", "3",
)  # fmt: skip
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*FLAGS) as server:
        yield server


@contextlib.contextmanager
def bystander(server: Server, *, max_tokens: int = 100) -> Iterator[None]:
    """Streams that run during the attack; their tokens must keep coming, and come in full."""
    stop = threading.Event()
    gaps_s = [0.0]
    began = threading.Event()
    failure: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                with Wire(server.port).complete(stream=True, max_tokens=max_tokens) as wire:
                    wire.read_head()
                    began.set()
                    tokens = 0
                    before_s = time.monotonic()
                    for block in wire.blocks():
                        now_s = time.monotonic()
                        gaps_s.append(now_s - before_s)
                        before_s = now_s
                        tokens += '"text"' in block
                    assert tokens == max_tokens + 1, "all of them, and the finish"
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: began.is_set() or failure)
    try:
        yield
    finally:
        stop.set()
        thread.join(DEADLINE_S)
    assert not thread.is_alive(), "the stream hangs"
    assert not failure, failure
    assert max(gaps_s) < GAP_S_MAX, f"a token came {max(gaps_s):.3f} s after the one before"


def connect(server: Server) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def read_all(client: socket.socket) -> bytes:
    """What comes until the server closes, be it by a reset."""
    parts: list[bytes] = []
    with client, contextlib.suppress(ConnectionResetError):
        while part := client.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def post(body: bytes) -> bytes:
    fields = b"Host: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    return b"POST /v1/completions HTTP/1.1\r\n" + fields + b"\r\n" + body


def completion(**fields: Any) -> bytes:
    return post(json.dumps({"model": "m", "prompt": "a"} | fields).encode())


def acceptor(server: Server, lane: int = 0) -> psutil.Process:
    return server.find(f"acceptor {lane}")


def rss_mib(server: Server) -> float:
    return float(acceptor(server).memory_info().rss / 2**20)


# ---- slow senders


@pytest.mark.parametrize(
    "beginning",
    [GET[:20], post(b"{}" + b" " * 1000)[:-500]],
    ids=["a head that does not end", "a body that does not"],
)
def test_slow_senders_are_told_so(server: Server, beginning: bytes) -> None:
    with bystander(server):
        began_s = time.monotonic()
        clients = [connect(server) for _ in range(100)]
        for client in clients:
            client.sendall(beginning)
        while time.monotonic() < began_s + TIMEOUT_S * 0.8:
            for client in clients:
                client.send(b"x")
            time.sleep(0.2)
        for client in clients:
            answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 408 "), answer[:50]
            assert b"Connection: close" in answer
        assert time.monotonic() - began_s < TIMEOUT_S + 8


def test_a_request_in_single_bytes_is_a_request(server: Server) -> None:
    with bystander(server), connect(server) as client:
        for byte in completion(max_tokens=2):
            client.send(bytes([byte]))
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_who_says_nothing_is_closed_without_a_word(server: Server) -> None:
    client = connect(server)
    began_s = time.monotonic()
    assert read_all(client) == b""
    assert 2 < time.monotonic() - began_s < 13


# ---- slow readers


def test_a_stream_read_in_single_bytes_is_whole(server: Server) -> None:
    with bystander(server), Wire(server.port, receive_bytes=1) as wire:
        wire.complete(stream=True, max_tokens=30)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += wire.socket.recv(1)
        assert data.count(b'"text"') >= 2  # merged where the reader was slow
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_readers_that_stop_are_aborted_and_cost_little(server: Server) -> None:
    """Their kernel's buffers fill, then ours up to the high water, then they are dropped."""
    before_mib = rss_mib(server)
    with bystander(server):
        wires = [
            # Many choices with long texts fill the buffers within the test's time.
            Wire(server.port, receive_bytes=1).complete(
                stream=True,
                max_tokens=8000,
                n=8,
                logprobs=5,
                stream_options={"include_usage": True},
            )
            for _ in range(8)
        ]
        wait_until(lambda: server.num_in_engine() > 8)
        # Only the bystander's is left in the end.
        wait_until(lambda: server.num_in_engine() <= 1, deadline_s=50.0)
        assert rss_mib(server) - before_mib < 32
        for wire in wires:
            wire.close()


def test_who_pipelines_and_does_not_read_is_held_back(server: Server) -> None:
    """100,000 requests in one go: read on only as answers are taken, then all are answered."""
    before_mib = rss_mib(server)
    count = 20_000
    with bystander(server):
        client = connect(server)
        client.setblocking(False)
        left = memoryview(GET * count)
        received = 0
        held_bytes = 0
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ | selectors.EVENT_WRITE)
            # Until nothing more is taken.
            while left:
                if not [1 for _, events in selector.select(0.5) if events & selectors.EVENT_WRITE]:
                    break
                with contextlib.suppress(BlockingIOError):
                    left = left[client.send(left) :]
            held_bytes = len(GET) * count - len(left)
            assert rss_mib(server) - before_mib < 16, held_bytes
            deadline_s = time.monotonic() + DEADLINE_S
            tail = b""
            while received < count:
                assert time.monotonic() < deadline_s, f"{received} answers"
                for _, events in selector.select(1.0):
                    if events & selectors.EVENT_READ:
                        data = tail + client.recv(1 << 20)
                        received += data.count(b"HTTP/1.1 200 OK")
                        tail = data[-14:]
                    if events & selectors.EVENT_WRITE and left:
                        with contextlib.suppress(BlockingIOError):
                            left = left[client.send(left) :]
        client.close()


# ---- large and deep


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 100_000 + b"\r\n", 431),
        (post(b"[" * (2 << 20) + b"]" * (2 << 20)), 400),
        (post(b'{"a":' * (1 << 19) + b"1" + b"}" * (1 << 19)), 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10737418240\r\n\r\n", 413),
    ],
    ids=["a target of 1 MB", "a header of 1 MB", "100,000 headers", "deep lists", "deep objects",
         "a body of 10 GB"],
)  # fmt: skip
def test_what_is_too_large_or_too_deep_is_refused(
    server: Server, request_: bytes, status: int
) -> None:
    before_mib = rss_mib(server)
    with bystander(server):
        for _ in range(5):
            client = connect(server)
            with contextlib.suppress(OSError):
                client.sendall(request_)
            assert client.recv(100).startswith(b"HTTP/1.1 %d " % status)
            client.close()
    assert rss_mib(server) - before_mib < 64
    assert "raceback" not in server.log


def test_a_header_of_50_mb_is_not_read_to_its_end(server: Server) -> None:
    """D-02. What comes behind the refusal is dropped, for two seconds at most."""
    before_mib = rss_mib(server)
    with bystander(server):
        client = connect(server)
        with contextlib.suppress(OSError):
            client.sendall(b"GET / HTTP/1.1\r\nX: ")
            for _ in range(50):
                client.sendall(b"a" * (1 << 20))
        client.close()
    assert rss_mib(server) - before_mib < 16


# ---- too many


def open_silent(server: Server, count: int) -> list[socket.socket]:
    clients = []
    for number in range(count):
        clients.append(connect(server))
        if number % 200 == 199:
            time.sleep(0.02)  # lest the queue of SYNs overflow, which would be the kernel's doing
    return clients


def test_ten_thousand_that_say_nothing_disturb_nobody() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with Server(*SIM, "--frontends", "2", "--http-first-byte-timeout-s", "4") as server:
            for lane in range(2):
                assert acceptor(server, lane).rlimit(resource.RLIMIT_NOFILE)[0] == hard
            before_mib = rss_mib(server)
            with bystander(server):
                clients = open_silent(server, count)
                grown_mib = rss_mib(server) - before_mib
                assert server.get("/health")[0] == 200
                # About 2.5 KiB each; the bound is generous.
                assert grown_mib < count / 2 * 10 / 1024, f"{grown_mib:.0f} MiB"
                assert read_all(clients[-1]) == b"", "all are closed in the end"
            for client in clients:
                client.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_too_many_is_told_so_at_once() -> None:
    """Also where nobody sends a request; and the places that become free are given away again."""
    most, refused_most = 20, 5
    with Server(
        *SIM, "--frontends", "1", "--http-connections-max", str(most),
        "--http-connections-refused-max", str(refused_most), "--http-first-byte-timeout-s", "60",
    ) as server:  # fmt: skip
        clients = [connect(server) for _ in range(most)]
        wait_until(lambda: len(acceptor(server).net_connections("tcp")) > most)
        for _ in range(3):
            answer = read_all(connect(server))  # having sent nothing at all
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: 1\r\n" in answer
            assert b"Connection: close\r\n" in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        flood = [connect(server) for _ in range(50)]
        wait_until(lambda: len(acceptor(server).net_connections("tcp")) <= most + refused_most + 1)
        for client in flood:
            assert read_all(client)[:13] in (b"HTTP/1.1 503 ", b"")
        # Those that are in are served all the same.
        clients[0].sendall(GET)
        assert clients[0].recv(100).startswith(b"HTTP/1.1 200 ")
        clients.pop().close()
        wait_until(lambda: served(server))
        for client in clients:
            client.close()


def served(server: Server) -> bool:
    with connect(server) as client:
        with contextlib.suppress(OSError):
            client.sendall(GET)
        return client.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("accept", ["shared", "reuseport"])
def test_out_of_descriptors_it_waits_and_serves_on(accept: str) -> None:
    with Server(*SIM, "--frontends", "1", "--accept", accept) as server:
        process = acceptor(server)
        # One stream for all of the time: another one would have to be accepted first.
        with bystander(server, max_tokens=700):
            limits = process.rlimit(resource.RLIMIT_NOFILE)
            free = 10
            process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + free, limits[1]))
            clients = [connect(server) for _ in range(free * 3)]
            wait_until(lambda: "cannot accept" in server.log)
            # It does not spin: a stream of 200 tokens a second is all that it has to do.
            used_s = cpu_s(process)
            time.sleep(1.5)
            assert cpu_s(process) - used_s < 0.9
            # As places become free, those that wait are served.
            for client in clients[: free * 2]:
                client.close()
            last = clients[-1]
            last.sendall(GET)
            assert last.recv(100).startswith(b"HTTP/1.1 200 ")
            for client in clients:
                client.close()
            process.rlimit(resource.RLIMIT_NOFILE, limits)
        assert server.get("/health")[0] == 200
        assert server.log.count("cannot accept") < 20


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# ---- ends


def test_idle_connections_do_not_hold_up_the_end() -> None:
    """G-10: 50 of them, and SIGTERM."""
    with Server(*SIM, "--frontends", "2", "--http-requests-per-connection-max", "3") as server:
        clients = [connect(server) for _ in range(50)]
        for client in clients:
            client.sendall(GET)
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        # A limit of requests is announced with the last of them.
        clients[0].sendall(GET + GET)
        assert read_all(clients.pop(0)).count(b"Connection: close\r\n") == 1
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for client in clients:
            assert read_all(client) == b""
        assert time.monotonic() - began_s < 2
        assert server.wait_exit(deadline_s=10.0) == 0
        assert time.monotonic() - began_s < 5


# ---- hosts that vanish

CLIENT = """
import socket, sys, time
client = socket.create_connection((sys.argv[1], int(sys.argv[2])))
client.sendall(bytes.fromhex(sys.argv[3]))
if sys.argv[4] == "stream":
    client.recv(4096)
print("connected", flush=True)
time.sleep(60)
"""
# A network of its own for each process: tests may run side by side.
HOST, GUEST = (f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}.{each}" for each in (1, 2))


@contextlib.contextmanager
def another_host() -> Iterator[tuple[str, Callable[[], None]]]:
    """A network namespace on a wire of its own, and what cuts the wire. Skips without rights."""
    name = f"fs{os.getpid() % 100_000}"
    link = f"{name}h"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespaces here")
    try:
        try:
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("addr", "add", f"{HOST}/24", "dev", link)
            ip("link", "set", link, "up")
            ip("-n", name, "addr", "add", f"{GUEST}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no virtual wire here: {error.stderr.decode().strip()}")
        # The far end: the near one going down would be an error of ours, and not a silence.
        yield name, lambda: ip("-n", name, "link", "set", "eth0", "down")
    finally:
        subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.parametrize("phase", ["stream", "waiting"])
def test_a_host_that_vanishes_is_missed(phase: str) -> None:
    """E-14: no FIN, no reset, nothing; only TCP itself can find out."""
    with another_host() as (namespace, vanish), Server(*FLAGS, "--host", "0.0.0.0") as server:
        delay = {"sim": {"delay_ms": 60_000}} if phase == "waiting" else {}
        request_ = completion(max_tokens=8000, stream=phase == "stream", **delay)
        client = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", CLIENT,
             HOST, str(server.port), request_.hex(), phase],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == b"connected\n"
            wait_until(lambda: server.num_in_engine() == 1)
            vanish()
            wait_until(lambda: server.num_in_engine() == 0, deadline_s=TIMEOUT_S + 10)
        finally:
            client.kill()
            client.communicate()
