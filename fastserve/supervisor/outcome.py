"""How long the supervisor waits for what, and how a server ends. Plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds: for the engine to be ready, for it to finish a step while it has work, for an
    acceptor to be seen, for requests to finish, for a process told to stop, and for clients to be
    answered once the engine is dead."""

    start_timeout_s: float
    stall_kill_s: float
    silent_timeout_s: float
    drain_timeout_s: float
    terminate_timeout_s: float
    engine_dead_exit_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why the server ends, how long its requests may still take, and when an acceptor that is not
    gone is killed."""

    exit_code: int
    reason: str
    drain_timeout_s: float
    exit_timeout_s: float
