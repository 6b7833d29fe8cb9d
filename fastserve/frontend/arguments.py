"""What an acceptor is given when it is spawned. Light: the supervisor makes one for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

    from fastserve.config import LaneConfig, LimitsConfig
    from fastserve.config_http import CORSConfig, HTTPConfig, ResponsesConfig
    from fastserve.config_observing import LogConfig, TracingConfig
    from fastserve.credentials import Credentials
    from fastserve.metrics.board import Board
    from fastserve.metrics.exposition import ServerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessArguments:
    """Who may ask, from which page, under which path. `metrics_open`: /metrics needs no key.

    `page`: whether there is one at /, which needs no key either.
    """

    credentials: Credentials
    cors: CORSConfig
    root_path: str | None
    metrics_open: bool
    page: bool
    handshake_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArguments:
    """What a frontend is told of the model besides its card; the parsers are names.

    `names`: what requests may call it; none: its own name alone. `chat_template`: what stands for
    the model's own.
    """

    template_bytes_max: int
    names: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptorArguments:
    """Everything that an acceptor is given, in its spawn arguments. `key` signs the lane.

    `terminated_drain_s`: how long requests may still take once it is told to terminate.
    `info` is what /metrics says of the whole server, `log_prompts` a setting.
    """

    lane: int
    incarnation: int
    engine_incarnation: int
    run_directory: str
    key: bytes
    listeners: tuple[socket.socket, ...]
    board: Board
    info: ServerInfo
    tracing: TracingConfig
    log_prompts: bool
    balanced: bool
    access: AccessArguments
    http: HTTPConfig
    limits: LimitsConfig
    model: ModelArguments
    responses: ResponsesConfig
    refuse_unknown_fields: bool
    lane_config: LaneConfig
    log: LogConfig
    stall_unhealthy_s: float
    terminated_drain_s: float
