"""The last word to those who wait in a queue that no acceptor will take from any more.

An acceptor that ends takes everybody who waits. One that stands still or was killed does not, and
where it was the only one, the kernel would reset its queue: a client could not tell that from a
fault of its own. Nobody is here any more who reads requests, so whoever has connected hears 503,
whatever it was going to ask.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import time
from email.utils import formatdate
from typing import TYPE_CHECKING

from fastserve.errors import EngineDead, ShuttingDown
from fastserve.listening import let_nobody_connect
from fastserve.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastserve.errors import FastserveError

log = get_logger("supervisor")

# Of those who wait; the others are reset.
FAREWELLS_MAX = 4096
# After the answers: bytes that come later than a close are answered with a reset, which would
# destroy the answer on its way (RFC 9112 9.6).
LINGER_S = 0.25
_READ_BYTES = 1 << 16


def answer(error: FastserveError) -> bytes:
    """What they hear, as the frontend would say it."""
    said = {"message": error.message, "type": error.type, "param": None, "code": error.code}
    body = json.dumps({"error": said}, separators=(",", ":")).encode()
    assert error.status == 503
    assert error.retry_after_s is not None
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nDate: %b\r\nServer: fastserve\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\nRetry-After: %d\r\n"
        b"Connection: close\r\n\r\n%b"
    ) % (formatdate(usegmt=True).encode(), len(body), error.retry_after_s, body)


def turn_away(listeners: Iterable[socket.socket], *, engine_died: str | None) -> None:
    """Answer everybody who waits, and close the sockets. `engine_died`: why, if that is why.

    Takes LINGER_S at most, and none where nobody waits.
    """
    connections: list[socket.socket] = []
    for listener in listeners:
        connections += _taken(listener, most=FAREWELLS_MAX - len(connections))
        listener.close()
    error: FastserveError = ShuttingDown("the server is shutting down")
    said = answer(error if engine_died is None else EngineDead(engine_died))
    for connection in connections:
        with contextlib.suppress(OSError):  # it has gone
            connection.setblocking(False)
            connection.send(said)
            connection.shutdown(socket.SHUT_WR)
    _linger(connections)
    if connections:
        log.warning("503 to those whom no acceptor had taken", connections=len(connections))


def _taken(listener: socket.socket, *, most: int) -> list[socket.socket]:
    taken: list[socket.socket] = []
    with contextlib.suppress(OSError):
        listener.setblocking(False)
        let_nobody_connect(listener)
    while len(taken) < most:
        try:
            taken.append(listener.accept()[0])
        except OSError as error:
            # Nobody waits, or the acceptors have ended the socket. accept(2) has other numbers for
            # a connection that is gone by itself.
            if error.errno not in (errno.ECONNABORTED, errno.EINTR, errno.EPERM):
                break
    return taken


def _linger(connections: list[socket.socket]) -> None:
    """Read what they still send, until they close or the time is up."""
    until_s = time.monotonic() + LINGER_S
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        while selector.get_map() and (left_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                if _has_ended(key.data):
                    selector.unregister(key.data)
    for connection in connections:
        connection.close()


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(_READ_BYTES)
    except OSError:
        return True
