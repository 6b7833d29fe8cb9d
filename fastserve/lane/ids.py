"""Request ids: 64 bits that say which lane a request belongs to.

Bit 63 is clear, 6 bits of lane stand at shift 57, and a 57-bit counter below: 17 bits of the
acceptor's incarnation above 40 bits that count its requests. So an answer to a dead incarnation
never reaches a request of its successor. The lane's width is the one source of the limit of 64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.generation import RequestId

if TYPE_CHECKING:
    from collections.abc import Iterator

LANE_BITS = 6
LANE_SHIFT = 57
LANES_MAX = 1 << LANE_BITS
COUNTER_BITS = 40
INCARNATIONS_MAX = 1 << (LANE_SHIFT - COUNTER_BITS)
_REQUEST_ID_LIMIT = LANES_MAX << LANE_SHIFT


def request_ids(*, lane: int, incarnation: int) -> Iterator[RequestId]:
    """Yield the ids of one incarnation of one acceptor, in order.

    After 2**40 requests, or 2**17 incarnations, the counter starts again: by then nothing of its
    first lap is in flight.
    """
    assert 0 <= lane < LANES_MAX, f"lane {lane} is not from 0 to {LANES_MAX - 1}"
    base = lane << LANE_SHIFT | (incarnation % INCARNATIONS_MAX) << COUNTER_BITS
    while True:
        for count in range(1 << COUNTER_BITS):
            yield RequestId(base | count)


def lane_of(request_id: int) -> int | None:
    """Return the lane of `request_id`, or None for a number that is no request id."""
    return request_id >> LANE_SHIFT if 0 <= request_id < _REQUEST_ID_LIMIT else None


def is_of_incarnation(request_id: int, incarnation: int) -> bool:
    """Whether that incarnation of its acceptor may have made `request_id`."""
    return (request_id >> COUNTER_BITS) % INCARNATIONS_MAX == incarnation % INCARNATIONS_MAX
