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
from typing import Protocol

# linux/tcp_states.h. The first byte of struct tcp_info is the state.
_TCP_CLOSE = 7
_TCP_CLOSE_WAIT = 8

# After an end of input: when to look at the state, as seconds from one look to the next. The first
# looks are early so that a client that has gone frees its place in the engine at once.
LOOK_AFTER_S = (0.01, 0.04, 0.15, 0.8, 1.0)
# Which looks are preceded by an interim response where no answer has begun. After 0, 1, 10 and 60
# seconds: Go's client gives up at the sixth interim response.
INTERIM_AT_LOOKS = frozenset({0, 4, 13, 63})


class Socket(Protocol):
    """What is used of the socket that a transport shows."""

    @property
    def family(self) -> int: ...
    def getsockopt(self, level: int, option: int, length: int, /) -> bytes: ...
    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...


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


def has_finished_sending(sock: Socket) -> bool:
    """Whether the client has sent its last byte, read or not."""
    return _state(sock) in (_TCP_CLOSE, _TCP_CLOSE_WAIT)


def detect_silence(sock: Socket, *, timeout_s: float) -> None:
    """Let TCP reset the connection when the client's host acknowledges nothing for `timeout_s`.

    Whether bytes are on their way or not: probes are sent on an idle connection, too.
    """
    interval_s = max(1, int(timeout_s / 3))
    with contextlib.suppress(OSError):  # reset already; the loop will say so
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


def close_with_reset(sock: Socket) -> None:
    """Make the next close of the socket a reset, so that nobody takes it for a proper end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _state(sock: Socket) -> int:
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return _TCP_CLOSE  # the descriptor is closed already
