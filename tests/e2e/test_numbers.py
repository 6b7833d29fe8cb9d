"""Faults that other servers have shown with hundreds of clients, and not with one."""

from __future__ import annotations

import contextlib
import signal
import time
from functools import partial

import psutil

from tests.e2e.harness import Server, wait_until
from tests.e2e.wire import Wire, in_parallel

EXIT_ENGINE_DEAD = 70
TOLD_WITHIN_S = 5.0
NUM_REQUESTS = 4000
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def told(wire: Wire) -> None:
    """By a status, or by the last event of a stream: never by a cut."""
    if wire.read_head() == 200:
        *_, last = wire.blocks()
        assert '"type":"engine_dead"' in last, last
    else:
        assert (wire.status, wire.headers["retry-after"]) == (503, "5")


def test_each_of_three_hundred_hears_that_the_engine_was_killed() -> None:
    """On every acceptor: a hundred in their streams, a hundred that wait for whole answers, and a
    hundred in the queue."""
    acceptors, each = 8, 100
    with (
        Server(
            "--engine", "sim", "--frontends", str(acceptors), "--sim-step-ms", "20",
            "--sim-max-batch-size", str(2 * each), "--engine-max-seq-len", "8192",
        ) as server,
        contextlib.ExitStack() as stack,
    ):  # fmt: skip

        def ask(*, stream: bool) -> Wire:
            wire = stack.enter_context(Wire(server.port))
            return wire.complete(stream=stream, max_tokens=8000)

        streams = [ask(stream=True) for _ in range(each)]
        whole = [ask(stream=False) for _ in range(each)]
        wait_until(lambda: server.get("/health")[1]["num_running"] == 2 * each)
        queued = [ask(stream=n % 2 == 0) for n in range(each)]
        wait_until(lambda: server.get("/health")[1]["num_waiting"] == each)
        held = [
            sum(
                connection.status == psutil.CONN_ESTABLISHED
                for connection in server.find(f"acceptor {lane}").net_connections("tcp")
            )
            for lane in range(acceptors)
        ]
        assert min(held) > 0, held
        server.find("engine").send_signal(signal.SIGKILL)
        began_s = time.monotonic()
        in_parallel(*(partial(told, wire) for wire in [*streams, *whole, *queued]))
        assert time.monotonic() - began_s < TOLD_WITHIN_S
        stack.close()
        assert server.wait_exit(deadline_s=10.0) == EXIT_ENGINE_DEAD


def test_a_thousand_probes_at_once_ask_nothing_of_the_engine() -> None:
    with (
        Server("--engine", "sim", "--frontends", "2") as server,
        contextlib.ExitStack() as stack,
    ):
        wires = [stack.enter_context(Wire(server.port)) for _ in range(1000)]
        for wire in wires:
            wire.socket.sendall(GET)
        for wire in wires:
            answer = wire.read_json()
            assert (wire.status, answer["status"]) == (200, "ready")
            assert (answer["num_running"], answer["num_waiting"]) == (0, 0)
        with Wire(server.port) as wire:
            assert wire.complete([300, 301], max_tokens=2).read_json()["usage"]["total_tokens"] > 2


def test_memory_does_not_grow_with_the_requests_that_were_answered() -> None:
    """Of every way to end: whole, streamed, refused, and given up by its client."""

    def run(server: Server, number: int) -> None:
        def ask() -> None:
            with Wire(server.port) as wire:
                for count in range(number // 8):
                    if count % 4 == 0:
                        wire.complete([300, 301], stream=True, n=2).chunks()
                    elif count % 4 == 1:
                        wire.complete(max_tokens=-1).read_json()
                    elif count % 4 == 2:
                        with Wire(server.port) as leaves:
                            leaves.complete([300] * 50, stream=True).read_head()
                    else:
                        wire.complete([300, 301]).read_json()

        in_parallel(*[ask] * 8)
        wait_until(lambda: server.num_in_engine() == 0)

    def rss_bytes(server: Server) -> dict[str, int]:
        return {name: server.find(name).memory_info().rss for name in ("acceptor 0", "engine")}

    with Server("--engine", "sim", "--frontends", "1", "--sim-step-ms", "1") as server:
        run(server, NUM_REQUESTS)
        before = rss_bytes(server)
        run(server, NUM_REQUESTS)
        for name, now in rss_bytes(server).items():
            # The allocator's last pages. What is known of a request takes thousands of bytes.
            assert (now - before[name]) / NUM_REQUESTS < 500, name
