"""The requests that wait for room in the running batch: by priority, then first come first served.

A heap of keys, and the requests by id. One that is removed leaves its key behind; what has no
request is passed over, and swept out once it is more than half of the heap.

Knows nothing of what a request is.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

# So few stale keys are not worth a sweep.
_STALE_MIN = 64


class WaitingQueue(Generic[T]):
    """Requests by id. The next is the one of the lowest priority that came first.

    `num_tokens` is the sum of the lengths of all prompts that wait.
    """

    __slots__ = ("_by_id", "_heap", "_num_added", "_num_put_back", "num_tokens")

    def __init__(self) -> None:
        # Each id with the key that is valid for it, and the length of its prompt.
        self._by_id: dict[int, tuple[int, T, int]] = {}
        self.num_tokens = 0
        self._heap: list[tuple[int, int, int]] = []
        self._num_added = 0
        self._num_put_back = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: int) -> T:
        return self._by_id[request_id][1]

    def __iter__(self) -> Iterator[int]:
        """Yield the ids of those who wait, the next first."""
        keys = sorted(key for key in self._heap if self._is_valid(*key[1:]))
        return (request_id for _, _, request_id in keys)

    def lengths(self) -> Iterator[int]:
        """Yield the lengths of the prompts that wait, the next first."""
        for request_id in self:
            yield self._by_id[request_id][2]

    def add(self, request_id: int, request: T, *, priority: int, num_tokens: int = 0) -> None:
        """Take a request, behind all of its priority. The id is of none that waits."""
        self._num_added += 1
        order = self._num_added
        self._push(request_id, request, priority=priority, order=order, num_tokens=num_tokens)

    def put_back(self, request_id: int, request: T, *, priority: int, num_tokens: int = 0) -> None:
        """Take a request that had its turn before, in front of all of its priority."""
        self._num_put_back += 1
        order = -self._num_put_back
        self._push(request_id, request, priority=priority, order=order, num_tokens=num_tokens)

    def pop(self) -> T:
        """Remove and return the next. Raises IndexError if nobody waits."""
        while True:
            _, order, request_id = heapq.heappop(self._heap)
            if self._is_valid(order, request_id):
                _, request, num_tokens = self._by_id.pop(request_id)
                self.num_tokens -= num_tokens
                return request

    def remove(self, request_id: int) -> T | None:
        """Remove and return the request of that id; None if it does not wait."""
        entry = self._by_id.pop(request_id, None)
        if len(self._heap) > 2 * len(self._by_id) + _STALE_MIN:
            self._heap = [key for key in self._heap if self._is_valid(*key[1:])]
            heapq.heapify(self._heap)
        if entry is None:
            return None
        self.num_tokens -= entry[2]
        return entry[1]

    def clear(self) -> None:
        self._by_id.clear()
        self._heap.clear()
        self.num_tokens = 0

    def _push(
        self, request_id: int, request: T, *, priority: int, order: int, num_tokens: int
    ) -> None:
        assert request_id not in self._by_id, f"{request_id} waits already"
        self._by_id[request_id] = (order, request, num_tokens)
        self.num_tokens += num_tokens
        heapq.heappush(self._heap, (priority, order, request_id))

    def _is_valid(self, order: int, request_id: int) -> bool:
        entry = self._by_id.get(request_id)
        return entry is not None and entry[0] == order
