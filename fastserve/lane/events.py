"""What ZeroMQ is asked all the time, in plain numbers: its enums cost more than the question."""

from __future__ import annotations

from typing import cast

import zmq

POLLIN = int(zmq.POLLIN)
POLLOUT = int(zmq.POLLOUT)
NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)


def events_of(socket: zmq.Socket[bytes]) -> int:
    """Whether `socket` can be read and written: POLLIN, POLLOUT, both or 0. About 1.4 us."""
    return cast("int", socket.getsockopt(_EVENTS))
