"""The port: bound before anything slow starts, and held for the server's whole life.

"shared": one listening socket, inherited by every acceptor. "reuseport": one per acceptor, made
here too, so that an acceptor that dies leaves its queue of connections to its successor. Either
way the first bind is a plain one, which fails when anybody listens on the port, also with
SO_REUSEPORT: Linux checks the flag on both sides at the moment of the bind, so ours is set after.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING, Literal

from fastserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

AcceptMode = Literal["shared", "reuseport"]


class Listener:
    """The listening sockets of one address. `port` is the real one, also when 0 was asked for."""

    def __init__(self, sockets: Sequence[socket.socket], *, claim: socket.socket) -> None:
        self._sockets = sockets
        self._claim = claim
        self.host: str = claim.getsockname()[0]
        self.port: int = claim.getsockname()[1]

    @classmethod
    def bind(
        cls, host: str, port: int, *, mode: AcceptMode, frontends: int, backlog: int
    ) -> Listener:
        """Bind `host`:`port`. Raises ConfigError when that cannot be had."""
        family, address = _resolve(host, port)
        claim = _socket(family)
        try:
            claim.bind(address)
            if mode == "shared":
                claim.listen(backlog)
                return cls([claim], claim=claim)
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sockets = [
                _listening(family, claim.getsockname(), backlog=backlog) for _ in range(frontends)
            ]
        except OSError as error:
            claim.close()
            raise ConfigError(_explain(host, port, error)) from error
        return cls(sockets, claim=claim)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def socket_for(self, lane: int) -> socket.socket:
        """Return the socket on which acceptor `lane` accepts."""
        return self._sockets[lane % len(self._sockets)]

    def close(self) -> None:
        for each in {self._claim, *self._sockets}:
            each.close()


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise ConfigError(f"server.host: {host!r} is no address: {error.strerror}") from error
    family, _, _, _, address = found[0]
    return family, address


def _socket(family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    # Only past connections may linger on the port; on Linux this never shares it with a listener.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by accepted connections: a token must not wait for the ACK of the one before.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setblocking(False)
    return made


def _listening(
    family: socket.AddressFamily, address: tuple[object, ...], *, backlog: int
) -> socket.socket:
    made = _socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(address)
    made.listen(backlog)
    return made


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"server.port: {host}:{port} is in use by another server"
    if error.errno == errno.EACCES:
        return f"server.port: {port} needs privileges; ports from 1024 do not"
    return f"server.host: cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}"
