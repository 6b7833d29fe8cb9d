"""Rank 0 of several: the engine core that also dispatches to the others, and speaks for all.

Acceptors and the supervisor see one engine. Each request is run here or handed on to another rank,
which answers it by itself; heartbeats and readiness are those of all ranks together; and the end of
any rank is the end of this process, so that the supervisor acts as it does on any dead engine.

others.py has the other ranks, dispatch.py which of them a request is for.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.control import Ended, EngineGone, Failed, LaneStuck, Load, Ready
from fastserve.engine.admission import Admission, Queue
from fastserve.engine.core import EngineCore
from fastserve.engine.cpus import available_cpus
from fastserve.engine.dispatch import Dispatcher
from fastserve.engine.others import OtherRanks
from fastserve.engine.pulse import Pulse
from fastserve.engine.rank import settings_of
from fastserve.engine.registry import make_engine
from fastserve.errors import EngineDead, StartError
from fastserve.lane.messages import Abort, Attach, Detach, Heartbeat
from fastserve.lane.server import LaneServer
from fastserve.log import get_logger
from fastserve.metrics.meter import Meter
from fastserve.process import EXIT_FAILED, keep_memory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from fastserve.control import ControlMessage, ControlSocket
    from fastserve.engine.arguments import EngineArguments
    from fastserve.engine.interface import Engine
    from fastserve.generation import RequestId
    from fastserve.lane.messages import Submit, ToEngine

log = get_logger("engine")

# Of the time that a process told to stop has: the rest is for everything but the other ranks.
_STOP_SHARE = 0.8


def main(control: ControlSocket, arguments: EngineArguments) -> None:
    """Be rank 0, until told to stop. Raises StartError, and SystemExit once a rank is lost."""
    server = arguments.settings.server
    others = OtherRanks(
        arguments.for_ranks(), size=server.dp_size, of_launcher=arguments.world_of_launcher
    )
    try:
        others.start()
        _serve(control, arguments, others=others)
    except BaseException:
        others.abandon("rank 0 has failed")
        raise


def _serve(control: ControlSocket, arguments: EngineArguments, *, others: OtherRanks) -> None:
    run_directory = Path(arguments.run_directory)
    lanes = LaneServer(
        run_directory=run_directory,
        engine_incarnation=arguments.incarnation,
        key=arguments.key,
        in_flight_frames_max=arguments.lane_config.in_flight_frames_max,
        full_timeout_s=arguments.lane_config.full_timeout_s,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(lanes.close)
        settings = settings_of(0, arguments.settings, cpus=available_cpus())
        engine = make_engine(settings, run_directory=run_directory)
        admission = Admission(
            max_queued_requests=settings.engine.max_queued_requests,
            max_queued_tokens=settings.engine.max_queued_tokens,
        )
        core = RankZeroCore(
            engine,
            lanes=lanes,
            control=control,
            heartbeat_interval_s=arguments.lane_config.heartbeat_interval_s,
            admission=admission,
            others=others,
            silent_timeout_s=settings.engine.stall_kill_s,
            meter=Meter(arguments.board.engine_numbers()),
        )
        stack.callback(core.close)
        try:
            core.start()
            keep_memory()
            core.run()
        except EngineDead as error:
            # First, since a launcher may kill us for it.
            control.send(EngineGone(error.message))
            log.error("rank lost", reason=error.message)
            others.abandon(error.message)
            raise SystemExit(EXIT_FAILED) from error
        others.stop(timeout_s=_STOP_SHARE * settings.server.terminate_timeout_s)
        engine.close()


class RankZeroCore(EngineCore):
    """Drives rank 0's adapter, and the `others`. Raises EngineDead when one of them is lost."""

    def __init__(
        self,
        engine: Engine,
        *,
        lanes: LaneServer,
        control: ControlSocket,
        heartbeat_interval_s: float,
        others: OtherRanks,
        silent_timeout_s: float,
        admission: Admission | None = None,
        meter: Meter | None = None,
    ) -> None:
        """`meter`: for this rank's own steps; the others' are in the heartbeats alone."""
        super().__init__(
            engine,
            lanes=lanes,
            control=control,
            heartbeat_interval_s=heartbeat_interval_s,
            admission=admission,
            meter=meter,
        )
        num_ranks = 1 + len(others.numbers)
        # The most requests that this rank, and so any, has been seen to run at once, or could.
        self._places = 0
        self._others = others
        self._relay = lanes.relay(others.numbers)
        self._dispatcher = Dispatcher(num_ranks)
        self._pulse = Pulse(num_ranks, silent_timeout_s=silent_timeout_s, now_s=time.monotonic())

    def close(self) -> None:
        """Close the way to the other ranks, before the lanes. Whatever waits for them is dropped:
        else it would be waited for, when what holds it is collected."""
        self._relay.close()

    def _load(self) -> None:
        """All ranks load at once; this engine is ready when the last is."""
        self._others.begin()
        super()._load()
        while not (self._pulse.ready or self._stopping):
            self._serve(fds=(), timeout_s=self._heartbeat_interval_s)

    def _serve(self, *, fds: tuple[int, ...], timeout_s: float) -> list[int]:
        self._relay.flush()
        readable = super()._serve(fds=(*fds, self._others.fd), timeout_s=timeout_s)
        if self._others.fd in readable:
            for rank, message in self._others.hear():
                self._hear(rank, message)
        return readable

    def _hear(self, rank: int, message: ControlMessage) -> None:
        match message:
            case Ended(request_ids):
                self._dispatcher.ended(request_ids)
                self._admission.ended(len(request_ids))
            case Load(fields):
                # A rank's own heartbeat, field for field.
                heartbeat = Heartbeat(**fields)  # type: ignore[arg-type]
                self._pulse.hear(rank, heartbeat, now_s=time.monotonic())
            case LaneStuck():
                self._control.send(message)
            case Failed(reason):
                raise StartError(reason)
            case EngineGone(reason):
                raise EngineDead(reason)
            case Ready():
                log.info("rank ready", rank=rank)

    # --- from the acceptors

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Attach):
            self._relay.send_all(message)
        elif isinstance(message, Abort):
            self._abort_elsewhere(message.request_ids)
        super()._handle(message)

    def _add(self, request: Submit, in_flight: set[RequestId]) -> None:
        if not self._ready:
            super()._add(request, in_flight)
            return
        rank = self._dispatcher.give(
            request.request_id,
            request.prompt_token_ids,
            max_tokens=request.sampling.max_tokens,
            full=[other for other in self._others.numbers if self._relay.full(other)],
        )
        if rank == 0:
            super()._add(request, in_flight)
        else:
            self._relay.send(rank, request)

    def _queue(self) -> Queue:
        """Of all ranks: what each other was given, less the places that this one would have."""
        own = super()._queue()
        self._places = max(self._places, own.num_places + self._engine.stats().num_running)
        free, queued, tokens = own.num_places, own.num_requests, float(own.num_tokens)
        for rank in self._others.numbers:
            given = self._dispatcher.given(rank)
            more = given.num_requests - self._places
            free += max(-more, 0)
            if more > 0:
                queued += more
                tokens += given.num_prompt_tokens * more / given.num_requests
        if free >= queued:
            return Queue(num_places=free - queued)
        return Queue(
            num_places=0,
            num_requests=queued - free,
            num_tokens=round(tokens * (queued - free) / queued),
        )

    @property
    def _idle(self) -> bool:
        ranks = (0, *self._others.numbers)
        return not any(self._dispatcher.given(rank).num_requests for rank in ranks)

    def _abort_elsewhere(self, request_ids: Collection[RequestId]) -> None:
        gone: dict[int, list[RequestId]] = {}
        for request_id in request_ids:
            if rank := self._dispatcher.rank_of(request_id):
                gone.setdefault(rank, []).append(request_id)
        for rank, theirs in gone.items():
            self._relay.send(rank, Abort(theirs))
            self._dispatcher.ended(theirs)

    def _detach(self, lane: int, incarnation: int) -> None:
        self._relay.send_all(Detach(lane=lane, incarnation=incarnation))
        super()._detach(lane, incarnation)

    def _close_lane(self, lane: int) -> None:
        super()._close_lane(lane)
        self._dispatcher.forget_lane(lane)

    def _ended(self, request_ids: Iterable[int]) -> None:
        ended = list(request_ids)
        super()._ended(ended)
        self._dispatcher.ended(ended)

    # --- to them, and to the supervisor

    def _heartbeat(self) -> Heartbeat:
        return self._pulse.combined(super()._heartbeat(), now_s=time.monotonic())

    def _beat(self, now_s: float) -> None:
        super()._beat(now_s)
        if silent := self._pulse.silent(now_s=now_s):
            raise EngineDead(f"rank {silent[0]} is silent: {self._others.describe(silent[0])}")
