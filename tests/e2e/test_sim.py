"""Scripts of the simulated engine, and what its failures are to every client.

An error has its true status as long as nothing has been sent; after that it is the stream's last
event. A dead engine is told of to everybody, on every acceptor, and the server exits.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest

from tests.e2e.harness import Server, wait_until
from tests.e2e.scripted import assert_settled, say, tokens
from tests.e2e.wire import Wire, in_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
CHAT_OR_COMPLETION = pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])

EXIT_ENGINE_DEAD = 70
# Every client hears of a dead engine in a second, and the server is gone in five; here with room
# for a slow and busy machine.
TOLD_WITHIN_S = 4.0
EXIT_WITHIN_S = 12.0


@pytest.fixture(scope="module")
def client(sim: Server) -> Iterator[openai.OpenAI]:
    with sim.client() as client:
        yield client
    wait_until(lambda: sim.num_in_engine() == 0, deadline_s=10.0)
    assert "raceback" not in sim.log


# ---- one request fails


@CHAT_OR_COMPLETION
@STREAM_OR_WHOLE
def test_a_failure_before_the_first_token_has_a_status(
    client: openai.OpenAI, *, stream: bool, chat: bool
) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        say(client, tokens("a", "b"), stream=stream, chat=chat, sim={"fail_at": 0})
    assert caught.value.status_code == 500
    assert caught.value.response.headers["content-type"] == "application/json"
    assert caught.value.type == "engine_error"
    assert caught.value.code == "generation_failed"
    assert "step 0" in caught.value.message


def test_a_failure_later_has_a_status_if_nothing_was_sent(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        say(client, tokens("a", "b"), stream=False, sim={"fail_at": 1})
    assert caught.value.code == "generation_failed"


@CHAT_OR_COMPLETION
def test_a_failure_in_a_stream_is_an_error_of_the_client_library(
    client: openai.OpenAI, *, chat: bool
) -> None:
    with pytest.raises(openai.APIError) as caught:
        say(client, tokens("a", "b", "c"), stream=True, chat=chat, sim={"fail_at": 2})
    assert not isinstance(caught.value, openai.APIStatusError | openai.APIConnectionError)
    assert caught.value.code == "generation_failed"


def test_a_failure_in_a_stream_is_its_last_event(sim: Server) -> None:
    with Wire(sim.port) as wire:
        wire.complete(tokens("a", "b", "c"), stream=True, sim={"fail_at": 2})
        *before, last = [orjson.loads(data) for data in wire.events()]
        assert "".join(chunk["choices"][0]["text"] for chunk in before) == "ab"
        assert set(last) == {"error"}
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert last["error"]["code"] == "generation_failed"
        # The body has its proper end, so the connection is good for another request.
        assert wire.complete(tokens("x"), stream=True).text() == "x"


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    "script",
    [
        {"no_such": 1},
        {"token_ids": "a"},
        {"token_ids": [-1]},
        {"token_ids": [1 << 40]},
        {"token_ids": [49152]},
        {"logprobs": [[0.0, [[49152, 0.0]]]]},
        {"logprobs": [["nan", []]]},
        {"delay_ms": -1},
        {"fail_at": -1},
        {"fail_at": 1.5},
        {"die_by": "old age"},
    ],
    ids=str,
)
def test_what_is_no_script_is_refused(
    client: openai.OpenAI, script: dict[str, Any], *, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        say(client, None, stream=stream, sim=script)
    assert caught.value.type == "invalid_request_error"
    assert "sim: " in caught.value.message


@STREAM_OR_WHOLE
def test_a_delay_comes_before_the_first_token(client: openai.OpenAI, *, stream: bool) -> None:
    began_s = time.monotonic()
    [said] = say(client, tokens("a", "b"), stream=stream, sim={"delay_ms": 300})
    assert said.text == "ab"
    assert time.monotonic() - began_s >= 0.3


@STREAM_OR_WHOLE
def test_a_script_may_be_empty(client: openai.OpenAI, *, stream: bool) -> None:
    assert say(client, [], stream=stream)[0].same() == ("", "stop", None, 0)


@STREAM_OR_WHOLE
def test_words_are_said_without_a_script(client: openai.OpenAI, *, stream: bool) -> None:
    [said] = say(client, None, prompt="Anything", max_tokens=9, stream=stream)
    assert len(said.text.split()) == 9
    assert (said.finish_reason, said.completion_tokens) == ("length", 9)


# ---- the engine dies


@pytest.mark.parametrize("how", ["exception", "sigkill", "exit"])
def test_everybody_hears_that_the_engine_died(how: str) -> None:
    with (
        Server("--frontends", "2", "--engine", "sim", "--sim-step-ms", "2") as server,
        contextlib.ExitStack() as stack,
    ):

        def connect() -> Wire:
            return stack.enter_context(Wire(server.port))

        streams = [connect().complete(stream=True, max_tokens=8000) for _ in range(12)]
        for wire in streams:
            wire.read_head()
        # Both acceptors have some.
        assert len({wire.headers["x-request-id"].rpartition("-")[0] for wire in streams}) == 2
        silent: dict[str, Any] = {"delay_ms": 60_000}
        unanswered = [connect().complete(stream=n % 2 == 0, sim=silent) for n in range(12)]
        killer = connect().complete(sim={"die_at": 0, "die_by": how})
        began_s = time.monotonic()
        in_parallel(
            *(partial(_expect_event, wire) for wire in streams),
            *(partial(_expect_status, wire) for wire in [*unanswered, killer]),
        )
        assert time.monotonic() - began_s < TOLD_WITHIN_S
        stack.close()
        assert server.wait_exit(deadline_s=EXIT_WITHIN_S) == EXIT_ENGINE_DEAD


def test_who_comes_after_the_death_hears_of_it_too() -> None:
    """On a connection that the server still has, for as long as it answers at all."""
    with Server("--frontends", "1", "--engine", "sim", "--sim-step-ms", "2") as server:
        with Wire(server.port) as late, Wire(server.port) as killer:
            # A request that has begun keeps its connection while the server drains.
            late.socket.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: test\r\n")
            killer.complete(sim={"die_at": 1}, stream=True)
            _expect_event(killer)
            body = b'{"prompt":"x"}'
            late.socket.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            _expect_status(late)
        assert server.wait_exit(deadline_s=EXIT_WITHIN_S) == EXIT_ENGINE_DEAD


# ---- the engine stands still

HANG = (
    "--engine-stall-unhealthy-s", "0.3", "--engine-stall-kill-s", "1.5",
    "--lane-heartbeat-interval-s", "0.05", "--frontends", "2", "--engine", "sim",
)  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "script"),
    [
        pytest.param(("--sim-step-ms", "2"), {"hang_at": 3}, id="and says nothing"),
        pytest.param(("--sim-step-ms", "60000"), None, id="and says that it lives"),
    ],
)
def test_an_engine_that_stands_still_is_unhealthy_and_then_dead(
    flags: tuple[str, ...], script: Any
) -> None:
    with Server(*HANG, *flags) as server:
        assert server.get("/health") == (
            200, {"status": "ready", "num_running": 0, "num_waiting": 0}
        )  # fmt: skip
        began_s = time.monotonic()
        with Wire(server.port) as stream, Wire(server.port) as whole:
            stream.complete(stream=True, sim=script)
            if script:
                stream.read_head()
            whole.complete(sim={"delay_ms": 60_000})
            wait_until(lambda: _health(server) == (503, "stalled"), deadline_s=5.0)
            # Each acceptor finds out by itself, within a heartbeat of the other.
            wait_until(lambda: server.get("/ready")[0] == 503, deadline_s=5.0)
            assert time.monotonic() - began_s > 0.2
            _expect_event(stream) if script else _expect_status(stream)
            _expect_status(whole)
            # The engine's time begins with the last heartbeat before its work.
            assert time.monotonic() - began_s > 1.3
        assert server.wait_exit(deadline_s=EXIT_WITHIN_S) == EXIT_ENGINE_DEAD


def test_an_engine_that_is_slow_or_idle_is_healthy() -> None:
    with Server(*HANG, "--sim-step-ms", "100") as server:
        seen = set()
        with Wire(server.port) as wire:
            # 2 s, of which the first half passes without a token: longer than a stall may last.
            wire.complete(tokens("a") * 10, stream=True, sim={"delay_ms": 1000})
            until_s = time.monotonic() + 2.5
            while time.monotonic() < until_s:
                seen.add(_health(server))
                time.sleep(0.02)
            assert wire.text() == "a" * 10
        assert seen == {(200, "ready")}
        assert_settled(server)


def _health(server: Server) -> tuple[int, str]:
    status, body = server.get("/health")
    return status, body["status"]


def _expect_status(wire: Wire) -> None:
    """The engine's death as a whole answer."""
    error = wire.read_json()["error"]
    assert (wire.status, error["type"], error["code"]) == (503, "engine_dead", "engine_dead")
    assert wire.headers["content-type"] == "application/json"
    assert int(wire.headers["retry-after"]) >= 1


def _expect_event(wire: Wire) -> None:
    """The engine's death as the last event of a stream, of which the body has its proper end."""
    if not wire.status:
        assert wire.read_head() == 200
    blocks = list(wire.blocks())
    error = orjson.loads(blocks[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("engine_dead", "engine_dead")
    assert not any('"error"' in block for block in blocks[:-1])
