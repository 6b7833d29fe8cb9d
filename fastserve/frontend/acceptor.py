"""The acceptor process: one event loop that ties a listening socket, a lane and the supervisor.

It starts to accept at once and answers 503 until the model is there; it is told to drain by the
supervisor, and leaves when its last exchange has ended or the time is up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import uvloop

from fastserve.control import Drain, EngineGone, EngineSpawned, Leaving, Ready
from fastserve.credentials import server_context
from fastserve.errors import EngineDead, ShuttingDown, StartError
from fastserve.frontend.accepting import TLS, Accepting
from fastserve.frontend.access import CORS, OPEN_PATHS, Access
from fastserve.frontend.exchanges import Frontend
from fastserve.frontend.liveness import Liveness
from fastserve.frontend.metered import Metered
from fastserve.frontend.model import Model
from fastserve.frontend.observing import Observer
from fastserve.frontend.preparer import Preparer
from fastserve.frontend.response_store import FOLDER, ResponseStore, StoreLimits
from fastserve.frontend.state import ServingState
from fastserve.frontend.tokens_first import TokensFirst
from fastserve.frontend.tracing import Tracer
from fastserve.http1.connection import Connection
from fastserve.http1.connections import Connections
from fastserve.http1.limits import Limits
from fastserve.lane.client import LaneClient
from fastserve.lane.ids import request_ids
from fastserve.lane.messages import Attached, Heartbeat, Outputs
from fastserve.log import get_logger
from fastserve.metrics.catalog import CONNECTIONS, LANE_BAD_FRAMES, LOOP_LAG, REQUESTS_IN_FLIGHT
from fastserve.metrics.meter import Meter
from fastserve.process import keep_memory

if TYPE_CHECKING:
    from fastserve.config_http import HTTPConfig
    from fastserve.control import ControlSocket
    from fastserve.frontend.arguments import AcceptorArguments, AccessArguments
    from fastserve.generation import ModelCard
    from fastserve.lane.messages import ToAcceptor
    from fastserve.metrics.board import Slot

log = get_logger("acceptor")

# A successor that is not ready by then accepts all the same: a refusal is better than no answer.
_SUCCESSOR_ACCEPTS_S = 3.0

# Of one turn of the event loop.
_FRAMES_MAX = 16

_LOOK_INTERVAL_S = 0.25

# Once nothing is in flight any more: for requests of which a part has come.
_HALF_SENT_S = 2.0

# After the time to drain is up: for the last error events to reach their clients.
_LAST_WORDS_S = 1.0


class _Counted(Connections):
    """The live connections, whose number the other acceptors can see."""

    def __init__(self, slot: Slot, config: HTTPConfig) -> None:
        super().__init__(
            admitted_max=config.connections_max,
            refused_max=config.connections_refused_max,
            bodies_bytes_max=config.bodies_bytes_max,
        )
        self._slot = slot

    def discard(self, connection: Connection) -> None:
        super().discard(connection)
        self._slot.connections -= 1


class Acceptor:
    """One incarnation of one acceptor."""

    def __init__(self, control: ControlSocket, arguments: AcceptorArguments) -> None:
        self._control = control
        self._arguments = arguments
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._told_to_drain: Drain | None = None
        self._ready = False
        self._receiving = False
        self._failure: StartError | None = None
        self._beginning: asyncio.Task[None] | None = None
        slot = arguments.board.slot(arguments.lane)
        self._connections = _Counted(slot, arguments.http)
        self._lane = self._attach(arguments.engine_incarnation)
        self._state = ServingState(Liveness(stall_unhealthy_s=arguments.stall_unhealthy_s))
        self._meter = Meter(arguments.board.numbers(arguments.lane))
        self._tracer = _tracer_of(arguments, self._meter)
        self._preparer = Preparer(
            name=f"preparer-{arguments.lane}",
            title=f"fastserve: preparer {arguments.lane}",
            log_level=arguments.log.level,
            log_format=arguments.log.format,
            waiting_bytes_max=arguments.http.bodies_bytes_max,
        )
        self._frontend = Frontend(
            loop=self._loop,
            engine=self._lane,
            request_ids=request_ids(lane=arguments.lane, incarnation=arguments.incarnation),
            state=self._state,
            board=arguments.board,
            info=arguments.info,
            observer=Observer(
                self._meter,
                recent=arguments.board.recent(arguments.lane),
                tracer=self._tracer,
                log_prompts=arguments.log_prompts,
            ),
            requests_in_flight_max=arguments.limits.requests_in_flight_max,
            request_timeout_s=arguments.limits.request_timeout_s,
            off_loop_bytes_min=arguments.http.off_loop_bytes_min,
            response_store=ResponseStore(
                Path(arguments.run_directory) / FOLDER,
                lane=arguments.lane,
                limits=StoreLimits(**dataclasses.asdict(arguments.responses)),
            ),
            shows_page=arguments.access.page,
            refuse_unknown_fields=arguments.refuse_unknown_fields,
            preparer=self._preparer,
            off_process_bytes_min=arguments.http.off_process_bytes_min,
        )
        self._app = TokensFirst(
            Metered(_guarded(self._frontend, arguments.access), self._meter),
            look=self._look_at_lane,
        )
        self._limits = _limits_of(arguments.http)
        self._accepting = Accepting(
            arguments.listeners,
            lane=arguments.lane,
            slot=slot,
            board=arguments.board if arguments.balanced else None,
            connections_max=arguments.http.connections_max + arguments.http.connections_refused_max,
            protocol=self._connection,
            tls=_tls_of(arguments.access),
        )

    async def run(self) -> None:
        """Serve until told to drain, or to stop, or the supervisor is gone. Raises StartError."""
        self._loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        self._loop.add_reader(self._control.fileno(), self._on_control)
        if self._arguments.incarnation == 0:
            await self._accepting.start()
        else:
            # The others serve already; whoever came to us would hear that the model is loading.
            self._loop.call_later(_SUCCESSOR_ACCEPTS_S, self._begin_to_accept)
        self._ping_later()
        self._look_at_ourselves(self._loop.time())
        await self._stop.wait()
        if self._told_to_drain is not None:
            await self._drain(self._told_to_drain)
        self._accepting.stop()
        self._connections.abort_all()
        self._lane.close()
        if self._tracer is not None:
            self._tracer.close()
        self._preparer.close()
        if self._failure is not None:
            raise self._failure

    def _connection(self) -> Connection:
        return Connection(
            self._app, limits=self._limits, connections=self._connections, loop=self._loop
        )

    def _ping_later(self) -> None:
        self._loop.call_later(self._arguments.limits.sse_ping_interval_s, self._ping)

    def _ping(self) -> None:
        self._frontend.ping_all()
        self._ping_later()

    def _look_at_ourselves(self, due_s: float) -> None:
        """Set the gauges, four times a second; how late this comes is one of them."""
        meter = self._meter
        meter.set(LOOP_LAG, max(self._loop.time() - due_s, 0.0))
        meter.set(CONNECTIONS, len(self._connections))
        meter.set(REQUESTS_IN_FLIGHT, self._frontend.num_in_flight)
        if bad_frames := self._lane.take_bad_frames():
            log.warning_burst("frames on the lane that we had not signed", frames=bad_frames)
            meter.count(LANE_BAD_FRAMES, "acceptor", by=bad_frames)
        next_s = self._loop.time() + _LOOK_INTERVAL_S
        self._loop.call_at(next_s, self._look_at_ourselves, next_s)

    # ---- the lane

    def _attach(self, engine_incarnation: int) -> LaneClient:
        lane = LaneClient(
            lane=self._arguments.lane,
            incarnation=self._arguments.incarnation,
            engine_incarnation=engine_incarnation,
            run_directory=Path(self._arguments.run_directory),
            key=self._arguments.key,
            in_flight_frames_max=self._arguments.lane_config.in_flight_frames_max,
            defer=self._loop.call_soon,
        )
        self._loop.add_reader(lane.fd, self._on_lane)
        # The descriptor signals edges, and one may have passed.
        self._loop.call_soon(self._on_lane)
        return lane

    def _on_engine_spawned(self, incarnation: int) -> None:
        self._loop.remove_reader(self._lane.fd)
        self._lane.close(linger_ms=0)
        self._lane = self._frontend.engine = self._attach(incarnation)
        self._state.liveness.begin_again()

    def _look_at_lane(self) -> None:
        """Take what has come meanwhile, unless that is what we are doing: an answer that ends may
        be followed by a request that has waited for it on its connection."""
        if not self._receiving and self._lane.readable:
            self._on_lane()

    def _on_lane(self) -> None:
        received = 0
        self._receiving = True
        try:
            for messages in self._lane.receive(frames_max=_FRAMES_MAX):
                received += 1
                for message in messages:
                    self._on_message(message)
        finally:
            self._receiving = False
        if received == _FRAMES_MAX:
            # An engine that is ahead of us must not keep the loop from everything else.
            self._loop.call_soon(self._on_lane)

    def _on_message(self, message: ToAcceptor) -> None:
        match message:
            case Outputs():
                self._frontend.on_outputs(message)
            case Heartbeat():
                self._state.liveness.observe(message, now_s=time.monotonic())
                self._lane.flush()
                self._frontend.retry_aborts()
                self._say_when_ready()
            case Attached(card):
                self._load(card)
            case _:
                assert_never(message)

    def _load(self, card: ModelCard) -> None:
        if self._state.model is not None and self._state.model.card == card:
            return  # a successor of the engine, with the same model
        try:
            self._state.model = Model.told(card, self._arguments.model)
        except StartError as error:
            self._failure = error
            self._stop.set()
        else:
            self._say_when_ready()

    def _say_when_ready(self) -> None:
        if self._ready or self._state.model is None or not self._state.liveness.ready:
            return
        self._ready = True
        keep_memory()
        self._begin_to_accept()
        self._control.send(Ready(""))

    def _begin_to_accept(self) -> None:
        if not self._accepting.active and not self._stop.is_set():
            self._beginning = self._loop.create_task(self._accepting.start())

    # ---- the supervisor

    def _on_control(self) -> None:
        for message in self._control.receive():
            match message:
                case EngineGone(reason):
                    self._frontend.on_engine_gone(reason)
                case EngineSpawned(incarnation):
                    self._on_engine_spawned(incarnation)
                case Drain():
                    self._told_to_drain = message
                    self._stop.set()
        if self._control.closed:
            self._loop.remove_reader(self._control.fileno())
            self._stop.set()

    def _on_terminate(self) -> None:
        """Told to end by a signal and not by the supervisor, which will spawn a successor."""
        if self._told_to_drain is None:
            self._told_to_drain = Drain(self._arguments.terminated_drain_s, whole_server=False)
            self._control.send(Leaving())
            self._stop.set()

    async def _drain(self, drain: Drain) -> None:
        """Let what is in flight finish in time; the rest hears an error.

        When the whole server drains, probes and new requests are answered until then: 503.
        """
        until_s = self._loop.time() + drain.timeout_s
        self._state.draining = drain.whole_server
        self._connections.drain()
        if drain.whole_server:
            await self._frontend.wait_idle(timeout_s=drain.timeout_s)
            await self._accepting.leave(
                patience_s=until_s - self._loop.time(), timeout_s=_HALF_SENT_S
            )
        else:
            self._accepting.stop()
            await self._accepting.settle(timeout_s=drain.timeout_s)
        left_s = until_s - self._loop.time()
        if drain.whole_server:
            left_s = min(left_s, _HALF_SENT_S)
        if await self._connections.wait_closed(timeout_s=left_s):
            return
        dead = self._state.liveness.dead
        self._frontend.fail_all(
            EngineDead(dead) if dead else ShuttingDown("the server is shutting down")
        )
        await self._connections.wait_closed(timeout_s=_LAST_WORDS_S)


def _guarded(frontend: Frontend, access: AccessArguments) -> Access:
    """The frontend, behind keys and the rules for pages of other origins."""
    names = CORS.__dataclass_fields__.keys()
    return Access(
        frontend,
        api_keys=access.credentials.api_keys,
        open_paths=OPEN_PATHS.union(
            {"/metrics"} if access.metrics_open else (), {"/"} if access.page else ()
        ),
        cors=CORS(**{name: getattr(access.cors, name) for name in names}),
        root_path=access.root_path,
    )


def _tracer_of(arguments: AcceptorArguments, meter: Meter) -> Tracer | None:
    if arguments.tracing.otlp_endpoint is None:
        return None
    return Tracer(arguments.tracing, meter=meter, lane=arguments.lane)


def _tls_of(access: AccessArguments) -> TLS | None:
    if access.credentials.certificates is None:
        return None
    return TLS(
        context=server_context(access.credentials.certificates),
        handshake_timeout_s=access.handshake_timeout_s,
    )


def _limits_of(config: HTTPConfig) -> Limits:
    names = Limits.__dataclass_fields__.keys() & config.__dataclass_fields__.keys()
    return Limits(**{name: getattr(config, name) for name in names})


def main(control: ControlSocket, arguments: AcceptorArguments) -> None:
    """Be an acceptor: the entry point of its process."""

    async def live() -> None:
        await Acceptor(control, arguments).run()

    uvloop.run(live())
