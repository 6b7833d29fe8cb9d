"""Liveness, told by heartbeats: a table of what was heard, and of what to make of it."""

from __future__ import annotations

import pytest

from fastserve.frontend.liveness import Liveness
from fastserve.lane.messages import Heartbeat


def heard(*beats: tuple[float, int, int]) -> Liveness:
    """A liveness that heard, at these times in seconds, of so many steps and so much work."""
    liveness = Liveness(stall_unhealthy_s=10.0)
    for at_s, steps, busy in beats:
        beat = Heartbeat(ready=True, num_running=busy, num_waiting=0, steps=steps)
        liveness.observe(beat, now_s=at_s)
    return liveness


@pytest.mark.parametrize(
    ("beats", "now_s", "stalled"),
    [
        pytest.param([(0, 0, 0)], 5, False, id="idle"),
        pytest.param([(0, 0, 0), (9, 0, 0), (18, 0, 0)], 20, False, id="idle for long"),
        pytest.param([(0, 0, 0)], 11, True, id="idle, and not heard of any more"),
        pytest.param([(0, 1, 1), (9, 2, 1), (18, 3, 1)], 20, False, id="busy and moving"),
        pytest.param([(0, 1, 1), (9, 1, 1)], 10, False, id="standing, not yet for long"),
        pytest.param([(0, 1, 1), (9, 1, 1)], 11, True, id="standing with work, and alive"),
        pytest.param([(0, 1, 1), (9, 1, 1), (11, 2, 1)], 12, False, id="moving again"),
        pytest.param([(0, 1, 0), (20, 1, 1)], 21, True, id="work came while it was silent"),
        pytest.param([(0, 5, 0), (1, 5, 0), (2, 5, 1)], 11, False, id="work after a rest"),
        pytest.param([(0, 5, 1), (9, 5, 1), (11, 5, 0)], 12, False, id="all work was aborted"),
    ],
)
def test_stalled(beats: list[tuple[float, int, int]], now_s: float, *, stalled: bool) -> None:
    assert heard(*beats).stalled(now_s=now_s) is stalled


def test_an_engine_that_is_loading_is_not_ready_and_not_stalled() -> None:
    liveness = Liveness(stall_unhealthy_s=10.0)
    assert not liveness.ready
    assert not liveness.stalled(now_s=100.0)
    liveness.observe(Heartbeat(ready=False, num_running=0, num_waiting=0, steps=0), now_s=100.0)
    assert not liveness.ready
    assert not liveness.stalled(now_s=200.0)
    liveness.observe(Heartbeat(ready=True, num_running=0, num_waiting=0, steps=0), now_s=201.0)
    assert liveness.ready
    assert not liveness.stalled(now_s=202.0)
