"""What the engine is given when it is spawned. Light: the supervisor makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.config import (
        EngineConfig,
        LaneConfig,
        LlamaCppConfig,
        ServerConfig,
        SimConfig,
        TrtLlmConfig,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an adapter may need to know."""

    server: ServerConfig
    engine: EngineConfig
    llamacpp: LlamaCppConfig
    trtllm: TrtLlmConfig
    sim: SimConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """Everything that the engine is given, in its spawn arguments. `key` signs the lanes."""

    run_directory: str
    incarnation: int
    key: bytes
    settings: EngineSettings
    lane_config: LaneConfig
