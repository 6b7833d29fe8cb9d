from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from bench import micro

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("room", micro.ROOMS, ids=lambda room: room.name)
def test_every_room_does_its_work_twice(room: micro.Room) -> None:
    do = room.make()
    do()
    do()


def test_the_best_batch_counts() -> None:
    # Calls take 1 ms, but in the first batches a neighbour takes as much again.
    calls = itertools.count()
    now_s = [0.0]

    def do() -> None:
        now_s[0] += 0.002 if next(calls) < 100 else 0.001

    assert micro.measure_us(do, clock=lambda: now_s[0]) == pytest.approx(1000)
    assert micro.measure_us(do, units=10, clock=lambda: now_s[0]) == pytest.approx(100)


def room(name: str, budget_us: float) -> micro.Room:
    def make() -> Callable[[], object]:
        return lambda: sum(range(100))

    return micro.Room(name=name, unit="sum", budget_us=budget_us, make=make)


def test_a_room_over_twice_its_budget_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(micro, "ROOMS", (room("good", 1e6), room("bad", 1e-6)))
    assert micro.main([]) == 1
    good, bad = capsys.readouterr().out.splitlines()[1:]
    assert "SLOW" not in good
    assert "SLOW" in bad
    assert micro.main(["--room", "good"]) == 0
    assert micro.main(["--scale", "1e12"]) == 0
