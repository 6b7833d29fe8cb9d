"""Where work is done that would hold up the event loop: in a thread, or in a process of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from fastserve.frontend.model import Model
    from fastserve.frontend.preparer import Preparer

T = TypeVar("T")

_THREADS = 2


class OffLoop:
    """An acceptor's threads, and the process that it has for really large bodies, if any.

    `on_loop` calls back on the loop, from any thread. `bytes_min`: a body of so many is not for the
    loop; of `process_bytes_min`, not for a thread.
    """

    def __init__(
        self,
        on_loop: Callable[[Callable[[], None]], object],
        *,
        bytes_min: int,
        preparer: Preparer | None,
        process_bytes_min: int,
    ) -> None:
        self._on_loop = on_loop
        self._bytes_min = bytes_min
        self._preparer = preparer
        self._process_bytes_min = process_bytes_min
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")

    def takes(self, body: bytes) -> bool:
        """Whether preparing this body is not for the loop."""
        return len(body) >= self._bytes_min

    def prepare(
        self,
        work: Callable[[bytes, Model], T],
        body: bytes,
        model: Model,
        *,
        wanted: Callable[[], bool],
    ) -> Future[T]:
        """Do `work`, if it is still `wanted` when its turn comes. Raises Overloaded."""
        preparer = self._preparer
        if len(body) < self._process_bytes_min or preparer is None or not preparer.takes(work):
            return self._threads.submit(work, body, model)
        return preparer.submit(work, body, model, wanted=wanted)

    def run(self, work: Callable[[], bytes], done: Callable[[bytes], None]) -> None:
        """Run `work` in a thread, and then `done` with its result on the loop."""
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: self._on_loop(lambda: done(future.result())))
