"""Signals as something to wait for: a descriptor in the supervisor's one select()."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType

_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class Signals:
    """While entered, the watched signals do nothing but become readable here.

    Afterwards those that ask for an end are ignored: it has come, and its exit code is known.
    """

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        for number in _WATCHED:
            signal.signal(number, _ignore)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number in _WATCHED:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def received(self) -> list[int]:
        """Return the numbers of the signals that came, in order."""
        try:
            return list(self._reader.recv(4096))
        except BlockingIOError:
            return []


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Not SIG_IGN, which children would inherit: the wake-up descriptor does the work."""
