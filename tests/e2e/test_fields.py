"""Fields that reach through every process, and requests of megabytes."""

from __future__ import annotations

import random
import select
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.e2e.harness import Server, wait_until
from tests.e2e.scripted import assert_settled, ids_of, tokens
from tests.e2e.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One acceptor, one request at a time, two names for the model, and no strange fields."""
    with Server(
        "--frontends", "1", "--engine", "sim", "--sim-step-ms", "2", "--sim-max-batch-size", "1",
        "--served-model-name", "first", "--served-model-name", "second",
        "--unknown-fields", "refuse", "--http-off-process-bytes-min", "100000",
        "--lane-heartbeat-interval-s", "0.05",
    ) as server:  # fmt: skip
        yield server
        assert_settled(server)


def ask(server: Server, **fields: Any) -> Any:
    with Wire(server.port) as wire:
        return wire.complete(**fields).read_json()


def choice_of(server: Server, *, stream: bool, **fields: Any) -> tuple[str, list[Any]]:
    """The text of the one choice of a completion, and what is told of its tokens."""
    with Wire(server.port) as wire:
        wire.complete(**fields, stream=stream)
        parts = (
            [chunk["choices"][0] for chunk in wire.chunks()]
            if stream
            else wire.read_json()["choices"]
        )
    told = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    names = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    rows = [row for one in told for row in zip(*(one[name] for name in names), strict=True)]
    return "".join(part["text"] for part in parts), rows


@STREAM_OR_WHOLE
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_prompt_is_told_of_as_the_engine_told_it(
    server: Server, max_tokens: int, *, stream: bool
) -> None:
    said = tokens(" one", " two")
    text, rows = choice_of(
        server, stream=stream, prompt="Fire 🔥", echo=True, logprobs=1, max_tokens=max_tokens,
        sim={"token_ids": said, "logprobs": [[-1.5, []], ["-inf", []]]},
    )  # fmt: skip
    prompt = ids_of("Fire 🔥")
    assert text == "Fire 🔥" + " one two" * (max_tokens > 0)
    assert len(rows) == len(prompt) + max_tokens
    assert [row[2] for row in rows[: len(prompt)]] == [
        None, *(-place / 64 for place in range(1, len(prompt)))
    ]  # fmt: skip
    assert [row[2] for row in rows[len(prompt) :]] == [-1.5, -9999.0][:max_tokens]
    assert rows[0][3] is None
    assert [row[1] for row in rows[len(prompt) :]] == [6, 10][:max_tokens]


def test_who_waits_is_served_by_priority(server: Server) -> None:
    with Wire(server.port) as first:
        first.complete(sim={"delay_ms": 500}, max_tokens=1, stream=True)
        wait_until(lambda: server.get("/health")[1]["num_running"] == 1)
        waiting = [(Wire(server.port), priority) for priority in (7, 0, -7)]
        for number, (wire, priority) in enumerate(waiting, 1):
            wire.complete(priority=priority, max_tokens=300, stream=True)
            wait_until(partial(waits, server, number))
        order = []
        for _ in waiting:
            wire, priority = next_to_speak([one for one in waiting if one[1] not in order])
            order.append(priority)
            list(wire.events())
            wire.close()
    assert order == [-7, 0, 7]


def waits(server: Server, number: int) -> bool:
    return bool(server.get("/health")[1]["num_waiting"] == number)


def next_to_speak(waiting: list[tuple[Wire, int]]) -> tuple[Wire, int]:
    """Whose first byte comes first."""
    sockets = {wire.socket: (wire, priority) for wire, priority in waiting}
    readable = select.select(list(sockets), [], [], 30)[0]
    return sockets[readable[0]]


def test_each_name_of_the_model_is_its_own(server: Server) -> None:
    for name in ("first", "second", None):
        answer = ask(server, model=name, max_tokens=1)
        assert answer["model"] == "first"
    assert ask(server, model="third")["error"]["code"] == "model_not_found"


def test_a_strange_field_is_refused_where_none_is_wanted(server: Server) -> None:
    error = ask(server, max_tokens=1, temprature=0)["error"]
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")


def test_a_request_of_megabytes_is_read_elsewhere_and_answered_here(server: Server) -> None:
    chance = random.Random(7)
    prompt = " ".join(chance.choices(("one", "two", "three", "four"), k=60_000))
    answer = ask(server, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=5)
    [preparer] = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if child.cmdline()[0] == "fastserve: preparer 0"
    ]
    assert answer["usage"]["completion_tokens"] == 5
    # As it is here: the sim engine's words depend on all the tokens of the prompt.
    tail = ids_of(prompt)[-answer["usage"]["prompt_tokens"] :]
    again = ask(server, prompt=tail, max_tokens=5)
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]
    refused = ask(server, prompt=prompt, max_tokens=5)
    assert refused["error"]["code"] == "context_length_exceeded"
    preparer.kill()
    wait_until(lambda: not preparer.is_running() or preparer.status() == psutil.STATUS_ZOMBIE)
    assert ask(server, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=5)["choices"]
