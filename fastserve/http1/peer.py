"""Is the client still there? What only the kernel can say.

A client that has closed its socket and one that has only finished sending look the same: both send
a FIN. They differ once they are sent something: the first answers with a reset, which the kernel
notes in the connection's state. And a host that vanished sends nothing: TCP itself must find out.

Knows nothing of requests. On systems without TCP_INFO, and on Unix sockets, an end of input is
taken for a client that has gone.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.http1.deadline import Clock, Handle

# linux/tcp_states.h. The first byte of struct tcp_info is the state.
_TCP_CLOSE = 7
_TCP_CLOSE_WAIT = 8

# A window that opens by and by is no silent host: TCP may wait longer than we wait for progress.
_SLOW_READER_FACTOR = 4

# When to look at the state, as seconds from one look to the next. The first looks are early so
# that a client that has gone frees its place in the engine at once.
LOOK_AFTER_S = (0.01, 0.04, 0.15, 0.8, 1.0)


class Socket(Protocol):
    """What is used of the socket that a transport shows."""

    @property
    def family(self) -> int: ...
    def getsockopt(self, level: int, option: int, length: int, /) -> bytes: ...
    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...


class Watch:
    """Looks again and again whether a client that has finished sending is still there.

    Before each look something must have been sent: `probe` is told the number of looks so far,
    sends what it will, and returns False once nobody wants to know any more.
    """

    __slots__ = ("_clock", "_looks", "_on_gone", "_probe", "_socket", "_timer")

    def __init__(
        self,
        sock: Socket,
        clock: Clock,
        *,
        probe: Callable[[int], bool],
        on_gone: Callable[[], None],
    ) -> None:
        self._socket = sock
        self._clock = clock
        self._probe = probe
        self._on_gone = on_gone
        self._looks = 0
        self._timer: Handle | None = None

    def start(self) -> None:
        """The client has finished sending."""
        self.stop()
        self._looks = 0
        self._look()

    def start_when_finished(self) -> None:
        """Start once the client has finished sending, though nobody reads what it sent."""
        self.stop()
        self._timer = self._clock.call_later(LOOK_AFTER_S[-1], self._look_for_end)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_for_end(self) -> None:
        if _state(self._socket) in (_TCP_CLOSE, _TCP_CLOSE_WAIT):
            self.start()
        else:
            self.start_when_finished()

    def _look(self) -> None:
        if is_gone(self._socket):
            self._on_gone()
        elif self._probe(self._looks):
            wait_s = LOOK_AFTER_S[min(self._looks, len(LOOK_AFTER_S) - 1)]
            self._looks += 1
            self._timer = self._clock.call_later(wait_s, self._look)


def is_tcp(sock: Socket | None) -> bool:
    """Whether the state of the connection can be asked for at all."""
    return (
        sock is not None
        and hasattr(socket, "TCP_INFO")
        and sock.family in (socket.AF_INET, socket.AF_INET6)
    )


def is_gone(sock: Socket) -> bool:
    """Whether the connection was reset: nothing that is sent can arrive any more."""
    return _state(sock) == _TCP_CLOSE


def detect_silence(sock: Socket, *, timeout_s: float) -> None:
    """Let TCP reset the connection when the client's host is silent for some times `timeout_s`.

    Whether bytes are on their way or not: probes are sent on an idle connection, too.
    """
    interval_s = max(1, int(timeout_s / 3))
    with contextlib.suppress(OSError):  # reset already; the loop will say so
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        # Longer, for it also counts how long a segment waits for a slow reader's window.
        sock.setsockopt(
            socket.IPPROTO_TCP,
            socket.TCP_USER_TIMEOUT,
            int(timeout_s * _SLOW_READER_FACTOR * 1000),
        )


def close_with_reset(sock: Socket) -> None:
    """Make the next close of the socket a reset, so that nobody takes it for a proper end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _state(sock: Socket) -> int:
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return _TCP_CLOSE  # the descriptor is closed already
