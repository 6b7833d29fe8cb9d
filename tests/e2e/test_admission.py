"""What the server takes on: counted over all acceptors, exact whoever races, and told honestly."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import re
import signal
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import anthropic
import openai
import pytest

from tests.e2e.harness import DEADLINE_S, Server, wait_until
from tests.e2e.scripted import assert_settled, card, tokens
from tests.e2e.wire import Wire, in_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator

FRONTENDS = 4
QUEUED_MAX = 10
NUM_CLIENTS = 200
# Would take far longer than any wait here.
ENDLESS: dict[str, Any] = {"max_tokens": 7900, "ignore_eos": True}
FLAGS = (
    "--frontends", str(FRONTENDS), "--engine", "sim", "--sim-step-ms", "10",
    "--engine-max-seq-len", "8192", "--lane-heartbeat-interval-s", "0.05",
    "--engine-max-queued-requests", str(QUEUED_MAX),
)  # fmt: skip


def serving(batch_size: int, *flags: str) -> Server:
    return Server(*FLAGS, "--sim-max-batch-size", str(batch_size), *flags)


@pytest.fixture(scope="module")
def one_at_a_time() -> Iterator[Server]:
    with serving(1) as server:
        yield server
        assert_settled(server)


def metric(server: Server, name: str, **labels: str) -> float:
    """A series' value, summed over what else it is labelled with."""
    with urlopen(server.url + "/metrics", timeout=DEADLINE_S) as answer:
        text = answer.read().decode()
    total = 0.0
    for line in re.findall(rf"^fastserve_{name}(?:\{{.*\}})? \S+$", text, re.MULTILINE):
        if all(f'{label}="{value}"' in line for label, value in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


def in_engine(server: Server) -> tuple[int, int]:
    """How many requests run and how many wait, by the last heartbeat."""
    _, health = server.get("/health")
    return health["num_running"], health["num_waiting"]


def outcome_of(wire: Wire) -> int:
    """The status of an answer, of which a refusal is whole."""
    if wire.read_head() != 200:
        assert wire.headers["content-type"] == "application/json"
        assert int(wire.headers["retry-after"]) >= 1
    return wire.status


def refusal_of(wire: Wire) -> tuple[int, str]:
    error = wire.read_json()["error"]
    assert int(wire.headers["retry-after"]) >= 1
    return wire.status, error["code"]


@contextlib.contextmanager
def filled(server: Server, *, batch_size: int) -> Iterator[list[Wire]]:
    """As many requests as run and queue, all streamed and all without an end."""
    with contextlib.ExitStack() as stack:
        wires = [
            stack.enter_context(Wire(server.port)).complete(stream=True, **ENDLESS)
            for _ in range(batch_size + QUEUED_MAX)
        ]
        wait_until(lambda: server.num_in_engine() == batch_size + QUEUED_MAX)
        yield wires
    wait_until(lambda: server.num_in_engine() == 0)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_of_two_hundred_at_once_exactly_as_many_are_taken_as_fit(batch_size: int) -> None:
    with serving(batch_size) as server, contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.port)) for _ in range(NUM_CLIENTS)]
        for number, wire in enumerate(wires):
            wire.complete(stream=number % 2 == 0, **ENDLESS)
        refused = NUM_CLIENTS - batch_size - QUEUED_MAX
        wait_until(
            lambda: (
                metric(server, "admission_rejections_total", reason="queued_requests") == refused
            )
        )
        wait_until(lambda: in_engine(server) == (batch_size, QUEUED_MAX))
        assert metric(server, "http_requests_total", code="429") == refused
        assert metric(server, "requests_aborted_total") == 0
        answered = [wire for wire in wires if wire.readable()]
        # Of those that run, the streamed ones have begun to be answered.
        assert refused <= len(answered) <= refused + batch_size
        outcomes = collections.Counter(outcome_of(wire) for wire in answered)
        assert outcomes[429] == refused
        assert outcomes[200] == len(answered) - refused
    # As the context ends, everybody has gone.


def test_a_place_in_the_queue_is_free_as_soon_as_somebody_leaves_it(
    one_at_a_time: Server,
) -> None:
    with filled(one_at_a_time, batch_size=1) as wires:
        for leaver in wires[-3:]:
            with Wire(one_at_a_time.port) as late:
                assert refusal_of(late.complete(tokens("a"))) == (429, "overloaded")
            leaver.close()
            wait_until(lambda: one_at_a_time.num_in_engine() == QUEUED_MAX)
            wires.append(Wire(one_at_a_time.port).complete(**ENDLESS))
            wait_until(lambda: one_at_a_time.num_in_engine() == QUEUED_MAX + 1)
        for wire in wires[-3:]:
            wire.close()


def test_choices_are_taken_together_or_not_at_all(one_at_a_time: Server) -> None:
    with filled(one_at_a_time, batch_size=1) as wires:
        wires[-1].close()
        wait_until(lambda: one_at_a_time.num_in_engine() == QUEUED_MAX)
        before = metric(one_at_a_time, "requests_aborted_total", reason="failed")
        for stream in (True, False):
            with Wire(one_at_a_time.port) as pair:
                assert refusal_of(pair.complete(n=2, stream=stream)) == (429, "overloaded")
        assert one_at_a_time.num_in_engine() == QUEUED_MAX
        assert metric(one_at_a_time, "requests_aborted_total", reason="failed") == before
        with Wire(one_at_a_time.port) as single:
            single.complete(**ENDLESS)
            wait_until(lambda: one_at_a_time.num_in_engine() == QUEUED_MAX + 1)


def test_pairs_that_race_leave_no_half(one_at_a_time: Server) -> None:
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(one_at_a_time.port)) for _ in range(40)]
        refused = metric(one_at_a_time, "admission_rejections_total")
        in_parallel(*(partial(wire.complete, n=2, **ENDLESS) for wire in wires))
        # One runs and nine queue: of five pairs. A tenth place is left, for no pair.
        wait_until(lambda: metric(one_at_a_time, "admission_rejections_total") == refused + 40 - 5)
        wait_until(lambda: one_at_a_time.num_in_engine() == QUEUED_MAX)
    wait_until(lambda: one_at_a_time.num_in_engine() == 0)


def test_prompts_are_counted_as_well() -> None:
    with (
        serving(1, "--engine-max-queued-tokens", "100") as server,
        Wire(server.port) as running,
        Wire(server.port) as queued,
        Wire(server.port) as refused,
        Wire(server.port) as small,
    ):
        running.complete(prompt=[9] * 200, **ENDLESS)
        wait_until(lambda: server.num_in_engine() == 1)
        queued.complete(prompt=[9] * 60, **ENDLESS)
        wait_until(lambda: server.num_in_engine() == 2)
        assert refusal_of(refused.complete(prompt=[9] * 41)) == (429, "overloaded")
        small.complete(prompt=[9] * 40, **ENDLESS)
        wait_until(lambda: server.num_in_engine() == 3)
        assert metric(server, "admission_rejections_total", reason="queued_tokens") == 1


def test_clients_know_what_a_refusal_is(one_at_a_time: Server) -> None:
    with (
        filled(one_at_a_time, batch_size=1),
        one_at_a_time.client() as client,
        anthropic.Anthropic(base_url=one_at_a_time.url, api_key="none", max_retries=0) as messages,
    ):
        asked: dict[str, Any] = {
            "model": card().name,
            "messages": [{"role": "user", "content": "hi"}],
        }
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**asked, stream=True)
        assert (refused.value.type, refused.value.code) == ("overloaded", "overloaded")
        with pytest.raises(anthropic.RateLimitError) as refused_message:
            messages.messages.create(**asked, max_tokens=5)
        body: Any = refused_message.value.body
        assert body["error"]["type"] == "rate_limit_error"


def test_a_client_that_retries_is_served_when_there_is_room(one_at_a_time: Server) -> None:
    with (
        filled(one_at_a_time, batch_size=1) as wires,
        one_at_a_time.client() as client,
    ):

        def patient() -> str:
            answer = client.with_options(max_retries=5).completions.create(
                model=card().name, prompt="x", extra_body={"sim": {"token_ids": tokens(" a")}}
            )
            return answer.choices[0].text

        def leave() -> str:
            rejected = metric(one_at_a_time, "admission_rejections_total")
            wait_until(lambda: metric(one_at_a_time, "admission_rejections_total") > rejected)
            for wire in wires:
                wire.close()
            return "left"

        assert in_parallel(leave, patient) == ["left", " a"]


# ---- deadlines


def timed_out(wire: Wire) -> None:
    error = wire.read_json()["error"]
    assert (wire.status, error["type"], error["code"]) == (504, "timeout", "request_timeout")
    assert wire.headers["x-should-retry"] == "false"


def test_whoever_waits_in_the_queue_hears_of_it_in_time(one_at_a_time: Server) -> None:
    aborted = partial(metric, one_at_a_time, "requests_aborted_total", reason="timeout")
    before = aborted()
    with Wire(one_at_a_time.port) as running, Wire(one_at_a_time.port) as late:
        running.complete(**ENDLESS)
        wait_until(lambda: one_at_a_time.num_in_engine() == 1)
        for stream in (True, False):
            timed_out(late.complete(stream=stream, timeout_ms=100, **ENDLESS))
            wait_until(lambda: one_at_a_time.num_in_engine() == 1)
    assert aborted() == before + 2


def test_an_answer_that_takes_too_long_is_cut_and_says_so(one_at_a_time: Server) -> None:
    with Wire(one_at_a_time.port) as whole, Wire(one_at_a_time.port) as streamed:
        timed_out(whole.complete(timeout_ms=100, **ENDLESS))
        streamed.complete(stream=True, timeout_ms=200, **ENDLESS)
        events = list(streamed.events())
        assert '"request_timeout"' in events[-1]
        assert sum('"error"' in event for event in events) == 1
    wait_until(lambda: one_at_a_time.num_in_engine() == 0)


def test_nobody_waits_longer_than_the_server_allows() -> None:
    with (
        serving(1, "--limits-request-timeout-s", "0.3") as server,
        Wire(server.port) as running,
        Wire(server.port) as queued,
    ):
        running.complete(**ENDLESS)
        queued.complete(timeout_ms=60_000, **ENDLESS)
        timed_out(running)
        timed_out(queued)
        wait_until(lambda: server.num_in_engine() == 0)


def test_whoever_queues_when_the_server_drains_is_told_at_its_end() -> None:
    with serving(1, "--drain-timeout-s", "0.5") as server:
        server.remember_processes()
        with filled_until_exit(server) as wires:
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_exit() == 0
            for wire in wires:
                # Some may have begun when one that ran was told.
                if wire.read_head() == 200:
                    assert '"shutting_down"' in list(wire.blocks())[-1]
                else:
                    assert (wire.status, wire.headers["retry-after"]) == (503, "5")


@contextlib.contextmanager
def filled_until_exit(server: Server) -> Iterator[list[Wire]]:
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(Wire(server.port)).complete(stream=True, **ENDLESS)
        wait_until(running.readable)
        yield [
            running,
            *(
                stack.enter_context(Wire(server.port)).complete(stream=True, **ENDLESS)
                for _ in range(QUEUED_MAX)
            ),
        ]


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_the_clients_come_again_as_they_are_told(one_at_a_time: Server, api: str) -> None:
    """Refused while the queue is full, and answered when it is not: nobody sees an error."""
    server = one_at_a_time
    messages: Any = [{"role": "user", "content": "hi"}]
    asked: Any = {"model": card().name, "messages": messages, "max_tokens": 2}
    rejected = partial(metric, server, "admission_rejections_total", reason="queued_requests")
    before = rejected()

    def ask() -> object:
        if api == "openai":
            with server.client(max_retries=8) as client:
                return client.chat.completions.create(**asked).choices[0].finish_reason
        with anthropic.Anthropic(api_key="-", base_url=server.url, max_retries=8) as client:
            return client.messages.create(**asked).stop_reason

    with concurrent.futures.ThreadPoolExecutor() as pool:
        with filled(server, batch_size=1):
            asking = pool.submit(ask)
            wait_until(lambda: rejected() > before)
            assert not asking.done()
        assert asking.result(timeout=DEADLINE_S) in ("length", "max_tokens")


def test_the_clients_come_again_when_the_engine_is_back() -> None:
    """503 while a successor of the engine starts, with Retry-After: the client sees the answer."""
    with Server(*FLAGS, "--engine-respawn", "3") as server, server.client(max_retries=8) as client:
        asked: Any = {"model": card().name, "prompt": "x", "max_tokens": 2}
        client.completions.create(**asked)
        server.find("engine").kill()
        wait_until(lambda: server.get("/health")[0] == 503)
        assert client.completions.create(**asked).choices[0].finish_reason == "length"
        assert metric(server, "http_requests_total", code="503") > 0
