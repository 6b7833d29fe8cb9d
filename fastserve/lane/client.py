"""The acceptor's end of a lane: a PULL socket of its own, and a PUSH socket to the ingress.

Nothing here blocks. The owner watches `fd` and calls `receive` when it becomes readable; ZeroMQ
signals that descriptor on an edge, so `receive` must be run until it yields nothing more.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

import zmq

from fastserve.errors import Overloaded
from fastserve.lane.codec import BadFrame, Codec
from fastserve.lane.messages import Attach, Detach, ToAcceptor, ToEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def ingress_address(run_directory: Path, *, engine_incarnation: int) -> str:
    """Return where that incarnation of the engine listens for every acceptor.

    Each has its own, so that no message meant for a dead one reaches its successor.
    """
    return f"ipc://{run_directory}/ingress-{engine_incarnation}"


class LaneClient:
    """One incarnation's end of lane `lane`; it attaches when made and detaches when closed."""

    def __init__(
        self,
        *,
        lane: int,
        incarnation: int,
        engine_incarnation: int,
        run_directory: Path,
        key: bytes,
        in_flight_frames_max: int,
    ) -> None:
        self.lane = lane
        self.incarnation = incarnation
        self.bad_frames = 0
        self._codec = Codec(key)
        self._context = zmq.Context()
        self._outputs = self._context.socket(zmq.PULL)
        self._outputs.set_hwm(in_flight_frames_max)
        address = f"ipc://{run_directory}/lane-{lane}-{incarnation}-{engine_incarnation}"
        self._outputs.bind(address)
        self._ingress = self._context.socket(zmq.PUSH)
        self._ingress.set_hwm(in_flight_frames_max)
        self._ingress.connect(ingress_address(run_directory, engine_incarnation=engine_incarnation))
        self.send(Attach(lane=lane, incarnation=incarnation, address=address))

    @property
    def fd(self) -> int:
        """Readable when messages may be waiting (edge-triggered)."""
        return cast("int", self._outputs.getsockopt(zmq.FD))

    def send(self, message: ToEngine) -> None:
        """Queue `message` for the engine. Raises Overloaded when the queue is full, or closed."""
        if self._ingress.closed:
            # The loop of an acceptor that ends goes on for a moment, and clients still ask.
            raise Overloaded("this acceptor is ending; others may take the request")
        try:
            self._ingress.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise Overloaded("the engine does not keep up with new requests") from None

    def receive(self, *, messages_max: int) -> Iterator[ToAcceptor]:
        """Yield the messages that are waiting; count and drop what we did not sign.

        Whoever got `messages_max` must come again: the descriptor will not say that more wait.
        """
        if self._outputs.closed:
            return
        for _ in range(messages_max):
            # Asking first costs a tenth of the exception.
            if not cast("int", self._outputs.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            frame = self._outputs.recv(zmq.NOBLOCK)
            try:
                yield cast("ToAcceptor", self._codec.decode(frame))
            except BadFrame:
                self.bad_frames += 1

    def take_bad_frames(self) -> int:
        """Return how many frames were dropped since the last call."""
        bad_frames, self.bad_frames = self.bad_frames, 0
        return bad_frames

    def close(self, *, linger_ms: int = 200) -> None:
        """Detach and close; what is queued has `linger_ms` to leave."""
        # If the queue is full the engine still hears it: from the supervisor.
        with contextlib.suppress(Overloaded):
            self.send(Detach(lane=self.lane, incarnation=self.incarnation))
        self._outputs.close(linger=0)
        self._ingress.close(linger=linger_ms)
        self._context.term()
