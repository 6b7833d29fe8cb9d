"""The engine's end of every lane: one ingress to read, one PUSH socket per attached acceptor.

No send ever blocks the engine. What a full lane does not take is held here; a lane that has been
full for `full_timeout_s`, or has as many frames held as it has in flight, is given up: its acceptor
is stopped or dead.

A frame costs each side more than a few tokens do. An engine whose steps take less than a
millisecond has those of one millisecond leave together, unless it has nothing else to do.

Knows nothing of the engine core, which decides what a message means.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import zmq

from fastserve.lane.client import ingress_address
from fastserve.lane.codec import BadFrame, Codec
from fastserve.lane.events import NOBLOCK, POLLIN, events_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from fastserve.lane.messages import ToAcceptor, ToEngine


# After a frame, how long the next message waits for company.
_COMPANY_S = 0.001
COMPANY_MESSAGES_MAX = 256


class Outlet:
    """One reader, such as an attached acceptor: the socket that goes to it, the frames that the
    socket did not take yet, and the messages that are `gathered` for the next."""

    __slots__ = ("full_since_s", "gathered", "held", "incarnation", "sent_s", "socket")

    def __init__(self, socket: zmq.Socket[bytes], *, incarnation: int) -> None:
        self.socket = socket
        self.incarnation = incarnation
        self.held: deque[bytes] = deque()
        self.gathered: list[ToAcceptor] = []
        self.sent_s = 0.0
        self.full_since_s = 0.0

    def send(self, frame: bytes) -> None:
        """Send, or hold while the reader is full."""
        if not self.held:
            try:
                self.socket.send(frame, NOBLOCK)
            except zmq.Again:
                self.full_since_s = time.monotonic()
            else:
                return
        self.held.append(frame)

    def flush(self, now_s: float) -> None:
        while self.held:
            try:
                self.socket.send(self.held[0], NOBLOCK)
            except zmq.Again:
                return
            self.held.popleft()
            self.full_since_s = now_s


class LaneServer:
    """Bound for its whole life; lanes come and go by `attach` and `detach`.

    It counts what it drops: frames that we did not sign, or for lanes that are not there.
    """

    def __init__(
        self,
        *,
        run_directory: Path,
        engine_incarnation: int,
        key: bytes,
        in_flight_frames_max: int,
        full_timeout_s: float,
        rank: int = 0,
    ) -> None:
        """`rank`: of several, which this one is; the ingress of 0 is where acceptors submit."""
        self.bad_frames = 0
        self.frames_not_attached = 0
        self.frames_detached = 0
        self._codec = Codec(key)
        self._in_flight_frames_max = in_flight_frames_max
        self._full_timeout_s = full_timeout_s
        self._lanes: dict[int, Outlet] = {}
        # Whether any of them may have something held or gathered.
        self._unsent = False
        self._context = zmq.Context()
        self._ingress = self._context.socket(zmq.PULL)
        self._ingress.set_hwm(in_flight_frames_max)
        self._address_of = functools.partial(
            ingress_address, run_directory, engine_incarnation=engine_incarnation
        )
        self._ingress.bind(self._address_of(rank=rank))
        self.fd = cast("int", self._ingress.getsockopt(zmq.FD))
        """Readable when messages may be waiting (edge-triggered)."""

    def receive(self) -> Iterator[ToEngine]:
        """Yield every message that is waiting; count and drop what we did not sign."""
        # Asking first costs a tenth of the exception at the end.
        while events_of(self._ingress) & POLLIN:
            frame = self._ingress.recv(NOBLOCK)
            try:
                yield from cast("list[ToEngine]", self._codec.decode_all(frame))
            except BadFrame:
                self.bad_frames += 1

    def incarnation(self, lane: int) -> int:
        """Return the incarnation attached to `lane`, -1 for none."""
        return self._lanes[lane].incarnation if lane in self._lanes else -1

    def attach(self, lane: int, *, incarnation: int, address: str) -> None:
        """Answer `lane` at `address` from now on."""
        self.detach(lane)
        self._lanes[lane] = self._outlet(address, incarnation=incarnation)

    def _outlet(self, address: str, *, incarnation: int) -> Outlet:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(self._in_flight_frames_max)
        socket.connect(address)
        return Outlet(socket, incarnation=incarnation)

    def relay(self, ranks: Iterable[int]) -> Relay:
        """Return the way from here, rank 0, to the ingresses of `ranks`."""
        outlets = {
            rank: self._outlet(self._address_of(rank=rank), incarnation=rank) for rank in ranks
        }
        return Relay(outlets, self._codec, frames_held_max=self._in_flight_frames_max)

    def detach(self, lane: int) -> None:
        """Close `lane`, dropping what it has not taken; no harm if it is not attached."""
        if closed := self._lanes.pop(lane, None):
            self.frames_detached += len(closed.held)
            closed.socket.close(linger=0)

    def send(self, lane: int, message: ToAcceptor) -> None:
        """Send, or hold while the lane is full. A lane that is not attached drops the message.

        Until `send_gathered` it may wait for others, for a millisecond.
        """
        target = self._lanes.get(lane)
        if target is None:
            self.frames_not_attached += 1
            return
        target.gathered.append(message)
        now_s = time.monotonic()
        is_due = now_s - target.sent_s >= _COMPANY_S
        if is_due or len(target.gathered) >= COMPANY_MESSAGES_MAX:
            self._send_gathered(target, now_s)
        else:
            self._unsent = True

    def send_gathered(self) -> None:
        """Let nothing wait for company any more; to be called before every wait."""
        if self._unsent:
            for lane in self._lanes.values():
                if lane.gathered:
                    self._send_gathered(lane, time.monotonic())

    def _send_gathered(self, target: Outlet, now_s: float) -> None:
        frame = self._codec.encode_all(target.gathered)
        target.gathered.clear()
        target.sent_s = now_s
        target.send(frame)
        if target.held:
            self._unsent = True

    def send_all(self, message: ToAcceptor) -> None:
        """Send `message` to every attached lane."""
        for lane in self._lanes:
            self.send(lane, message)

    def held(self) -> dict[int, int]:
        """Return how many frames each attached lane has not taken yet."""
        return {number: len(lane.held) for number, lane in self._lanes.items()}

    def take_drops(self) -> dict[str, int]:
        """Return how many frames were dropped since the last call, and why."""
        drops = {
            "bad": self.bad_frames,
            "not_attached": self.frames_not_attached,
            "detached": self.frames_detached,
        }
        self.bad_frames = self.frames_not_attached = self.frames_detached = 0
        return drops

    def flush(self) -> list[int]:
        """Send what is held or due; return the lanes that have been full for too long."""
        if not self._unsent:
            return []
        stalled = []
        now_s = time.monotonic()
        for number, lane in self._lanes.items():
            if lane.gathered and now_s - lane.sent_s >= _COMPANY_S:
                self._send_gathered(lane, now_s)
            if lane.held:
                lane.flush(now_s)
                overdue = now_s - lane.full_since_s > self._full_timeout_s
                if lane.held and (overdue or len(lane.held) > self._in_flight_frames_max):
                    stalled.append(number)
        self._unsent = any(lane.held or lane.gathered for lane in self._lanes.values())
        return stalled

    def close(self, *, linger_ms: int = 200) -> None:
        """Close every socket; what is queued has `linger_ms` to leave."""
        self.send_gathered()
        for lane in self._lanes.values():
            lane.socket.close(linger=linger_ms)
        self._lanes.clear()
        self._ingress.close(linger=0)
        self._context.term()


class Relay:
    """From rank 0 to the other ranks: what acceptors have sent, in the order in which they did.

    Nothing here blocks, and nothing is dropped: a rank that does not read is as good as dead, and
    whoever watches the ranks ends it.
    """

    def __init__(self, outlets: dict[int, Outlet], codec: Codec, *, frames_held_max: int) -> None:
        self._outlets = outlets
        self._codec = codec
        self._frames_held_max = frames_held_max

    def send(self, rank: int, message: ToEngine) -> None:
        self._outlets[rank].send(self._codec.encode(message))

    def send_all(self, message: ToEngine) -> None:
        """Send `message` to every rank but this."""
        frame = self._codec.encode(message)
        for outlet in self._outlets.values():
            outlet.send(frame)

    def full(self, rank: int) -> bool:
        """Whether so much is held for `rank` that it should be given no more requests."""
        return len(self._outlets[rank].held) >= self._frames_held_max

    def flush(self) -> None:
        """Send what is held."""
        for outlet in self._outlets.values():
            if outlet.held:
                outlet.flush(time.monotonic())

    def close(self) -> None:
        """Drop what is held: to be called before the LaneServer is closed."""
        for outlet in self._outlets.values():
            outlet.socket.close(linger=0)
        self._outlets.clear()
