"""A rank other than 0: an engine core like any other, but told what to do by rank 0.

    acceptors --> ingress of rank 0 --> ingress of rank N      Submit, Abort, Attach, Detach
    acceptors <------- lanes --------------- rank N            Outputs, and nothing else
    rank 0 <------ control socket ------> rank N               Ready, Load, Ended; Stop

Rank 0 hears of every end, so that it knows who is how busy, and says everything else that acceptors
hear from the engine. MPI starts the rank, brings it its arguments, the lanes' key among them, and
takes back how it ended. It ends with rank 0, however that does.

Knows nothing of how requests are dispatched.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.control import ControlSocket, Ended, EngineGone, Failed, Load
from fastserve.engine.core import EngineCore
from fastserve.engine.cpus import available_cpus
from fastserve.engine.mpi import START_TIMEOUT_S, serve, worker_rank
from fastserve.engine.mpi_library import import_mpi
from fastserve.engine.registry import make_engine
from fastserve.errors import ConfigError, StartError
from fastserve.lane.server import LaneServer
from fastserve.log import get_logger
from fastserve.process import EXIT_FAILED, keep_memory, settle_rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastserve.config_observing import LogConfig
    from fastserve.engine.arguments import EngineSettings, RankArguments
    from fastserve.lane.messages import Heartbeat

log = get_logger("rank")

# What fits into a packet of the control socket: 20 characters each, at most.
_ENDED_MAX = 1000


class RankCore(EngineCore):
    """Drives one rank's adapter."""

    _unsaid: tuple[int, ...] = ()

    def _greet(self, lane: int) -> None:
        """Rank 0 does, once for all."""

    def _tell(self, heartbeat: Heartbeat) -> None:
        self._control.send(Load(dataclasses.asdict(heartbeat)))
        self._say_ended()

    def _ended(self, request_ids: Iterable[int]) -> None:
        ended = list(request_ids)
        super()._ended(ended)
        self._unsaid += tuple(ended)
        self._say_ended()

    def _say_ended(self) -> None:
        """What rank 0 does not take now it is told at the next step, or heartbeat."""
        while self._unsaid and self._control.send(Ended(list(self._unsaid[:_ENDED_MAX]))):
            self._unsaid = self._unsaid[_ENDED_MAX:]


def main(arguments: RankArguments) -> None:
    """Be a rank until rank 0 says stop: what MPI runs on each. Raises whatever ends it before."""
    rank = 1 + worker_rank()
    settle_rank(rank, log_level=arguments.log.level, log_format=arguments.log.format)
    run_directory = Path(arguments.run_directory)
    link = ControlSocket.connect(ranks_address(run_directory, arguments.incarnation))
    try:
        _run(rank, link, arguments)
    except (StartError, ConfigError) as error:
        link.send(Failed(error.message))
        raise
    except BaseException as error:
        log.exception("crashed")
        link.send(EngineGone(f"rank {rank} raised {type(error).__name__}: {error}"))
        raise
    if link.closed:
        # Nobody is left to ask MPI how this went, and MPI would wait.
        os._exit(EXIT_FAILED)
    link.close()


def _run(rank: int, link: ControlSocket, arguments: RankArguments) -> None:
    run_directory = Path(arguments.run_directory)
    lanes = LaneServer(
        run_directory=run_directory,
        engine_incarnation=arguments.incarnation,
        key=arguments.key,
        in_flight_frames_max=arguments.lane_config.in_flight_frames_max,
        full_timeout_s=arguments.lane_config.full_timeout_s,
        rank=rank,
    )
    engine = make_engine(
        settings_of(rank, arguments.settings, cpus=available_cpus()), run_directory=run_directory
    )
    core = RankCore(
        engine,
        lanes=lanes,
        control=link,
        heartbeat_interval_s=arguments.lane_config.heartbeat_interval_s,
    )
    try:
        core.start()
        keep_memory()
        core.run()
    finally:
        engine.close()
        lanes.close()


def be_rank_of_world(rank: int, log_config: LogConfig) -> int:
    """Be one of the ranks that a launcher has started, until rank 0 has no more work; return 0."""
    settle_rank(rank, log_level=log_config.level, log_format=log_config.format)
    # MPI_Init waits for a rank 0 that may have ended before it came so far, and holds the
    # interpreter meanwhile: only a signal that is not Python's to handle ends that.
    signal.setitimer(signal.ITIMER_REAL, START_TIMEOUT_S)
    import_mpi()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    serve()
    return 0


def ranks_address(run_directory: Path, incarnation: int) -> Path:
    """Where that incarnation's rank 0 listens for the others' control sockets."""
    return run_directory / f"ranks-{incarnation}"


def settings_of(rank: int, settings: EngineSettings, *, cpus: int) -> EngineSettings:
    """The settings for one rank: where nobody has said how many threads, the processors are shared
    out. What is over goes to the last, since rank 0 has the dispatching to do."""
    if settings.llamacpp.threads:
        return settings
    threads = max(1, (cpus + rank) // settings.server.dp_size)
    return dataclasses.replace(
        settings, llamacpp=dataclasses.replace(settings.llamacpp, threads=threads)
    )
