"""Clients that go away: whatever they waited for is forgotten, and its place is free at once."""

from __future__ import annotations

import contextlib
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import Server, wait_until
from tests.e2e.scripted import assert_settled, tokens
from tests.e2e.wire import Wire, in_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
CLOSE_OR_RESET = pytest.mark.parametrize("how", ["close", "reset"])

REQUESTS_IN_FLIGHT_MAX = 6
# What is asked for would take far longer than any of the waits in these tests.
LONG: dict[str, Any] = {"max_tokens": 8000}
PREFILL_TOKENS_PER_S = 500
LONG_PROMPT = [9] * 5000
# The aim is 0.1 s. This is for machines that are busy with something else.
GONE_WITHIN_S = 5.0
FREE_WITHIN_S = 1.0


@pytest.fixture(scope="module", autouse=True)
def both_stay_in_order(sim: Server, narrow: Server) -> Iterator[None]:
    yield
    assert_settled(sim)
    assert_settled(narrow)


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """An engine that runs one request at a time, and reads prompts slowly."""
    with Server(
        "--frontends", "1", "--engine", "sim", "--sim-step-ms", "2",
        "--sim-max-batch-size", "1",
        "--sim-prefill-tokens-per-s", str(PREFILL_TOKENS_PER_S),
        "--lane-heartbeat-interval-s", "0.05",
        "--limits-requests-in-flight-max", str(REQUESTS_IN_FLIGHT_MAX),
    ) as server:  # fmt: skip
        yield server


@CLOSE_OR_RESET
@STREAM_OR_WHOLE
def test_in_decode(sim: Server, how: str, *, stream: bool) -> None:
    wire = Wire(sim.port).complete(stream=stream, **LONG)
    _expect_in_engine(sim, 1)
    if stream:
        wire.read_head()
        for _ in range(3):
            assert wire.read_chunk()
    _go(wire, how)
    _expect_in_engine(sim, 0)


@CLOSE_OR_RESET
@STREAM_OR_WHOLE
def test_in_prefill(narrow: Server, how: str, *, stream: bool) -> None:
    wire = Wire(narrow.port).complete(prompt=LONG_PROMPT, stream=stream, max_tokens=8)
    _expect_in_engine(narrow, 1)
    _go(wire, how)
    _expect_in_engine(narrow, 0)


@CLOSE_OR_RESET
@STREAM_OR_WHOLE
def test_in_the_queue(narrow: Server, how: str, *, stream: bool) -> None:
    with Wire(narrow.port).complete(stream=True, **LONG):
        _expect_in_engine(narrow, 1)
        wire = Wire(narrow.port).complete(stream=stream, **LONG)
        _expect_in_engine(narrow, 2)
        _go(wire, how)
        _expect_in_engine(narrow, 1)
    _expect_in_engine(narrow, 0)


@CLOSE_OR_RESET
@STREAM_OR_WHOLE
def test_the_place_is_free_at_once(narrow: Server, how: str, *, stream: bool) -> None:
    """Measured by the next in the queue, whose first token comes as soon as there is room."""
    took_s = []
    for _ in range(5):
        wire = Wire(narrow.port).complete(stream=stream, **LONG)
        if stream:
            wire.read_head()
        _expect_in_engine(narrow, 1)
        with Wire(narrow.port).complete(stream=True, max_tokens=1) as following:
            _expect_in_engine(narrow, 2)
            _go(wire, how)
            began_s = time.monotonic()
            following.read_head()
            took_s.append(time.monotonic() - began_s)
            assert following.read_chunk()
    assert min(took_s) < FREE_WITHIN_S, took_s


def test_who_left_the_queue_never_starts(narrow: Server) -> None:
    with Wire(narrow.port).complete(stream=True, **LONG) as running:
        _expect_in_engine(narrow, 1)
        gone = [Wire(narrow.port).complete(stream=True, **LONG) for _ in range(4)]
        _expect_in_engine(narrow, 5)
        with Wire(narrow.port).complete(tokens("a", "b"), stream=True) as patient:
            _expect_in_engine(narrow, 6)
            for wire in gone:
                wire.close()
            _expect_in_engine(narrow, 2)
            running.close()
            # The four would have taken more than a minute.
            assert patient.text() == "ab"
    # The one that ran, and those that never did.
    left = [line for line in narrow.log.splitlines() if "status=499" in line][-5:]
    assert sum(" tokens=0 " in line for line in left) == 4


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("options", "num_requests"),
    [({"n": 4}, 4), ({"prompt": ["a", "b"], "n": 2}, 4), ({"prompt": [[7], [8], [9]]}, 3)],
    ids=["n", "prompts and n", "prompts"],
)
def test_every_choice_is_forgotten(
    sim: Server, options: dict[str, Any], num_requests: int, *, stream: bool
) -> None:
    wire = Wire(sim.port).complete(stream=stream, **LONG | options)
    _expect_in_engine(sim, num_requests)
    wire.close()
    _expect_in_engine(sim, 0)


@STREAM_OR_WHOLE
def test_who_has_only_finished_sending_gets_the_answer(sim: Server, *, stream: bool) -> None:
    with Wire(sim.port) as wire:
        wire.complete(tokens("a", "b", "c") * 50, stream=stream, sim={"delay_ms": 300})
        wire.finish_sending()
        text = wire.text() if stream else wire.read_json()["choices"][0]["text"]
        assert text == "abc" * 50
        assert wire.at_end()


@STREAM_OR_WHOLE
def test_who_finishes_sending_and_then_leaves_is_missed(sim: Server, *, stream: bool) -> None:
    wire = Wire(sim.port).complete(stream=stream, **LONG)
    wire.finish_sending()
    _expect_in_engine(sim, 1)
    wire.close()
    _expect_in_engine(sim, 0)


def test_the_others_go_on(sim: Server) -> None:
    with Wire(sim.port).complete(tokens("a") * 300, stream=True) as other:
        for _ in range(10):
            Wire(sim.port).complete(stream=True, **LONG).close()
        assert other.text() == "a" * 300


def test_a_request_whose_prompt_is_still_read_is_dropped(sim: Server) -> None:
    """A long body is parsed and tokenized in a thread; nobody is left to answer when it is done."""
    for _ in range(4):
        Wire(sim.port).complete(prompt="word " * 50_000, stream=True).close()
    with Wire(sim.port) as wire:
        assert wire.complete(tokens("a"), stream=True).text() == "a"


def test_two_hundred_who_leave_at_any_time(sim: Server) -> None:
    def leave(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(20):
            stream = chance.random() < 0.8
            wire = Wire(sim.port).complete(
                stream=stream, logprobs=5, n=chance.randint(1, 3), **LONG
            )
            if stream:
                wire.read_head()
                for _ in range(chance.randint(0, 6)):
                    assert wire.read_chunk()
            _go(wire, chance.choice(["close", "reset"]))

    in_parallel(*(partial(leave, seed) for seed in range(10)))
    _expect_in_engine(sim, 0)
    with Wire(sim.port) as wire:
        assert wire.complete(tokens("a"), stream=True).text() == "a"


# ---- the limit of admission, for which places must be freed as well


def test_over_the_limit_is_overloaded(narrow: Server) -> None:
    with contextlib.ExitStack() as stack:

        def ask(token_ids: list[int] | None = None, **fields: Any) -> Wire:
            return stack.enter_context(Wire(narrow.port)).complete(token_ids, **fields)

        wires = [ask(stream=True, **LONG) for _ in range(REQUESTS_IN_FLIGHT_MAX)]
        _expect_in_engine(narrow, REQUESTS_IN_FLIGHT_MAX)
        for stream in (True, False):
            refused = ask(stream=stream)
            error = refused.read_json()["error"]
            assert (refused.status, error["type"], error["code"]) == (
                429, "overloaded", "overloaded",
            )  # fmt: skip
            assert int(refused.headers["retry-after"]) >= 1
        assert narrow.get("/health")[0] == 200
        wires.pop().close()
        _expect_in_engine(narrow, REQUESTS_IN_FLIGHT_MAX - 1)
        # One place is free, and two are asked for.
        assert ask(n=2).read_json()["error"]["code"] == "overloaded"
        taken = ask(tokens("a"), stream=True)
        _expect_in_engine(narrow, REQUESTS_IN_FLIGHT_MAX)
        for wire in wires:
            wire.close()
        assert taken.text() == "a"


def _go(wire: Wire, how: str) -> None:
    if how == "close":
        wire.close()
    else:
        wire.reset()


def _expect_in_engine(server: Server, count: int) -> None:
    wait_until(lambda: server.num_in_engine() == count, deadline_s=GONE_WITHIN_S)
