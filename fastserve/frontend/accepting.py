"""How an acceptor takes its share of new connections.

With a shared socket the kernel wakes one waiting acceptor per connection (EPOLLEXCLUSIVE), and it
tends to be the same one. So each looks at the board first: one that holds more connections than the
least loaded nudges that one, and defers. If nobody has taken the connection after a few
milliseconds it does: the other may be busy, stopped or dead, and no connection waits for a share.

The event loop has no exclusive wait, so a socket is registered with the loop's own epoll in its
stead. It is edge-triggered there: a deferred connection must not make the loop spin.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastserve.listening import let_nobody_connect
from fastserve.log import get_logger
from fastserve.readable import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from ssl import SSLContext

    from fastserve.metrics.board import Board, Slot

log = get_logger("accepting")

# A connection is deferred at most so often, so long each: as a whole less than anyone notices.
_DEFERRALS_MAX = 5
_DEFERRAL_S = 0.001
# Out of descriptors or memory: what helps is that connections close.
_EXHAUSTED_BACKOFF_S = 0.1
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# So many more than the least loaded holds are no imbalance: a sixteenth.
_SLACK_SHIFT = 4
_SEEN_INTERVAL_S = 0.25
_LEAVE_LOOK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TLS:
    """How connections to the port are encrypted. Those to a Unix socket never are."""

    context: SSLContext
    handshake_timeout_s: float


class Accepting:
    """Accepts on listening sockets until stopped.

    `board` None: take every connection. `connections_max` bounds those in whatever state, also in
    a TLS handshake, which no protocol knows of yet; one more is closed at once.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        lane: int,
        slot: Slot,
        board: Board | None,
        connections_max: int,
        protocol: Callable[[], asyncio.Protocol],
        tls: TLS | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners = listeners
        self._lane = lane
        self._slot = slot
        self._board = board
        self._connections_max = connections_max
        self._protocol = protocol
        self._tls = tls
        # How often in a row each socket's first connection has been left to another.
        self._deferrals = dict.fromkeys(listeners, 0)
        self._look: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.active = False
        self._seen_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Begin to accept."""
        self.active = True
        self._be_seen()
        self._listen()
        if self._board is not None:
            self._loop.add_reader(self._board.nudge_fd(self._lane), self._on_nudge)
            await self._wait_exclusively()

    async def leave(self, *, patience_s: float, timeout_s: float) -> None:
        """Go together with the others, after at most `patience_s`: take everybody who waits,
        whoever's turn it is, and end the sockets.

        So nobody is reset in the queue, and whoever comes later is refused: also where an acceptor
        that stands still keeps a shared socket open.
        """
        give_up_s = self._loop.time() + patience_s
        self._be_unseen()
        while self._board is not None and self._loop.time() < give_up_s:
            if not self._board.others_seen(self._lane, now_ns=time.monotonic_ns()):
                break
            await asyncio.sleep(_LEAVE_LOOK_S)
        self.stop()
        for listener in self._listeners:
            # One of our own, or ours together; any other is the supervisor's to end.
            ours = self._board is not None or listener.family != socket.AF_UNIX
            if ours:
                let_nobody_connect(listener)
            while self._take(listener):
                pass
            if ours:
                with contextlib.suppress(OSError):  # another was faster
                    listener.shutdown(socket.SHUT_RD)
            listener.close()
        await self.settle(timeout_s=timeout_s)

    async def settle(self, *, timeout_s: float) -> None:
        """Wait until every connection that was taken has its protocol."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def stop(self) -> None:
        """Accept no more. What waits in the sockets is for the other acceptors."""
        if not self.active:
            return
        self.active = False
        self._listen_no_more()
        self._be_unseen()
        for timer in (self._look, self._retry):
            if timer is not None:
                timer.cancel()
        if self._board is not None:
            self._loop.remove_reader(self._board.nudge_fd(self._lane))
            # One that was woken for a connection and goes must wake another for it.
            _, lane = self._board.least_loaded(now_ns=time.monotonic_ns())
            self._board.nudge(lane)

    def _listen(self) -> None:
        for listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept)

    def _listen_no_more(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())

    async def _wait_exclusively(self) -> None:
        # The loop registers a reader when it next polls; only then is there one to replace.
        await asyncio.sleep(0.001)
        # A duplicate: the epoll object closes its descriptor when it is collected.
        # It is uvloop's, and in no interface.
        backend_fd = self._loop._get_backend_id()  # type: ignore[attr-defined] # noqa: SLF001
        epoll = select.epoll.fromfd(os.dup(backend_fd))
        for listener in self._listeners:
            epoll.unregister(listener.fileno())
            epoll.register(
                listener.fileno(), select.EPOLLIN | select.EPOLLEXCLUSIVE | select.EPOLLET
            )
        epoll.close()

    def _be_seen(self) -> None:
        self._slot.seen()
        self._seen_timer = self._loop.call_later(_SEEN_INTERVAL_S, self._be_seen)

    def _be_unseen(self) -> None:
        if self._seen_timer is not None:
            self._seen_timer.cancel()
        self._slot.unseen()

    def _on_nudge(self) -> None:
        assert self._board is not None
        os.eventfd_read(self._board.nudge_fd(self._lane))
        self._accept()

    def _accept(self) -> None:
        """Take connections while there are any and it is our turn."""
        for listener in self._listeners:
            self._accept_on(listener)
        if self._look is None and any(self._deferrals.values()):
            self._look = self._loop.call_later(_DEFERRAL_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._accept()

    def _accept_on(self, listener: socket.socket) -> None:
        while self.active and not self._defers(listener) and self._take(listener):
            pass

    def _take(self, listener: socket.socket) -> bool:
        """Accept one connection; return whether there may be another."""
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            self._deferrals[listener] = 0
            return False
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._back_off(error)
                return False
            # Another acceptor has ended the socket; or that connection alone is gone already, for
            # which accept(2) names several ways.
            return error.errno != errno.EINVAL
        self._deferrals[listener] = 0
        if self._slot.connections >= self._connections_max:
            log.warning_burst("closing a connection: too many", most=self._connections_max)
            connection.close()
            return True
        self._slot.connections += 1
        task = self._loop.create_task(self._connect(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def _defers(self, listener: socket.socket) -> bool:
        """Leave what waits, if anything does, to one that holds fewer; but not for ever.

        It counts from look to look, a deferral apart: who comes in between is another.
        """
        if self._board is None:
            return False
        fewest, lane = self._board.least_loaded(now_ns=time.monotonic_ns())
        if self._slot.connections <= fewest + (fewest >> _SLACK_SHIFT):
            return False
        if not wait_readable(listener.fileno(), timeout_s=0.0):
            self._deferrals[listener] = 0  # whoever was left to another has been taken
            return True
        if self._look is None:
            if self._deferrals[listener] >= _DEFERRALS_MAX:
                return False
            self._deferrals[listener] += 1
        self._board.nudge(lane)
        return True

    def _back_off(self, error: OSError) -> None:
        """Out of something that only comes back when connections close: wait, and do not spin."""
        log.warning_burst("cannot accept", error=error.strerror)
        if not self.active:
            return
        if self._board is None:
            # Level-triggered: the connection that cannot be taken would wake the loop at once.
            self._listen_no_more()
            self._retry_in(_EXHAUSTED_BACKOFF_S, self._listen)
        else:
            self._retry_in(_EXHAUSTED_BACKOFF_S, self._accept)

    def _retry_in(self, delay_s: float, callback: Callable[[], None]) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._retry = self._loop.call_later(delay_s, callback)

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            if self._tls is None or connection.family == socket.AF_UNIX:
                await self._loop.connect_accepted_socket(self._protocol, connection)
            else:
                await self._loop.connect_accepted_socket(
                    self._protocol,
                    connection,
                    ssl=self._tls.context,
                    ssl_handshake_timeout=self._tls.handshake_timeout_s,
                )
        except OSError as error:  # a failed handshake among them: scanners, plain HTTP, bad clients
            log.debug("connection failed", error=str(error))
            connection.close()
            self._slot.connections -= 1
