"""What an exit means: pure decisions. No clock, process or log in here."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass


class Verdict(enum.Enum):
    RESPAWN = enum.auto()
    STOP_ENGINE_DEAD = enum.auto()
    STOP_CRASH_LOOP = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class RespawnPolicy:
    """At most `restarts_max` respawns of one child within `window_s` seconds; 0 is none ever."""

    restarts_max: int
    window_s: float


def on_exit(
    *, essential: bool, exits_s: list[float], now_s: float, policy: RespawnPolicy
) -> Verdict:
    """Decide the fate of a child that exited at each of `exits_s`, the last of them just now."""
    recent = [at_s for at_s in exits_s if now_s - at_s < policy.window_s]
    if len(recent) <= policy.restarts_max:
        return Verdict.RESPAWN
    # No engine, no service: fail fast, and let the orchestrator start us again.
    return Verdict.STOP_ENGINE_DEAD if essential else Verdict.STOP_CRASH_LOOP


def describe_exit(exit_code: int, *, error: str = "") -> str:
    """Say in words how a process ended; a negative code is a signal, as multiprocessing has it.

    `error`: the exception that it said had escaped it.
    """
    if exit_code >= 0:
        return error or f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
