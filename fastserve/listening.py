"""The end of listening, without a gap for anybody to fall into.

A connection that is made between the last accept() and the close() of a listening socket is reset,
and no client can tell that from a fault. So whoever stops to accept lets nobody connect first: the
packet that would begin a connection is dropped, and the client's kernel sends it again after a
second (RFC 6298 2.1), when it is refused, or is for the next server.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from array import array

# socket(7), and the kernel's Documentation/networking/filter.rst; the standard library has neither.
_SO_ATTACH_FILTER = 26
_LOAD_BYTE, _JUMP_IF_SET, _RETURN = 0x30, 0x45, 0x06
# RFC 9293 3.1: the byte of the header with the flags, where the filter of a TCP socket begins.
_FLAGS_AT, _SYN = 13, 0x02
_ALL_BYTES = 0xFFFFFFFF
_INSTRUCTION = "HBBI"
_NO_SYN = array(
    "B",
    struct.pack(
        _INSTRUCTION * 4,
        *(_LOAD_BYTE, 0, 0, _FLAGS_AT),
        *(_JUMP_IF_SET, 0, 1, _SYN),  # on to the next, or one further
        *(_RETURN, 0, 0, 0),
        *(_RETURN, 0, 0, _ALL_BYTES),
    ),
)


def let_nobody_connect(listener: socket.socket) -> None:
    """Make no new connections on a listening socket; those made can still be accepted.

    Where the system has no filters it does nothing: the gap is a few microseconds, and stays.
    """
    with contextlib.suppress(OSError):
        if listener.family == socket.AF_UNIX:
            listener.shutdown(socket.SHUT_RD)  # of TCP this would reset those who wait
            return
        at, size_bytes = _NO_SYN.buffer_info()
        count = size_bytes // struct.calcsize(_INSTRUCTION)
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", count, at))
