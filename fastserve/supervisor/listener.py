"""Where the server listens: bound before anything slow starts, and held for its whole life.

A port in mode "shared": one listening socket, inherited by every acceptor; "reuseport": one per
acceptor, made here too, so that an acceptor that dies leaves its queue of connections to its
successor. Either way the first bind is a plain one, which fails when anybody listens on the port,
also with SO_REUSEPORT: Linux checks the flag on both sides at the moment of the bind, so ours is
set after. A Unix socket is always shared.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastserve.errors import ConfigError
from fastserve.supervisor.farewell import turn_away

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# tcp(7); the standard library has its name from 3.12 on.
_TCP_NOTSENT_LOWAT = 25
_NOTSENT_BYTES_MAX = 65_536

AcceptMode = Literal["shared", "reuseport"]

# How long another server may be about to bind in the same directory. It takes it a millisecond.
_LOCK_TIMEOUT_S = 2.0
_LOCK_RETRY_S = 0.01


class Listeners:
    """Where a server listens: a port, a Unix socket, or both."""

    def __init__(self, *, tcp: Listener | None, uds: UnixListener | None) -> None:
        self.tcp = tcp
        self.uds = uds

    @classmethod
    def bind(
        cls,
        *,
        address: tuple[str, int] | None,
        uds: str | None,
        uds_mode: int,
        mode: AcceptMode,
        frontends: int,
        backlog: int,
    ) -> Listeners:
        """Bind a host and port, a Unix socket's path, or both. Raises ConfigError."""
        tcp = None
        if address is not None:
            tcp = Listener.bind(*address, mode=mode, frontends=frontends, backlog=backlog)
        if uds is None:
            return cls(tcp=tcp, uds=None)
        try:
            path = Path(uds).absolute()
            return cls(tcp=tcp, uds=UnixListener.bind(path, mode=uds_mode, backlog=backlog))
        except ConfigError:
            if tcp is not None:
                tcp.close()
            raise

    def url(self, scheme: str) -> str:
        """How the server is reached from this machine: by its port, if it has one."""
        if self.tcp is not None:
            return self.tcp.url(scheme)
        assert self.uds is not None
        return f"unix:{self.uds.path}:"

    def sockets_for(self, lane: int) -> tuple[socket.socket, ...]:
        """Return the sockets on which acceptor `lane` accepts."""
        tcp = [] if self.tcp is None else [self.tcp.socket_for(lane)]
        return (*tcp, *([] if self.uds is None else [self.uds.socket]))

    def turn_away(self, *, tls: bool, engine_died: str | None) -> None:
        """Tell those who still wait that the server ends, and whether since its engine died.

        `tls`: on the port nobody would understand it, and whoever waits there is reset.
        """
        sockets = [] if self.tcp is None or tls else [*self.tcp.sockets]
        sockets += [] if self.uds is None else [self.uds.socket]
        turn_away(sockets, engine_died=engine_died)

    def close(self) -> None:
        for each in (self.tcp, self.uds):
            if each is not None:
                each.close()


class Listener:
    """The listening sockets of one address. `port` is the real one, also when 0 was asked for."""

    def __init__(self, sockets: Sequence[socket.socket], *, claim: socket.socket) -> None:
        self.sockets = sockets
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

    def url(self, scheme: str) -> str:
        """How the server is reached from this machine."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"

    def socket_for(self, lane: int) -> socket.socket:
        """Return the socket on which acceptor `lane` accepts."""
        return self.sockets[lane % len(self.sockets)]

    def close(self) -> None:
        for each in {self._claim, *self.sockets}:
            each.close()


class UnixListener:
    """A listening Unix socket. Its file is removed with it, unless it is another's by then."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self.socket = sock
        self.path = path
        self._file = _file_id(path)

    @classmethod
    def bind(cls, path: Path, *, mode: int, backlog: int) -> UnixListener:
        """Bind `path` with the permissions `mode`, in place of what a dead server has left there.

        Raises ConfigError, also when another server listens there.
        """
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.setblocking(False)
        try:
            with _directory_locked(path.parent), _umask(0o777 & ~mode):
                _remove_dead(path)
                made.bind(str(path))
                path.chmod(mode)
                # Only now can anybody connect.
                made.listen(backlog)
                return cls(made, path)
        except (OSError, ValueError) as error:
            made.close()
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else error
            # What socket says of a path of more than 107 bytes has no number.
            reason = "the path is too long" if "too long" in str(error) else reason
            raise ConfigError(f"server.uds: cannot listen on {path}: {reason}") from error
        except ConfigError:
            made.close()
            raise

    def close(self) -> None:
        """Remove the file, then stop listening."""
        with contextlib.suppress(OSError):
            if _file_id(self.path) == self._file:
                self.path.unlink()
        self.socket.close()


def _file_id(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _remove_dead(path: Path) -> None:
    """Remove a socket that nobody listens on. Raises ConfigError if it is anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"server.uds: {path} is there, and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # its queue is full, so there is one
    raise ConfigError(f"server.uds: {path} is in use by another server")


@contextlib.contextmanager
def _directory_locked(directory: Path) -> Iterator[None]:
    """Let one server at a time look at, remove and bind a socket here: two that start together
    would each take the other's for dead."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_LOCK_RETRY_S)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    """The process has one thread when it binds."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


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
    # Inherited too: the kernel's send buffer grows to megabytes, in which a slow reader's progress
    # could not be seen, and which its connection would cost.
    made.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _NOTSENT_BYTES_MAX)
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
        return (
            f"server.port: {host}:{port} is in use by another server; stop that, or choose "
            "another with --port"
        )
    if error.errno == errno.EACCES:
        return f"server.port: {port} needs privileges; ports from 1024 do not"
    reason = os.strerror(error.errno or 0)
    if error.errno == errno.EADDRNOTAVAIL:
        reason += "; give one of this machine, or 0.0.0.0 for all of them"
    return f"server.host: cannot listen on {host}:{port}: {reason}"
