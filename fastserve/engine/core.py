"""The engine core: receive, step, send.

One thread, one loop. While the adapter waits inside a step it pumps, and the core takes messages
meanwhile: so a request that is aborted in the middle of a long step is gone at once. Whoever talks
to the core (lanes, the supervisor) is one descriptor in one select().

Knows nothing of the inference library, of HTTP or of text.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, assert_never

from fastserve.control import Beat, LaneClosed, LaneStuck, Progress, Ready, Stop
from fastserve.engine.admission import Admission
from fastserve.engine.fanout import Fanout
from fastserve.engine.figures import Figures
from fastserve.engine.interface import StepOutputs, finish_of
from fastserve.errors import GenerationFailed, InvalidRequest
from fastserve.generation import Finish, FinishReason, RequestId
from fastserve.lane.ids import LANE_SHIFT, is_of_incarnation
from fastserve.lane.messages import (
    Abort,
    Attach,
    Attached,
    Detach,
    Heartbeat,
    Submit,
    SubmitGroup,
)
from fastserve.log import get_logger
from fastserve.metrics.meter import Meter
from fastserve.readable import wait_readable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from fastserve.control import ControlSocket
    from fastserve.engine.admission import Queue
    from fastserve.engine.interface import Engine
    from fastserve.generation import ModelCard
    from fastserve.lane.messages import ToEngine
    from fastserve.lane.server import LaneServer

log = get_logger("engine")

# Whoever has taken the messages that were there need not look again so soon.
_JUST_S = 0.0002


class EngineCore:
    """Drives one adapter for every lane; run() returns when the supervisor says so, or is gone."""

    def __init__(
        self,
        engine: Engine,
        *,
        lanes: LaneServer,
        control: ControlSocket,
        heartbeat_interval_s: float,
        admission: Admission | None = None,
        meter: Meter | None = None,
    ) -> None:
        """`admission` None: there is no limit; `meter` None: nobody reads the figures."""
        self._engine = engine
        self._lanes = lanes
        self._control = control
        self._admission = admission or Admission(max_queued_requests=0, max_queued_tokens=0)
        self._heartbeat_interval_s = heartbeat_interval_s
        self._heartbeat_due_s = time.monotonic()
        self._fanout = Fanout()
        self._figures = Figures(meter or Meter.unread())
        self._in_flight: dict[int, set[RequestId]] = {}
        self._card: ModelCard | None = None
        self._ready = False
        self._stopping = False
        self._served_s = 0.0
        self._steps = 0

    def start(self) -> None:
        """Load the model; the acceptors learn what it is as soon as that is read.

        Raises StartError, and SystemExit if told to stop meanwhile.
        """
        self._card = self._engine.describe()
        self._pump()
        self._load()
        self._ready = True
        self._heartbeat_due_s = time.monotonic()
        self._control.send(Ready(self._card.name))

    def _load(self) -> None:
        self._engine.load(self._on_progress)

    def run(self) -> None:
        """Receive, step, send -- until told to stop."""
        while not self._stopping:
            if self._engine.has_work():
                began_s = time.monotonic()
                if began_s - self._served_s > _JUST_S:
                    self._pump()
                step = self._engine.step(self._pump)
                took_s = time.monotonic() - began_s
                self._deliver(step)
                self._steps += 1
                self._figures.step(took_s, batch_size=len(step.request_ids))
            else:
                self._serve(fds=(), timeout_s=self._heartbeat_interval_s)

    def _on_progress(self, share: float) -> None:
        self._control.send(Progress(share))
        self._pump()
        if self._stopping:
            # Nobody waits for the model any more, and loading it may take minutes.
            raise SystemExit(0)

    def _pump(self, *, fd: int | None = None, timeout_s: float = 0.0) -> bool:
        """Serve until `fd` is readable (True) or `timeout_s` has passed (False): a Pump."""
        fds = () if fd is None else (fd,)
        deadline_s = time.monotonic() + timeout_s
        while True:
            if fd in self._serve(fds=fds, timeout_s=deadline_s - time.monotonic()):
                return True
            if self._stopping or time.monotonic() >= deadline_s:
                return False

    def _serve(self, *, fds: tuple[int, ...], timeout_s: float) -> list[int]:
        """Take every message that waits, or wait for the next; return which of `fds` is readable.

        ZeroMQ's descriptor signals edges, so the lanes are read dry before every wait.
        """
        if self._receive():
            timeout_s = 0.0
        now_s = self._served_s = time.monotonic()
        self._beat(now_s)
        wait_s = max(min(timeout_s, self._heartbeat_due_s - now_s), 0.0)
        if wait_s:
            self._lanes.send_gathered()
        control_fd = self._control.fileno()
        readable = wait_readable(self._lanes.fd, control_fd, *fds, timeout_s=wait_s)
        if not readable:
            self._served_s = time.monotonic()  # nothing has come until now
        if control_fd in readable:
            self._obey()
        return readable

    def _receive(self) -> int:
        received = 0
        for message in self._lanes.receive():
            received += 1
            self._handle(message)
        for lane in self._lanes.flush():
            log.warning("lane full for too long, given up", lane=lane)
            self._control.send(LaneStuck(lane, self._lanes.incarnation(lane)))
            self._close_lane(lane)
        return received

    def _obey(self) -> None:
        for message in self._control.receive():
            match message:
                case LaneClosed(lane, incarnation):
                    self._detach(lane, incarnation)
                case Stop():
                    self._stopping = True
        if self._control.closed:
            self._stopping = True  # nothing outlives the supervisor

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit((message,))
            case SubmitGroup(requests):
                self._submit(requests)
            case Abort(request_ids):
                self._forget(request_ids)
            case Attach():
                self._attach(message)
            case Detach():
                self._detach(message.lane, message.incarnation)
            case _:
                assert_never(message)

    def _submit(self, requests: Sequence[Submit]) -> None:
        """Take the requests of one exchange, which came together, or refuse them all."""
        first_id = requests[0].request_id
        lane = first_id >> LANE_SHIFT
        in_flight = self._in_flight.get(lane)
        if in_flight is None:
            log.warning_burst("submit on a lane that is not attached", id=first_id)
            self._figures.stale_submit()
            return
        if not is_of_incarnation(first_id, self._lanes.incarnation(lane)):
            # Of an acceptor that died, come after the Attach of its successor: nobody would ever
            # abort it.
            log.warning_burst("submit of a dead acceptor", id=first_id)
            self._figures.stale_submit()
            return
        if self._admission.limited and self._ready and (finish := self._no_room(requests)):
            for request in requests:
                self._refuse(request.request_id, finish)
            return
        for request in requests:
            self._add(request, in_flight)

    def _add(self, request: Submit, in_flight: set[RequestId]) -> None:
        try:
            if not self._ready:
                raise GenerationFailed("the model is still loading")
            self._engine.add(request)
        except (InvalidRequest, GenerationFailed) as error:
            self._refuse(request.request_id, finish_of(error))
            return
        in_flight.add(request.request_id)
        if request.gather:
            self._fanout.gather(request.request_id)

    def _queue(self) -> Queue:
        return self._engine.queue()

    @property
    def _idle(self) -> bool:
        """Whether nothing is in flight."""
        return not any(self._in_flight.values())

    def _no_room(self, requests: Sequence[Submit]) -> Finish | None:
        queue = self._queue()
        refusal = self._admission.refusal(
            [len(request.prompt_token_ids) for request in requests],
            queue=queue,
            now_s=time.monotonic(),
        )
        if refusal is None:
            return None
        words = self._admission.words(refusal.reason, queue=queue)
        if self._idle:
            # No later moment will suit it better, so it must not be told to come again.
            return finish_of(
                InvalidRequest(f"the request is too large even for an idle engine: {words}")
            )
        return Finish(reason=FinishReason.ERROR, error=words, refusal=refusal)

    def _refuse(self, request_id: RequestId, finish: Finish) -> None:
        refused = StepOutputs()
        refused.end(request_id, finish)
        self._deliver(refused)

    def _attach(self, message: Attach) -> None:
        if message.incarnation < self._lanes.incarnation(message.lane):
            return
        self._close_lane(message.lane)
        self._lanes.attach(message.lane, incarnation=message.incarnation, address=message.address)
        self._in_flight[message.lane] = set()
        self._greet(message.lane)

    def _greet(self, lane: int) -> None:
        assert self._card is not None, "lanes are read only once the card is known"
        self._lanes.send(lane, Attached(self._card))
        self._lanes.send(lane, self._heartbeat())

    def _detach(self, lane: int, incarnation: int) -> None:
        if incarnation == self._lanes.incarnation(lane):
            self._close_lane(lane)

    def _close_lane(self, lane: int) -> None:
        request_ids = self._in_flight.pop(lane, ())
        self._forget(request_ids)
        self._figures.lane_closed(num_aborted=len(request_ids))
        self._lanes.detach(lane)

    def _forget(self, request_ids: Collection[RequestId]) -> None:
        if request_ids:
            self._engine.abort(request_ids)
            self._fanout.forget(request_ids)
            self._ended(request_ids)

    def _ended(self, request_ids: Iterable[int]) -> None:
        number = 0
        for request_id in request_ids:
            in_flight = self._in_flight.get(request_id >> LANE_SHIFT)
            # One that was refused, or is aborted after its end, is not there.
            if in_flight and request_id in in_flight:
                in_flight.discard(RequestId(request_id))
                number += 1
        self._admission.ended(number)

    def _deliver(self, step: StepOutputs) -> None:
        for lane, outputs in self._fanout.part(step).items():
            self._lanes.send(lane, outputs)
        if step.finishes:
            self._ended(step.request_ids[index] for index in step.finishes)

    def _beat(self, now_s: float) -> None:
        if now_s < self._heartbeat_due_s:
            return
        self._heartbeat_due_s = now_s + self._heartbeat_interval_s
        self._admission.look(now_s)
        self._tell(self._heartbeat())

    def _tell(self, heartbeat: Heartbeat) -> None:
        self._lanes.send_all(heartbeat)
        self._figures.beat(heartbeat, self._lanes)
        busy = heartbeat.num_running + heartbeat.num_waiting > 0
        self._control.send(Beat(ready=self._ready, busy=busy, steps=heartbeat.steps))

    def _heartbeat(self) -> Heartbeat:
        stats = self._engine.stats()
        return Heartbeat(
            ready=self._ready,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            steps=self._steps,
            kv_cache_usage=stats.kv_cache_usage,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
        )
