"""By when a request must be answered: who says so, and what happens then in each phase."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from fastserve.errors import InvalidRequest
from fastserve.frontend.deadlines import HEADER, Deadlines, Due, asked_timeout_s
from fastserve.http1.parser import parse_head
from fastserve.metrics.catalog import ABORTS
from tests.frontend.stage import STOP, Stage, Timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.generation import ModelCard
    from tests.frontend.stage import Asked

STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


# ---- the header


def asked(value: str) -> float:
    head = f"POST / HTTP/1.1\r\nHost: x\r\n{HEADER}: {value}\r\n\r\n".encode("latin-1")
    return asked_timeout_s(parse_head(head, header_count_max=9, body_bytes_max=9))


@pytest.mark.parametrize(("value", "timeout_s"), [("1", 0.001), ("1500", 1.5), ("0600", 0.6)])
def test_a_client_says_how_many_milliseconds_it_waits(value: str, timeout_s: float) -> None:
    assert asked(value) == timeout_s


@pytest.mark.parametrize(
    "value", ["", "0", "-1", "+1", "1.5", "1s", "inf", "nan", "1_0", "9" * 10, "\xb2", "1, 2"]
)
def test_anything_else_is_refused_and_named(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(value)
    assert caught.value.param == HEADER


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
def test_a_bad_one_is_refused_by_the_head_alone(stage: Stage, path: str) -> None:
    answer = stage.request("POST", path, body=b"what follows", headers=[f"{HEADER}: soon"])
    assert answer.status == 400
    assert HEADER in answer.json()["error"]["message"]


# ---- the one timer


@dataclass
class Clock:
    now_s: float = 100.0
    timer: Timer | None = None
    num_timers: int = 0

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        assert self.timer is None or self.timer.cancelled, "there is one timer"
        self.num_timers += 1

        def call() -> None:
            self.now_s += delay
            self.timer = None
            callback()

        self.timer = Timer(delay, call)
        return self.timer


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def deadlines(clock: Clock) -> Deadlines:
    return Deadlines(clock, clock=lambda: clock.now_s)


def run(clock: Clock) -> None:
    """Let the time pass until no timer is left."""
    while clock.timer is not None:
        clock.timer.callback()


def test_each_expires_at_its_own_time(clock: Clock, deadlines: Deadlines) -> None:
    expired: list[tuple[float, float]] = []
    for deadline_s in (107.0, 101.0, 104.0):
        note = lambda each=deadline_s: expired.append((each, clock.now_s))  # noqa: E731
        deadlines.add(Due(note, deadline_s=deadline_s))
    run(clock)
    assert expired == [(101.0, 101.0), (104.0, 104.0), (107.0, 107.0)]


def test_who_has_ended_in_time_never_expires(clock: Clock, deadlines: Deadlines) -> None:
    expired: list[str] = []
    ended = Due(lambda: expired.append("ended"), deadline_s=101.0)
    deadlines.add(ended)
    deadlines.add(Due(lambda: expired.append("late"), deadline_s=102.0))
    deadlines.discard(ended)
    deadlines.discard(ended)
    run(clock)
    assert expired == ["late"]


def test_without_a_deadline_there_is_nothing_to_wait_for(
    clock: Clock, deadlines: Deadlines
) -> None:
    deadlines.add(Due(lambda: None, deadline_s=math.inf))
    assert clock.num_timers == 0


def test_one_may_end_another_and_begin_a_third(clock: Clock, deadlines: Deadlines) -> None:
    expired: list[str] = []
    third = Due(lambda: expired.append("third"), deadline_s=103.0)
    pair: list[Due] = []

    def first_of_two() -> None:
        expired.append("one of two")
        for each in pair:
            deadlines.discard(each)
        deadlines.add(third)

    pair += [Due(first_of_two, deadline_s=101.0) for _ in range(2)]
    for each in pair:
        deadlines.add(each)
    run(clock)
    assert expired == ["one of two", "third"]


def test_a_thousand_requests_that_end_in_time_set_one_timer(
    clock: Clock, deadlines: Deadlines
) -> None:
    for number in range(1000):
        clock.now_s += 0.001
        due = Due(lambda: None, deadline_s=clock.now_s + 60.0)
        deadlines.add(due)
        if number:
            deadlines.discard(due)
    assert clock.num_timers == 1


def test_crowded_deadlines_are_looked_at_together(clock: Clock, deadlines: Deadlines) -> None:
    num_expired = 0

    def count() -> None:
        nonlocal num_expired
        num_expired += 1

    for number in range(1000):
        deadlines.add(Due(count, deadline_s=clock.now_s + 1.0 + number / 10_000))
    run(clock)
    assert num_expired == 1000
    assert clock.num_timers < 15


# ---- a request, in each of its phases


def pass_time(stage: Stage) -> None:
    """Let the timer that is set come, again and again until it is not set anew."""
    give_up_s = time.monotonic() + 5.0
    num_timers = 0
    while num_timers < len(stage.timers):
        assert time.monotonic() < give_up_s, "nothing expires"
        num_timers = len(stage.timers)
        stage.timers[-1].callback()


def hurried(stage: Stage, path: str = "/v1/completions", *, ms: int = 1, **fields: Any) -> Asked:
    body = orjson.dumps({"prompt": "p"} | fields if "completions" in path else fields)
    return stage.request("POST", path, body=body, headers=[f"{HEADER}: {ms}"])


@STREAM_OR_WHOLE
def test_before_the_first_token_it_is_a_504(stage: Stage, *, stream: bool) -> None:
    request = hurried(stage, stream=stream, n=2)
    pass_time(stage)
    assert (request.status, request.header("x-should-retry")) == (504, "false")
    error = request.json()["error"]
    assert (error["type"], error["code"]) == ("timeout", "request_timeout")
    assert error["message"] == "not answered within 0.001 s"
    assert stage.aborted == [submit.request_id for submit in stage.submits]
    assert stage.count(ABORTS, "timeout") == 2
    assert stage.frontend.num_in_flight == 0


def test_in_a_stream_it_is_the_last_event(stage: Stage) -> None:
    request = hurried(stage, stream=True)
    stage.say(b"a")
    pass_time(stage)
    assert request.ended
    assert request.status == 200
    assert request.said() == "a"
    assert request.chunks()[-1]["error"]["code"] == "request_timeout"
    assert "[DONE]" not in request.sent.decode()
    assert stage.aborted == [stage.submits[0].request_id]


def test_a_message_hears_of_it_in_its_own_words(stage: Stage) -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = hurried(stage, "/v1/messages", messages=messages, max_tokens=9)
    pass_time(stage)
    assert (whole.status, whole.json()["error"]["type"]) == (504, "timeout_error")
    streamed = hurried(stage, "/v1/messages", messages=messages, max_tokens=9, stream=True)
    stage.say(b"a")
    pass_time(stage)
    assert streamed.blocks()[-1].startswith("event: error\n")
    assert '"timeout_error"' in streamed.blocks()[-1]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_it_holds_while_the_request_is_prepared(card: ModelCard, path: str) -> None:
    stage = Stage(card, off_loop_bytes_min=0)
    request = hurried(stage, path, prompt="p")
    pass_time(stage)
    assert request.status == 504
    stage.run_call()
    assert stage.inbox == [], "what was prepared for nobody is not submitted"


def test_a_client_may_ask_for_less_and_not_for_more(card: ModelCard) -> None:
    stage = Stage(card, request_timeout_s=60.0)
    hurried(stage, ms=90_000)
    hurried(stage, ms=30_000)
    assert [round(timer.delay) for timer in stage.timers] == [60, 30]
    assert [timer.cancelled for timer in stage.timers] == [True, False]


def test_an_answer_in_time_is_left_in_peace(stage: Stage) -> None:
    request = hurried(stage)
    stage.say(b"a", STOP)
    sent = request.sent
    stage.timers[0].callback()
    assert request.sent == sent
    assert stage.count(ABORTS, "timeout") == 0
