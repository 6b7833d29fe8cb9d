"""The load generator against a server that does what it is told."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from fastserve.load.build import LoadError, build
from fastserve.load.plan import Plan, Request, Send, target_of
from fastserve.load.run import Progress, Result, run
from tests.load.answers import DONE, FINISH, Answering, needs_cc, stream, text, whole

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs_cc

THREE = stream(text("a"), text("b"), text("c"), FINISH, DONE)
FIVE_TOKENS = (
    b'{"choices":[{"message":{"content":"x"},"finish_reason":"length"}],'
    b'"usage":{"completion_tokens":5}}'
)


def test_a_closed_loop_counts_what_it_is_answered(
    answering: tuple[Answering, int], load: Callable[..., Result]
) -> None:
    answering[0].answer = THREE
    result = load(expected_chunks=3, connections=3)
    assert not +result.failures
    assert not result.unfinished
    assert result.requests > 10
    assert result.opened == 3
    assert result.chunks in range(3 * result.requests, 3 * (result.requests + 3) + 1)
    # An answer that comes in one piece has all but its first chunk merged.
    assert result.merged == 2 * result.chunks / 3
    assert result.itl.total == result.merged
    assert result.ttft.total == result.latency.total >= result.requests
    assert result.answered == len(answering[0].asked)
    assert result.window_s == pytest.approx(0.3)
    assert 0 < result.cpu_s < 0.3


def test_an_answer_byte_by_byte_is_the_same_answer(
    answering: tuple[Answering, int], load: Callable[..., Result]
) -> None:
    answering[0].answer, answering[0].slice_bytes = THREE, 1
    result = load(expected_chunks=3)
    assert not +result.failures
    assert result.requests > 0


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        pytest.param(stream(text("a"), FINISH, DONE), "incomplete", id="too few chunks"),
        pytest.param(stream(*[text("a")] * 6, FINISH, DONE), "incomplete", id="too many"),
        pytest.param(stream(*[text("a")] * 5, FINISH), "incomplete", id="no [DONE]"),
        pytest.param(stream(*[text("a")] * 5, DONE), "incomplete", id="no finish reason"),
        pytest.param(whole(FIVE_TOKENS.replace(b"5", b"4")), "incomplete", id="too few tokens"),
        pytest.param(stream(b'data: {"error":{}}\n\n'), "error_event", id="an error event"),
        pytest.param(whole(b"{}", status="503 Busy"), "status", id="a status"),
        pytest.param(b"HTTP/1.1 what\r\n\r\n", "malformed", id="not HTTP"),
    ],
)
def test_a_wrong_answer_is_a_failure_and_never_a_request(
    answering: tuple[Answering, int], load: Callable[..., Result], answer: bytes, failure: str
) -> None:
    answering[0].answer = answer
    result = load(expected_chunks=5, window_s=0.1)
    assert set(+result.failures) == {failure}
    assert result.requests == result.latency.total == 0
    assert failure in result.notes[0]


def test_a_right_object_is_a_request(
    answering: tuple[Answering, int], load: Callable[..., Result]
) -> None:
    answering[0].answer = whole(FIVE_TOKENS)
    result = load(expected_chunks=5, window_s=0.5)
    assert not +result.failures
    assert result.requests > 0
    assert result.chunks == 0


def test_a_connection_that_ends_too_early_is_tried_again_but_not_at_once(
    answering: tuple[Answering, int], load: Callable[..., Result]
) -> None:
    answering[0].answer, answering[0].closes = THREE[:-20], True
    result = load(connections=2, window_s=0.3)
    assert set(+result.failures) == {"cut"}
    assert 2 < result.failures["cut"] <= 2 * 7


def test_a_server_that_is_not_there_is_a_failure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = target_of(f"http://127.0.0.1:{taken.getsockname()[1]}")
        plan = Plan(
            target=target,
            requests=(Request(body=b"{}"),),
            connections=1,
            warm_s=0.0,
            window_s=0.1,
            drain_s=0.1,
        )
        assert set(+run(plan).failures) == {"connect"}


def test_latencies_of_an_open_loop_count_from_when_requests_were_due(
    answering: tuple[Answering, int], load: Callable[..., Result]
) -> None:
    # Each answer takes 0.1 s, all four were due at once, and there is one connection: the last
    # waits for three others although the server took no longer for it.
    answering[0].answer, answering[0].delay_s = THREE, 0.1
    result = load(sends=[Send(0.0, 0)] * 4, connections=1, window_s=0.2)
    assert result.latency.total == 4
    assert result.latency.max_ns >= 0.4e9
    assert result.ttft.max_ns >= 0.4e9


def test_an_open_loop_ends_with_its_last_answer(
    answering: tuple[Answering, int], load: Callable[..., Result]
) -> None:
    answering[0].answer = THREE
    result = load(sends=[Send(0.05, 0)], window_s=30.0)
    assert result.requests == 1
    assert result.chunks == 3
    assert result.window_s < 5


def test_what_does_not_end_in_time_is_unfinished(
    answering: tuple[Answering, int], load: Callable[..., Result]
) -> None:
    answering[0].answer, answering[0].delay_s = THREE, 0.5
    result = load(sends=[Send(0.0, 0)] * 3, connections=1, window_s=0.1, drain_s=0.1)
    assert result.unfinished == 3
    assert result.requests == 0


def test_several_programs_share_a_plan(
    answering: tuple[Answering, int], load: Callable[..., Result]
) -> None:
    answering[0].answer = THREE
    result = load(sends=[Send(at / 100, 0) for at in range(9)], connections=3, processes=2)
    assert result.requests == result.latency.total == 9


def test_progress_and_the_edges_of_the_window_are_told(answering: tuple[Answering, int]) -> None:
    answering[0].answer = THREE
    plan = Plan(
        target=target_of(f"http://127.0.0.1:{answering[1]}"),
        requests=(Request(body=b"{}"),),
        connections=2,
        warm_s=0.1,
        window_s=0.7,
        drain_s=1.0,
    )
    told: list[Progress] = []
    edges: list[int] = []
    run(plan, on_progress=told.append, on_window_edge=lambda: edges.append(len(told)))
    assert len(edges) == 2
    assert len(told) >= 2
    assert told[-1].requests > 0
    assert max(progress.in_flight for progress in told) <= 2


def test_a_plan_that_cannot_be_is_refused_with_the_programs_reason() -> None:
    plan = Plan(
        target=target_of("http://no.such.host.invalid"),
        requests=(Request(body=b"{}"),),
        connections=1,
        warm_s=0.0,
        window_s=0.1,
        drain_s=0.1,
    )
    with pytest.raises(LoadError, match=r"no\.such\.host\.invalid"):
        run(plan)


def test_the_program_is_built_once() -> None:
    assert build() == build()
    assert build().stat().st_mode & 0o111


def test_without_a_compiler_the_refusal_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(LoadError, match="install cc"):
        build()
