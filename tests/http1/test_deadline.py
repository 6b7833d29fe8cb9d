"""A deadline that moves, over a clock that the test holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.http1.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Holds at most one timer, and counts those made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.at_s: float | None = None
        self.callback: Callable[[], None] = lambda: None
        self.timers_made = 0

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Callable[[], None], /) -> Clock:
        assert self.at_s is None, "two timers"
        self.at_s, self.callback = when, callback
        self.timers_made += 1
        return self

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Clock:
        return self.call_at(self.now_s + delay, callback)

    def cancel(self) -> None:
        self.at_s = None

    def advance_to(self, end_s: float) -> None:
        while self.at_s is not None and self.at_s <= end_s:
            self.now_s, self.at_s = self.at_s, None
            self.callback()
        self.now_s = end_s


def due_times(clock: Clock) -> tuple[Deadline, list[float]]:
    times: list[float] = []
    return Deadline(clock, lambda: times.append(clock.now_s)), times


def test_it_is_due_once() -> None:
    clock = Clock()
    deadline, times = due_times(clock)
    deadline.set(10)
    clock.advance_to(100)
    assert times == [10]


def test_a_receding_deadline_moves_no_timer() -> None:
    clock = Clock()
    deadline, times = due_times(clock)
    for second in range(9):
        clock.advance_to(second)
        deadline.set(10)
    assert clock.timers_made == 1
    clock.advance_to(100)
    assert times == [18]
    assert clock.timers_made == 2


def test_one_that_comes_closer_does() -> None:
    clock = Clock()
    deadline, times = due_times(clock)
    deadline.set(10)
    deadline.set(3)
    clock.advance_to(100)
    assert times == [3]


def test_a_cleared_one_is_due_when_set_again() -> None:
    clock = Clock()
    deadline, times = due_times(clock)
    deadline.set(10)
    deadline.clear()
    clock.advance_to(50)
    assert times == []
    deadline.set(10)
    clock.advance_to(100)
    assert times == [60]


def test_a_cancelled_one_leaves_no_timer() -> None:
    clock = Clock()
    deadline, times = due_times(clock)
    deadline.set(10)
    deadline.cancel()
    assert clock.at_s is None
    clock.advance_to(100)
    assert times == []
