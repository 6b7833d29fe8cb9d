"""Stored responses: everybody finds what anybody stored, until it is deleted, old or too much."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fastserve.frontend.response_store import ResponseStore, StoreLimits, new_response_id

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    now_s = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def store_in(folder: Path, clock: Clock, *, lane: int = 0, **limits: int) -> ResponseStore:
    return ResponseStore(folder / "responses", lane=lane, limits=StoreLimits(**limits), now=clock)


def put(store: ResponseStore, record: bytes) -> str:
    response_id = store.new_id()
    assert store.put(response_id, record)
    return response_id


def names_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "responses").iterdir()}


def test_what_one_acceptor_stores_another_finds_and_deletes(tmp_path: Path, clock: Clock) -> None:
    one, other = store_in(tmp_path, clock, lane=0), store_in(tmp_path, clock, lane=63)
    for mine, theirs in ((one, other), (other, one)):
        response_id = put(mine, b"record")
        assert theirs.get(response_id) == b"record"
        assert theirs.delete(response_id)
        assert mine.get(response_id) is None
        assert not mine.delete(response_id)


def test_no_two_ids_are_the_same() -> None:
    assert len({new_response_id() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "response_id",
    ["", "resp_", "..", "../lock", "resp_" + "0" * 47, "resp_" + "0" * 49, "resp_" + "G" * 48,
     "resp_" + "0" * 48 + "\n", "resp_" + "0" * 46 + "/x"],
)  # fmt: skip
def test_what_is_no_id_touches_no_file(tmp_path: Path, clock: Clock, response_id: str) -> None:
    (tmp_path / "lock").write_bytes(b"not a response")
    store = store_in(tmp_path, clock)
    assert store.get(response_id) is None
    assert not store.delete(response_id)
    assert (tmp_path / "lock").exists()


def test_too_large_a_record_is_not_kept(tmp_path: Path, clock: Clock) -> None:
    store = store_in(tmp_path, clock, record_bytes_max=3)
    put(store, b"abc")
    refused = store.new_id()
    assert not store.put(refused, b"abcd")
    assert store.get(refused) is None


def test_an_old_record_is_gone(tmp_path: Path, clock: Clock) -> None:
    store = store_in(tmp_path, clock, age_max_s=100)
    response_id = put(store, b"record")
    clock.now_s += 100
    assert store.get(response_id) == b"record"
    clock.now_s += 1
    assert store.get(response_id) is None
    assert not store.delete(response_id)
    another = put(store, b"another")
    assert names_in(tmp_path) == {another}


@pytest.mark.parametrize(
    ("limits", "num_left"),
    [
        pytest.param({"records_max": 10}, 10, id="too many"),
        pytest.param({"bytes_max": 65}, 6, id="too much"),
        pytest.param({"age_max_s": 5}, 6, id="too old"),
    ],
)
@pytest.mark.parametrize("respawned", [False, True], ids=["at once", "after a respawn"])
def test_the_oldest_of_a_share_go_first(
    tmp_path: Path, clock: Clock, limits: dict[str, int], num_left: int, *, respawned: bool
) -> None:
    theirs = put(store_in(tmp_path, clock, lane=2), b"x" * 10)
    store = store_in(tmp_path, clock, lane=1, **({} if respawned else limits))
    ids = []
    for _ in range(32):
        clock.now_s += 1
        ids.append(put(store, b"x" * 10))
    if respawned:
        store_in(tmp_path, clock, lane=1, **limits)
    assert names_in(tmp_path) == {theirs, *ids[-num_left:]}


def test_what_was_deleted_leaves_room_in_the_end(tmp_path: Path, clock: Clock) -> None:
    store = store_in(tmp_path, clock, records_max=2)
    first = put(store, b"x")
    store.delete(first)
    rest = [put(store, b"x") for _ in range(3)]
    assert names_in(tmp_path) == set(rest[-2:])


def test_a_folder_that_takes_nothing_costs_no_answer(tmp_path: Path, clock: Clock) -> None:
    store = store_in(tmp_path, clock)
    (tmp_path / "responses").rmdir()
    assert not store.put(store.new_id(), b"record")


def test_a_store_without_room_keeps_nothing(tmp_path: Path) -> None:
    for limits in (
        StoreLimits(records_max=0),
        StoreLimits(bytes_max=3),
        StoreLimits(record_bytes_max=3),
    ):
        store = ResponseStore(tmp_path, lane=1, limits=limits)
        response_id = store.new_id()
        assert store.put(response_id, b"four") is False
        assert store.get(response_id) is None
