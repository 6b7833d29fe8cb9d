"""Several ranks' heartbeats are one: true sums, and steps that stand still if any rank does."""

from __future__ import annotations

import dataclasses

from fastserve.engine.pulse import STARTING_SILENT_TIMEOUT_S, Pulse
from fastserve.lane.messages import Heartbeat

SILENT_TIMEOUT_S = 10.0


def beat(*, steps: int = 0, running: int = 0, ready: bool = True) -> Heartbeat:
    return Heartbeat(ready=ready, num_running=running, num_waiting=0, steps=steps)


def pulse(num_ranks: int) -> Pulse:
    return Pulse(num_ranks, silent_timeout_s=SILENT_TIMEOUT_S, now_s=0.0)


def test_every_field_is_of_all_ranks() -> None:
    both = pulse(2)
    both.hear(
        1,
        Heartbeat(
            ready=True,
            num_running=2,
            num_waiting=3,
            steps=5,
            kv_cache_usage=0.5,
            prefix_cache_queries=6,
            prefix_cache_hits=7,
        ),
        now_s=0.0,
    )
    combined = both.combined(
        Heartbeat(
            ready=True,
            num_running=20,
            num_waiting=30,
            steps=50,
            kv_cache_usage=0.25,
            prefix_cache_queries=60,
            prefix_cache_hits=70,
        ),
        now_s=0.0,
    )
    assert dataclasses.asdict(combined) == {
        "ready": True,
        "num_running": 22,
        "num_waiting": 33,
        "steps": 55,
        "kv_cache_usage": 0.375,
        "prefix_cache_queries": 66,
        "prefix_cache_hits": 77,
    }


def test_all_are_ready_when_the_last_is() -> None:
    three = pulse(3)
    three.hear(1, beat(), now_s=0.0)
    assert not three.ready
    assert not three.combined(beat(), now_s=0.0).ready
    three.hear(2, beat(), now_s=0.0)
    assert three.ready
    assert not three.combined(beat(ready=False), now_s=0.0).ready
    assert three.combined(beat(), now_s=0.0).ready


def test_steps_stand_still_while_one_rank_does() -> None:
    both = pulse(2)
    both.hear(1, beat(steps=3, running=1), now_s=0.0)
    seen = [both.combined(beat(steps=10, running=1), now_s=0.0).steps]
    for steps in range(11, 14):  # rank 1 goes on beating, and finishes no step
        both.hear(1, beat(steps=3, running=1), now_s=0.0)
        seen.append(both.combined(beat(steps=steps, running=1), now_s=0.0).steps)
    both.hear(1, beat(steps=4, running=1), now_s=0.0)
    seen.append(both.combined(beat(steps=14, running=1), now_s=0.0).steps)
    assert seen == [13, 13, 13, 13, 18]


def test_a_rank_without_work_holds_up_nothing() -> None:
    both = pulse(2)
    seen = []
    for steps in range(1, 4):
        both.hear(1, beat(), now_s=0.0)
        seen.append(both.combined(beat(steps=steps, running=1), now_s=0.0).steps)
    assert seen == [1, 2, 3]


def test_a_rank_that_is_slower_than_its_heartbeats_only_delays_the_count() -> None:
    both = pulse(2)
    both.hear(1, beat(steps=1, running=1), now_s=0.0)
    assert both.combined(beat(steps=1, running=1), now_s=0.0).steps == 2
    both.combined(beat(steps=9, running=1), now_s=1.0)
    both.hear(1, beat(steps=2, running=1), now_s=2.0)
    assert both.combined(beat(steps=20, running=1), now_s=2.0).steps == 22


def test_a_rank_that_says_nothing_is_silent() -> None:
    three = pulse(3)
    three.hear(1, beat(), now_s=0.0)
    for now_s in range(1, 12):
        three.hear(2, beat(), now_s=now_s)
        assert three.silent(now_s=now_s) == ([1] if now_s > SILENT_TIMEOUT_S else [])


def test_a_rank_that_starts_may_be_silent_for_longer() -> None:
    both = pulse(2)
    for now_s in range(1, 70):
        assert both.silent(now_s=now_s) == ([1] if now_s > STARTING_SILENT_TIMEOUT_S else [])


def test_nobody_is_silent_whom_we_were_not_there_to_hear() -> None:
    both = pulse(2)
    both.hear(1, beat(), now_s=0.0)
    for now_s in range(1, 9):
        assert both.silent(now_s=now_s) == []
    assert both.silent(now_s=100.0) == [], "stopped, perhaps with everybody else"
    assert all(both.silent(now_s=100.0 + later_s) == [] for later_s in range(10))
    assert both.silent(now_s=111.0) == [1]
