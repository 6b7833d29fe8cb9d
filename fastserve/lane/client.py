"""The acceptor's end of a lane: a PULL socket of its own, and a PUSH socket to the ingress.

Nothing here blocks. The owner watches `fd` and calls `receive` when it becomes readable; ZeroMQ
signals that descriptor on an edge, so `receive` must be run until it yields nothing more.

A frame costs each side far more than the message in it (a signature, a thread of ZeroMQ's that
wakes up, an engine that does). So what is sent in one round of the owner's loop leaves in one
frame, after a millisecond at most.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, cast

import zmq

from fastserve.errors import Overloaded
from fastserve.lane.codec import BadFrame, Codec
from fastserve.lane.events import NOBLOCK, POLLIN, POLLOUT, events_of
from fastserve.lane.messages import Attach, Detach, ToAcceptor, ToEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# How long a message may wait for company: a request that comes in a burst of many must not wait
# until all of them are prepared.
_COMPANY_S = 0.001


def ingress_address(run_directory: Path, *, engine_incarnation: int, rank: int = 0) -> str:
    """Return where that incarnation of the engine listens for every acceptor.

    Each has its own, so that no message meant for a dead one reaches its successor. So has each of
    its ranks, where there are several: to those other than 0, rank 0 speaks.
    """
    suffix = f"-{rank}" if rank else ""
    return f"ipc://{run_directory}/ingress-{engine_incarnation}{suffix}"


class LaneClient:
    """One incarnation's end of lane `lane`; it attaches when made and detaches when closed.

    `defer` calls back once the owner's loop has done what it is doing; without it every message
    leaves at once.
    """

    def __init__(
        self,
        *,
        lane: int,
        incarnation: int,
        engine_incarnation: int,
        run_directory: Path,
        key: bytes,
        in_flight_frames_max: int,
        defer: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.lane = lane
        self.incarnation = incarnation
        self.bad_frames = 0
        self._codec = Codec(key)
        self._defer = defer
        self._messages_max = in_flight_frames_max
        self._outgoing: list[ToEngine] = []
        self._flush_at_s = 0.0
        self._context = zmq.Context()
        self._outputs = self._context.socket(zmq.PULL)
        self._outputs.set_hwm(in_flight_frames_max)
        address = f"ipc://{run_directory}/lane-{lane}-{incarnation}-{engine_incarnation}"
        self._outputs.bind(address)
        self.fd = cast("int", self._outputs.getsockopt(zmq.FD))
        """Readable when messages may be waiting (edge-triggered)."""
        self._ingress = self._context.socket(zmq.PUSH)
        self._ingress.set_hwm(in_flight_frames_max)
        self._ingress.connect(ingress_address(run_directory, engine_incarnation=engine_incarnation))
        self._outgoing.append(Attach(lane=lane, incarnation=incarnation, address=address))
        self.flush()

    @property
    def readable(self) -> bool:
        """Whether messages are waiting."""
        if self._outputs.closed:
            return False
        return bool(events_of(self._outputs) & POLLIN)

    def send(self, message: ToEngine) -> None:
        """Queue `message` for the engine. Raises Overloaded when the queue is full, or closed."""
        if self._ingress.closed:
            # The loop of an acceptor that ends goes on for a moment, and clients still ask.
            raise Overloaded(
                "this acceptor is ending; others may take the request", rejection="lane_full"
            )
        now_s = time.monotonic()
        if not self._outgoing:
            if not events_of(self._ingress) & POLLOUT:
                raise _full()
            self._flush_at_s = now_s + _COMPANY_S
            if self._defer is not None:
                self._defer(self.flush)
        elif len(self._outgoing) >= self._messages_max:
            raise _full()
        self._outgoing.append(message)
        if self._defer is None or now_s >= self._flush_at_s:
            self.flush()

    def flush(self) -> None:
        """Send what waits for company, or keep it where ZeroMQ does not take it after all."""
        if self._outgoing and not self._ingress.closed:
            with contextlib.suppress(zmq.Again):
                self._ingress.send(self._codec.encode_all(self._outgoing), NOBLOCK)
                self._outgoing = []

    def receive(self, *, frames_max: int) -> Iterator[list[ToAcceptor]]:
        """Yield what is in each frame that is waiting; count and drop what we did not sign.

        Whoever got `frames_max` must come again: the descriptor will not say that more wait.
        """
        for number in range(frames_max):
            # The first is there: whoever calls has been told so. For the others asking first costs
            # less than the exception.
            if self._outputs.closed or (number and not self.readable):
                return
            try:
                frame = self._outputs.recv(NOBLOCK)
            except zmq.Again:
                return
            try:
                yield cast("list[ToAcceptor]", self._codec.decode_all(frame))
            except BadFrame:
                self.bad_frames += 1
                yield []

    def take_bad_frames(self) -> int:
        """Return how many frames were dropped since the last call."""
        bad_frames, self.bad_frames = self.bad_frames, 0
        return bad_frames

    def close(self, *, linger_ms: int = 200) -> None:
        """Detach and close; what is queued has `linger_ms` to leave."""
        # If the queue is full the engine still hears it: from the supervisor.
        self._outgoing.append(Detach(lane=self.lane, incarnation=self.incarnation))
        self.flush()
        self._outputs.close(linger=0)
        self._ingress.close(linger=linger_ms)
        self._context.term()


def _full() -> Overloaded:
    return Overloaded("the engine does not keep up with new requests", rejection="lane_full")
