"""Who is next."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve.engine.waiting import WaitingQueue


def queue(*priorities: int) -> WaitingQueue[str]:
    """Requests 0, 1, ... of these priorities, named by their ids."""
    waiting: WaitingQueue[str] = WaitingQueue()
    for request_id, priority in enumerate(priorities):
        waiting.add(request_id, f"r{request_id}", priority=priority)
    return waiting


def drained(waiting: WaitingQueue[str]) -> list[str]:
    return [waiting.pop() for _ in range(len(waiting))]


@pytest.mark.parametrize(
    ("priorities", "order"),
    [
        pytest.param([0, 0, 0], ["r0", "r1", "r2"], id="first come first served"),
        pytest.param([0, 5, -5], ["r2", "r0", "r1"], id="the lowest is first"),
        pytest.param([1, 0, 1, 0], ["r1", "r3", "r0", "r2"], id="equals keep their order"),
        pytest.param([2**63 - 1, -(2**63)], ["r1", "r0"], id="the extremes"),
    ],
)
def test_the_next_is_the_first_of_the_lowest_priority(
    priorities: list[int], order: list[str]
) -> None:
    assert drained(queue(*priorities)) == order


def test_who_had_a_turn_before_comes_first_of_its_priority() -> None:
    waiting = queue(0, 0, 1)
    waiting.put_back(7, "r7", priority=0)
    waiting.put_back(8, "r8", priority=1)
    waiting.put_back(9, "r9", priority=0)
    assert drained(waiting) == ["r9", "r7", "r0", "r1", "r8", "r2"]


def test_who_was_removed_has_no_turn() -> None:
    waiting = queue(0, 0, 0)
    assert waiting.remove(0) == "r0"
    assert waiting.remove(0) is None
    assert 0 not in waiting
    assert (list(waiting), waiting[2]) == ([1, 2], "r2")
    waiting.put_back(0, "again", priority=1)
    assert drained(waiting) == ["r1", "r2", "again"]
    with pytest.raises(IndexError):
        waiting.pop()


def test_those_who_left_take_no_memory() -> None:
    waiting: WaitingQueue[str] = WaitingQueue()
    waiting.add(0, "stays", priority=0)
    for request_id in range(1, 10_000):
        waiting.add(request_id, "goes", priority=1)
        waiting.remove(request_id)
    assert len(waiting._heap) < 200
    assert drained(waiting) == ["stays"]


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=60))
@settings(max_examples=100)
def test_it_is_a_stable_sort_of_those_who_stay(entries: list[tuple[int, bool]]) -> None:
    waiting = queue(*(priority for priority, _ in entries))
    for request_id, (_, leaves) in enumerate(entries):
        if leaves:
            waiting.remove(request_id)
    staying = [(p, n) for n, (p, leaves) in enumerate(entries) if not leaves]
    assert drained(waiting) == [f"r{n}" for _, n in sorted(staying, key=lambda one: one[0])]
