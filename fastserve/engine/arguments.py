"""What the engine is given when it is spawned. Light: the supervisor makes it."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastserve.config import LaneConfig, ServerConfig
    from fastserve.config_engine import EngineConfig, LlamaCppConfig, SimConfig
    from fastserve.config_observing import LogConfig
    from fastserve.config_trtllm import TrtLlmConfig
    from fastserve.metrics.board import Board


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an adapter may need to know."""

    server: ServerConfig
    engine: EngineConfig
    llamacpp: LlamaCppConfig
    trtllm: TrtLlmConfig
    sim: SimConfig


class LauncherDescriptor:
    """The descriptor by which MPICH's launcher and its rank speak (PMI_FD), handed on as it is.

    Without it the variable alone makes MPI_Init fail, since spawning closes what is not handed on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def of_environment(cls) -> LauncherDescriptor | None:
        """Return the descriptor that the environment names, if we were started by a launcher."""
        value = os.environ.get("PMI_FD", "")
        return cls(int(value)) if value.isdecimal() else None

    def __reduce__(self) -> tuple[Any, ...]:
        # The number stays the same in the child, and so the variable stays true.
        return _restore, (DupFd(self.fd),)


def _restore(duplicate: Any) -> LauncherDescriptor:  # noqa: ANN401 (DupFd's, which has no name)
    return LauncherDescriptor(duplicate.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankArguments:
    """What every rank of an engine is given. `key` signs the lanes."""

    run_directory: str
    incarnation: int
    key: bytes
    settings: EngineSettings
    lane_config: LaneConfig
    log: LogConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments(RankArguments):
    """Everything that the engine is given, in its spawn arguments.

    `world_of_launcher`: a launcher has started the other ranks, which else the engine does.
    """

    board: Board
    launcher: LauncherDescriptor | None = None
    world_of_launcher: bool = False

    def for_ranks(self) -> RankArguments:
        """What goes to the other ranks: no descriptor of this process."""
        names = [one.name for one in fields(RankArguments)]
        return RankArguments(**{name: getattr(self, name) for name in names})
