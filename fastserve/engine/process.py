"""The engine process: one adapter behind the lanes. The only process that loads a model library.

Where there are several ranks, this is rank 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.engine.admission import Admission
from fastserve.engine.core import EngineCore
from fastserve.engine.registry import make_engine
from fastserve.lane.server import LaneServer
from fastserve.metrics.meter import Meter
from fastserve.process import keep_memory

if TYPE_CHECKING:
    from fastserve.control import ControlSocket
    from fastserve.engine.arguments import EngineArguments


def main(control: ControlSocket, arguments: EngineArguments) -> None:
    """Be the engine: the entry point of its process. Raises StartError."""
    if arguments.settings.server.dp_size > 1:
        # What it imports is of no use to a single one.
        from fastserve.engine import rank_zero  # noqa: PLC0415

        rank_zero.main(control, arguments)
        return
    run_directory = Path(arguments.run_directory)
    lanes = LaneServer(
        run_directory=run_directory,
        engine_incarnation=arguments.incarnation,
        key=arguments.key,
        in_flight_frames_max=arguments.lane_config.in_flight_frames_max,
        full_timeout_s=arguments.lane_config.full_timeout_s,
    )
    engine = make_engine(arguments.settings, run_directory=run_directory)
    core = EngineCore(
        engine,
        lanes=lanes,
        control=control,
        admission=Admission(
            max_queued_requests=arguments.settings.engine.max_queued_requests,
            max_queued_tokens=arguments.settings.engine.max_queued_tokens,
        ),
        heartbeat_interval_s=arguments.lane_config.heartbeat_interval_s,
        meter=Meter(arguments.board.engine_numbers()),
    )
    try:
        core.start()
        keep_memory()
        core.run()
    finally:
        engine.close()
        lanes.close()
