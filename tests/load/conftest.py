"""A server that answers as it is told, and a short load on it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from fastserve.load.plan import Plan, Request, Send, target_of
from fastserve.load.run import Result, run
from tests.load.answers import Answering, AnsweringHandler, AnsweringServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@pytest.fixture
def answering() -> Iterator[tuple[Answering, int]]:
    """What the server is told, and its port."""
    with AnsweringServer(("127.0.0.1", 0), AnsweringHandler) as server:
        server.answering = Answering()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.answering, server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def load(answering: tuple[Answering, int]) -> Callable[..., Result]:
    """Put a short load on the server."""

    def put(
        *,
        expected_chunks: int = 0,
        sends: Sequence[Send] = (),
        connections: int = 2,
        window_s: float = 0.3,
        drain_s: float = 5.0,
        processes: int = 1,
    ) -> Result:
        plan = Plan(
            target=target_of(f"http://127.0.0.1:{answering[1]}"),
            requests=(Request(body=b'{"n": 1}', expected_chunks=expected_chunks),),
            sends=tuple(sends),
            connections=connections,
            warm_s=0.0,
            window_s=window_s,
            drain_s=drain_s,
        )
        return run(plan, processes=processes)

    return put
