"""A request id says whose request it is, and is never given twice while it matters."""

from __future__ import annotations

import itertools

import pytest

from fastserve.lane.ids import (
    COUNTER_BITS,
    INCARNATIONS_MAX,
    LANES_MAX,
    is_of_incarnation,
    lane_of,
    request_ids,
)


@pytest.mark.parametrize("lane", [0, 1, 63])
def test_an_id_names_its_lane(lane: int) -> None:
    ids = itertools.islice(request_ids(lane=lane, incarnation=0), 3)
    assert [lane_of(request_id) for request_id in ids] == [lane] * 3


def test_incarnations_and_lanes_never_share_an_id() -> None:
    firsts = [
        next(request_ids(lane=lane, incarnation=incarnation))
        for lane in (0, 1, 63)
        for incarnation in (0, 1, INCARNATIONS_MAX - 1)
    ]
    assert len(set(firsts)) == len(firsts)
    assert next(request_ids(lane=0, incarnation=1)) == 1 << COUNTER_BITS


def test_ids_fit_63_bits() -> None:
    last = next(request_ids(lane=LANES_MAX - 1, incarnation=INCARNATIONS_MAX - 1))
    assert 0 <= last < 1 << 63


def test_incarnations_wrap() -> None:
    first = next(request_ids(lane=2, incarnation=0))
    assert next(request_ids(lane=2, incarnation=INCARNATIONS_MAX)) == first


@pytest.mark.parametrize("request_id", [-1, 1 << 63, 1 << 70])
def test_what_is_no_id_has_no_lane(request_id: int) -> None:
    assert lane_of(request_id) is None


@pytest.mark.parametrize("incarnation", [0, 5, INCARNATIONS_MAX - 1, INCARNATIONS_MAX + 5])
def test_an_id_names_its_incarnation(incarnation: int) -> None:
    request_id = next(request_ids(lane=63, incarnation=incarnation))
    assert is_of_incarnation(request_id, incarnation)
    assert not is_of_incarnation(request_id, incarnation + 1)
