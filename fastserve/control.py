"""The few words that the supervisor and its children exchange, and the socket they cross.

One SOCK_SEQPACKET pair per child: a message is a packet, so nothing has to be framed, and the end
of the other side reads as end of file. A send never blocks: a child that does not read (stopped,
wedged) must not hold its supervisor. An engine's rank 0 has the same with each of its other ranks.

Not a lane: no request or token ever passes here.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PACKET_BYTES_MAX = 65536
_UCRED = struct.Struct("iII")


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Engine -> supervisor: the share of the model that is loaded, from 0 to 1."""

    share: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Child -> supervisor, once: I can serve now. `detail` is for the ready line."""

    detail: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Child -> supervisor: I cannot become ready, for this reason. The child exits next."""

    message: str


class Crashed(msgspec.Struct, frozen=True, tag="crashed"):
    """Child -> supervisor: this exception escaped me. The child exits next."""

    error: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Engine -> supervisor, with every heartbeat: see lane.messages.Heartbeat."""

    ready: bool
    busy: bool
    steps: int


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Rank -> rank 0, at every heartbeat: the fields of its lane.messages.Heartbeat."""

    heartbeat: dict[str, bool | int | float]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Rank -> rank 0: these requests have ended, or were refused."""

    request_ids: list[int]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Supervisor -> engine, rank 0 -> ranks: every acceptor has ended; close in order."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Supervisor -> acceptor: finish what is in flight within `timeout_s`, take nothing new.

    `whole_server`: nobody else takes it either, so who comes is told so until the end.
    """

    timeout_s: float
    whole_server: bool


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Acceptor -> supervisor: somebody else told it to terminate, so it drains, and will exit."""


class LaneClosed(msgspec.Struct, frozen=True, tag="lane_closed"):
    """Supervisor -> engine: the acceptor of that incarnation has exited."""

    lane: int
    incarnation: int


class LaneStuck(msgspec.Struct, frozen=True, tag="lane_stuck"):
    """Engine -> supervisor: that acceptor has not read its lane for too long, and was given up.

    The engine will answer nothing on it any more, so the acceptor is of no use and is replaced.
    """

    lane: int
    incarnation: int


class EngineGone(msgspec.Struct, frozen=True, tag="engine_gone"):
    """Supervisor -> acceptor: the engine is dead, and this is why. True until EngineSpawned.

    Rank -> rank 0 -> supervisor: the same, as last words.
    """

    reason: str


class EngineSpawned(msgspec.Struct, frozen=True, tag="engine_spawned"):
    """Supervisor -> acceptor: the engine's successor is starting; attach to it."""

    incarnation: int


ControlMessage = (
    Progress
    | Ready
    | Failed
    | Crashed
    | Beat
    | Load
    | Ended
    | Stop
    | Drain
    | Leaving
    | LaneClosed
    | LaneStuck
    | EngineGone
    | EngineSpawned
)

_decoder = msgspec.json.Decoder(ControlMessage)


class ControlSocket:
    """One end of a child's control pair."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self.closed = False

    @classmethod
    def pair(cls) -> tuple[ControlSocket, socket.socket]:
        """Return the supervisor's end, and the socket to hand to the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def connect(cls, path: Path) -> ControlSocket:
        """Return the end of whoever connects to a ControlListener. Raises OSError."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.connect(str(path))
        return cls(end)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: ControlMessage) -> bool:
        """Send without waiting; return whether the other side could take it."""
        try:
            self._socket.send(msgspec.json.encode(message))
        except BlockingIOError:
            return False
        except OSError:
            self.closed = True
            return False
        return True

    def receive(self) -> Iterator[ControlMessage]:
        """Yield what is waiting. `closed` turns true at the end of the other side."""
        while not self.closed:
            try:
                packet = self._socket.recv(_PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.closed = True
                return
            yield _decoder.decode(packet)

    def close(self) -> None:
        self.closed = True
        self._socket.close()


class ControlListener:
    """A socket at `path` that others connect to, each of them a process known by its pid."""

    def __init__(self, path: Path, *, backlog: int) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._socket.listen(backlog)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Iterator[tuple[int, ControlSocket]]:
        """Yield the pid and the socket of each that has connected. Does not wait."""
        while True:
            try:
                end, _ = self._socket.accept()
            except BlockingIOError:
                return
            # unix(7): struct ucred, of the process that has called connect().
            credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            yield _UCRED.unpack(credentials)[0], ControlSocket(end)

    def close(self) -> None:
        """Nobody can connect any more; those that have stay."""
        self._socket.close()
        self._path.unlink(missing_ok=True)
