"""How connections spread over acceptors that share a socket, and what a stopped one costs."""

from __future__ import annotations

import concurrent.futures
import http.client
import os
import time

import psutil
import pytest

from tests.e2e.harness import Server, wait_until

FRONTENDS = 4
SIM = ("--engine", "sim", "--frontends", str(FRONTENDS))


def connect(server: Server) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/version")
    assert connection.getresponse().read()
    return connection


def held(server: Server, *, frontends: int = FRONTENDS) -> list[int]:
    """How many clients each acceptor has."""
    return [
        sum(
            each.status == psutil.CONN_ESTABLISHED
            for each in server.find(f"acceptor {lane}").net_connections("tcp")
        )
        for lane in range(frontends)
    ]


@pytest.mark.parametrize("at_once", [1, 16])
def test_keep_alive_connections_are_shared_evenly(at_once: int) -> None:
    with Server(*SIM) as server:
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            connections = list(pool.map(lambda _: connect(server), range(64)))
        spread = held(server)
        assert sum(spread) == 64
        # A sixteenth more than the least loaded is no imbalance; two racing acceptors make one.
        assert max(spread) - min(spread) <= 2, spread
        for connection in connections:
            connection.close()


def test_many_that_come_one_after_the_other_are_shared_evenly() -> None:
    """Whoever is woken each time must not take one in five just because it was woken."""
    with Server("--engine", "sim", "--frontends", "8") as server:
        wait_until(lambda: len(server.remember_processes()) >= 10)
        one_core = [min(os.sched_getaffinity(0))]  # so that one is woken before another can take it
        for process in server.remember_processes().values():
            process.cpu_affinity(one_core)
        connections = [connect(server) for _ in range(800)]
        spread = held(server, frontends=8)
        assert sum(spread) == 800
        # A sixteenth is no imbalance, and what a busy machine adds to it.
        assert max(spread) < 125, spread
        for connection in connections:
            connection.close()


def test_places_that_become_free_are_filled_first() -> None:
    with Server(*SIM) as server:
        connections = [connect(server) for _ in range(24)]
        by_acceptor = held(server)
        assert by_acceptor == [6, 6, 6, 6]
        for connection in connections[:12]:
            connection.close()
        wait_until(lambda: sum(held(server)) == 12)
        connections += [connect(server) for _ in range(12)]
        assert held(server) == [6, 6, 6, 6]
        for connection in connections:
            connection.close()


def test_a_stopped_acceptor_takes_no_connection_from_the_others() -> None:
    with Server(*SIM) as server:
        connections = [connect(server) for _ in range(8)]
        stopped = server.find("acceptor 2")
        stopped.suspend()
        try:
            began_s = time.monotonic()
            connections += [connect(server) for _ in range(12)]
            assert time.monotonic() - began_s < 5
        finally:
            stopped.resume()
        for connection in connections:
            connection.close()


def test_a_separate_socket_each_serves_everyone() -> None:
    with Server(*SIM, "--accept", "reuseport") as server:
        connections = [connect(server) for _ in range(40)]
        spread = held(server)
        assert sum(spread) == 40
        assert min(spread) > 0, spread  # 4 * 0.75**40 that one has none: 4 in 100,000
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("accept", ["shared", "reuseport"])
def test_those_in_the_queue_of_a_dead_acceptor_wait_for_its_successor(accept: str) -> None:
    with Server("--engine", "sim", "--frontends", "1", "--accept", accept) as server:
        victim = server.find("acceptor 0")
        victim.suspend()
        wait_until(lambda: victim.status() == psutil.STATUS_STOPPED)
        clients = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=30) for _ in "1234"]
        for client in clients:
            client.request("GET", "/version")
        victim.kill()
        for client in clients:
            assert client.getresponse().status == 200
            client.close()
