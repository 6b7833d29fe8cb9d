"""What an acceptor is given when it is spawned. Light: the supervisor makes one for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

    from fastserve.config import HTTPConfig, LaneConfig, LimitsConfig
    from fastserve.metrics.board import Board


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptorArguments:
    """Everything that an acceptor is given, in its spawn arguments. `key` signs the lane."""

    lane: int
    incarnation: int
    run_directory: str
    key: bytes
    listener: socket.socket
    board: Board
    balanced: bool
    http: HTTPConfig
    limits: LimitsConfig
    lane_config: LaneConfig
    stall_unhealthy_s: float
