"""One thread for calls that take long and leave the interpreter free, one call at a time.

The thread that starts a call waits for it on a file descriptor, among whatever else it waits for.
It is always the same thread that calls: OpenMP keeps a pool of workers for each thread it meets.

Knows nothing of what the calls do.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Offload(Generic[T]):
    """Runs calls on a thread of its own, which lives until `close`."""

    def __init__(self, name: str) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable from the end of a call until `result` is taken."""
        self.busy = False
        self._calls: queue.SimpleQueue[Callable[[], T] | None] = queue.SimpleQueue()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, call: Callable[[], T]) -> None:
        """Begin a call. The one before must be over and its result taken."""
        assert not self.busy, "a call is under way"
        self.busy = True
        self._calls.put(call)

    def result(self) -> T:
        """What the call returned, or raise what it raised. Only once `fd` is readable."""
        os.eventfd_read(self.fd)
        self.busy = False
        error, self._error = self._error, None
        if error is not None:
            raise error
        # The call returned a T, which may well be None.
        return self._result  # type: ignore[return-value]

    def close(self, *, timeout_s: float) -> bool:
        """End the thread after the call under way. False if that takes longer than `timeout_s`."""
        self._calls.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        os.close(self.fd)
        return True

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._result = call()
            # Whatever it is, it belongs to the thread that asked for the call.
            except BaseException as error:
                self._error = error
            os.eventfd_write(self.fd, 1)
