"""Who queues, who is refused, and when a refused one is told to come again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.engine.admission import Admission, Queue, queue_of
from fastserve.generation import Refusal, RefusalReason

REQUESTS, TOKENS = RefusalReason.QUEUED_REQUESTS, RefusalReason.QUEUED_TOKENS


def queue(*waiting: int, num_free: int) -> Queue:
    """The queue where prompts of so many tokens wait."""
    return queue_of(waiting, num_waiting=len(waiting), num_tokens=sum(waiting), num_free=num_free)


@pytest.mark.parametrize(
    ("waiting", "num_free", "expected"),
    [
        pytest.param((), 4, Queue(num_places=4), id="nobody"),
        pytest.param((7, 7), 4, Queue(num_places=2), id="each has a place with the next step"),
        pytest.param((7, 7), 2, Queue(num_places=0), id="just enough places"),
        pytest.param(
            (1, 2, 4, 8), 1, Queue(num_places=0, num_requests=3, num_tokens=14), id="the first has"
        ),
        pytest.param(
            (1, 2), 0, Queue(num_places=0, num_requests=2, num_tokens=3), id="no place is free"
        ),
        pytest.param(
            (1, 2), -1, Queue(num_places=0, num_requests=2, num_tokens=3), id="more run than may"
        ),
    ],
)
def test_what_queues_is_what_no_place_is_free_for(
    waiting: tuple[int, ...], num_free: int, expected: Queue
) -> None:
    assert queue(*waiting, num_free=num_free) == expected


@pytest.mark.parametrize(
    ("prompts", "now", "reason"),
    [
        pytest.param([50], Queue(num_places=1), None, id="a place is free"),
        pytest.param([999], Queue(num_places=1), None, id="a place is free, however long it is"),
        pytest.param([50], Queue(num_places=0, num_requests=1), None, id="the queue has room"),
        pytest.param([1], Queue(num_places=0, num_requests=2), REQUESTS, id="the queue is full"),
        pytest.param([1] * 2, Queue(num_places=0, num_requests=1), REQUESTS, id="room for half"),
        pytest.param([1] * 4, Queue(num_places=2), None, id="two run and two queue"),
        pytest.param([1] * 5, Queue(num_places=2), REQUESTS, id="two run and three queue"),
        pytest.param([101], Queue(num_places=0), TOKENS, id="too long to wait"),
        pytest.param(
            [51], Queue(num_places=0, num_requests=1, num_tokens=50), TOKENS, id="with the others"
        ),
        pytest.param(
            [50], Queue(num_places=0, num_requests=1, num_tokens=50), None, id="just fits"
        ),
        pytest.param([999, 1], Queue(num_places=1), None, id="the long one runs at once"),
    ],
)
def test_a_limit_is_what_may_queue(
    prompts: list[int], now: Queue, reason: RefusalReason | None
) -> None:
    admission = Admission(max_queued_requests=2, max_queued_tokens=100)
    refusal = admission.refusal(prompts, queue=now, now_s=0.0)
    assert (refusal.reason if refusal else None) == reason


def test_without_limits_nobody_is_refused() -> None:
    admission = Admission(max_queued_requests=0, max_queued_tokens=0)
    assert not admission.limited
    crowd = Queue(num_places=0, num_requests=10**6, num_tokens=10**9)
    assert admission.refusal([10**6], queue=crowd, now_s=0.0) is None


@given(
    st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), max_size=40),
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(0, 60),
)
def test_no_limit_is_ever_exceeded_nor_missed(
    groups: list[list[int]], num_free: int, requests_max: int, tokens_max: int
) -> None:
    """Against the plainest reckoning: what would queue if the group were taken."""
    admission = Admission(max_queued_requests=requests_max, max_queued_tokens=tokens_max)
    waiting: list[int] = []
    for group in groups:
        then = queue(*waiting, *group, num_free=num_free)
        fits = not (
            then.num_requests
            and (
                (requests_max and then.num_requests > requests_max)
                or (tokens_max and then.num_tokens > tokens_max)
            )
        )
        # A group that finds a place for each of it is taken whatever queues: nothing then does.
        now = queue(*waiting, num_free=num_free)
        assert (admission.refusal(group, queue=now, now_s=0.0) is None) == fits
        if fits:
            waiting += group


def come_again_s(admission: Admission, *, num_queued: int, now_s: float) -> int:
    refusal = admission.refusal(
        [1], queue=Queue(num_places=0, num_requests=num_queued), now_s=now_s
    )
    assert isinstance(refusal, Refusal)
    return refusal.retry_after_s


@pytest.mark.parametrize(
    ("num_ended", "num_queued", "retry_after_s"),
    [
        pytest.param(20, 99, 25, id="four a second, a hundred before it"),
        pytest.param(1000, 99, 1, id="it is always a second"),
        pytest.param(1, 99, 60, id="and never more than clients heed"),
        pytest.param(0, 99, 5, id="nothing ended, so nothing is known"),
    ],
)
def test_whoever_is_refused_comes_again_when_the_queue_has_gone(
    num_ended: int, num_queued: int, retry_after_s: int
) -> None:
    admission = Admission(max_queued_requests=10, max_queued_tokens=0)
    admission.look(100.0)
    admission.ended(num_ended)
    assert come_again_s(admission, num_queued=num_queued, now_s=105.0) == retry_after_s


def test_the_pace_is_that_of_the_last_looks() -> None:
    admission = Admission(max_queued_requests=10, max_queued_tokens=0)
    assert come_again_s(admission, num_queued=29, now_s=0.0) == 5
    for second in range(20):
        admission.look(float(second))
        admission.ended(1000 if second < 8 else 1)
    assert come_again_s(admission, num_queued=29, now_s=20.0) == 30
