"""Where requests go: to the least loaded rank, or to one that has read their beginning."""

from __future__ import annotations

import pytest

from fastserve.engine.dispatch import (
    ANSWER_TOKENS_EXPECTED_MAX,
    BLOCKS_REMEMBERED_MAX,
    IMBALANCE_TOKENS_MAX,
    PREFIX_BLOCK_TOKENS,
    Dispatcher,
)
from fastserve.generation import RequestId
from fastserve.lane.ids import LANE_SHIFT

LONG = list(range(4 * PREFIX_BLOCK_TOKENS))


class Giving:
    """A dispatcher and the ids for it."""

    def __init__(self, num_ranks: int) -> None:
        self.dispatcher = Dispatcher(num_ranks)
        self._next = 0

    def give(
        self, prompt: list[int], *, max_tokens: int = 1, lane: int = 0, full: tuple[int, ...] = ()
    ) -> int:
        self._next += 1
        self.last = RequestId(lane << LANE_SHIFT | self._next)
        return self.dispatcher.give(self.last, prompt, max_tokens=max_tokens, full=full)

    def end(self) -> None:
        self.dispatcher.ended([self.last])


def test_equals_take_turns() -> None:
    giving = Giving(3)
    ranks = []
    for _ in range(6):
        ranks.append(giving.give([1, 2, 3]))
        giving.end()
    assert ranks == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded_is_next() -> None:
    giving = Giving(2)
    assert giving.give([0] * 50, max_tokens=100) == 0
    assert [giving.give([0], max_tokens=80) for _ in range(3)] == [1, 1, 0]


def test_load_is_what_was_given_and_has_not_ended() -> None:
    giving = Giving(2)
    giving.give([0] * 7, max_tokens=3)
    assert giving.dispatcher.loads == [10, 0]
    giving.give([0], max_tokens=10**6)
    assert giving.dispatcher.loads == [10, 1 + ANSWER_TOKENS_EXPECTED_MAX]
    giving.end()
    giving.end()  # heard twice, as when an abort and an end cross
    assert giving.dispatcher.loads == [10, 0]
    assert giving.dispatcher.rank_of(giving.last) is None


def test_what_came_from_a_lane_can_be_forgotten_at_once() -> None:
    giving = Giving(2)
    giving.give([0] * 10, lane=5)
    kept = giving.give([0] * 10, lane=6)
    giving.dispatcher.forget_lane(5)
    assert giving.dispatcher.rank_of(giving.last) == kept
    assert sorted(giving.dispatcher.loads) == [0, 11]


def test_a_known_prefix_goes_where_it_was_read() -> None:
    giving = Giving(4)
    home = giving.give(LONG)
    giving.end()
    for tail in range(8):
        assert giving.give([*LONG, tail]) == home


def test_of_two_that_know_it_the_less_loaded_takes_it() -> None:
    giving = Giving(2)
    first = giving.give(LONG, full=(1,))
    second = giving.give(LONG, full=(0,))
    assert {first, second} == {0, 1}
    assert [giving.give([*LONG, tail]) for tail in range(4)] == [0, 1, 0, 1]


def test_the_longer_prefix_counts() -> None:
    giving = Giving(3)
    half = LONG[: 2 * PREFIX_BLOCK_TOKENS]
    giving.give(half, full=(1, 2))
    giving.end()
    giving.give(LONG, full=(0, 2))
    giving.end()
    assert giving.give([*LONG, 7]) == 1
    giving.end()
    assert giving.give([*half, *([7] * PREFIX_BLOCK_TOKENS)]) in (0, 1)


def test_a_prefix_is_not_followed_to_where_others_wait_for_much_less() -> None:
    giving = Giving(2)
    home = giving.give(LONG)
    giving.end()
    taken = 0
    while giving.give(LONG, max_tokens=10**6) == home:
        taken += len(LONG) + ANSWER_TOKENS_EXPECTED_MAX
    assert IMBALANCE_TOKENS_MAX < taken <= IMBALANCE_TOKENS_MAX + 2 * len(LONG) + 256


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(LONG[: PREFIX_BLOCK_TOKENS - 1], id="less than a block in common"),
        pytest.param([9, *LONG[1:]], id="the same but for the first token"),
        pytest.param(LONG[PREFIX_BLOCK_TOKENS:], id="the same tokens elsewhere"),
    ],
)
def test_what_is_no_common_prefix_is_no_reason(other: list[int]) -> None:
    giving = Giving(2)
    assert giving.give(LONG) == 0
    giving.end()
    assert giving.give(other) == 1


def test_a_full_rank_gets_nothing_while_there_are_others() -> None:
    giving = Giving(3)
    assert {giving.give([1], full=(1,)) for _ in range(8)} == {0, 2}
    assert giving.give([1], full=(0, 1, 2)) in (0, 1, 2)


def test_what_was_read_long_ago_is_forgotten() -> None:
    giving = Giving(2)
    giving.give(LONG)
    giving.end()
    for number in range(BLOCKS_REMEMBERED_MAX + 1):
        giving.give([-number] * PREFIX_BLOCK_TOKENS, full=(1,))
        giving.end()
    assert giving.give(LONG) == 1, "it is the turn of 1, and nobody remembers"
