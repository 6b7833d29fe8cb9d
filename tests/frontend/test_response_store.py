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


def store_in(folder: Path, clock: Clock, **limits: int) -> ResponseStore:
    return ResponseStore(folder / "responses", limits=StoreLimits(**limits), now=clock)


def test_what_one_acceptor_stores_another_finds_and_deletes(tmp_path: Path, clock: Clock) -> None:
    one, other = store_in(tmp_path, clock), store_in(tmp_path, clock)
    response_id = new_response_id()
    assert one.get(response_id) is None
    assert one.put(response_id, b"record")
    assert other.get(response_id) == b"record"
    assert other.delete(response_id)
    assert one.get(response_id) is None
    assert not one.delete(response_id)


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
    kept, refused = new_response_id(), new_response_id()
    assert store.put(kept, b"abc")
    assert not store.put(refused, b"abcd")
    assert store.get(refused) is None


def test_an_old_record_is_gone(tmp_path: Path, clock: Clock) -> None:
    store = store_in(tmp_path, clock, age_max_s=100)
    response_id = new_response_id()
    store.put(response_id, b"record")
    clock.now_s += 100
    assert store.get(response_id) == b"record"
    clock.now_s += 1
    assert store.get(response_id) is None
    assert list((tmp_path / "responses").iterdir()) == []


@pytest.mark.parametrize(
    ("limits", "num_left"),
    [
        pytest.param({"records_max": 10}, 10, id="too many"),
        pytest.param({"bytes_max": 65}, 6, id="too much"),
        pytest.param({"age_max_s": 5}, 6, id="too old"),
    ],
)
def test_the_oldest_go_first(
    tmp_path: Path, clock: Clock, limits: dict[str, int], num_left: int
) -> None:
    store = store_in(tmp_path, clock, **limits)
    ids = [new_response_id() for _ in range(32)]
    for response_id in ids:
        clock.now_s += 1
        store.put(response_id, b"x" * 10)
    # The last of them has had an eye on the others.
    left = {path.name for path in (tmp_path / "responses").iterdir()}
    assert left == set(ids[-num_left:])


def test_the_limits_hold_over_all_acceptors(tmp_path: Path, clock: Clock) -> None:
    stores = [store_in(tmp_path, clock, records_max=50) for _ in range(4)]
    for _ in range(100):
        clock.now_s += 1
        for store in stores:
            store.put(new_response_id(), b"x")
        assert len(list((tmp_path / "responses").iterdir())) <= 50 + 4 * 32


def test_a_folder_that_takes_nothing_costs_no_answer(tmp_path: Path, clock: Clock) -> None:
    store = store_in(tmp_path, clock)
    (tmp_path / "responses").rmdir()
    assert not store.put(new_response_id(), b"record")
