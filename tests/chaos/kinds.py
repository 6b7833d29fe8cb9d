"""The kinds of blows, as a table: what each is, what it may cost clients, and when it is over.

Every cell that excuses something is as narrow as can be: who reads the table knows what a server
may do to its clients, and under which blow alone.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.chaos.blows import (
    hang_up,
    hang_up_again_and_again,
    hang_up_and_kill,
    hang_up_and_stop,
    hang_up_and_terminate,
    kill_acceptor_of_paused_engine,
    kill_engine_and_acceptor,
    kill_engine_twice,
    pause,
    pause_acceptor,
    pause_tree,
    script_engine,
    signal_supervisor,
    stop_acceptor,
    stop_successor,
    strike_acceptors,
    strike_engine,
    strike_engine_held_up,
    strike_rank,
    terminate_acceptor,
    terminate_twice,
    terminate_with,
)
from tests.chaos.scene import (
    DEAD_EXIT_TIMEOUT_S,
    SHORT_DRAIN_TIMEOUT_S,
    SILENT_TIMEOUT_S,
    STALL_KILL_S,
    START_TIMEOUT_S_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.scene import Blow, Engine, Scene, Struck

    Strike = Callable[[Scene, Blow], Struck]

_INT, _TERM, _KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
_SEGV, _STOP = signal.SIGSEGV, signal.SIGSTOP
_NONE: frozenset[str] = frozenset()
_ENGINE_GONE = frozenset({"engine_dead", "engine_starting"})
# Who comes while the whole server drains is told so, and who has not finished at its end.
_DRAINING = frozenset({"shutting_down"})
_STARTING = frozenset({"engine_starting"})

# The defaults of server.terminate_timeout_s and engine_dead_exit_timeout_s, and what a slow machine
# adds to any end.
_TERMINATE_TIMEOUT_S = 5.0
_DEAD_EXIT_TIMEOUT_S = 5.0
_SLACK_S = 4.0
# Once nobody is there to ask it of anybody.
_ALL_GONE_WITHIN_S = 2.0
# One by one, each with the start of a process.
_ALL_REPLACED_WITHIN_S = 150.0
_SHORT_DRAIN = ("--drain-timeout-s", str(SHORT_DRAIN_TIMEOUT_S))
_DEAD_EXIT = ("--engine-dead-exit-timeout-s", str(DEAD_EXIT_TIMEOUT_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`errors`: what clients may be told; `cuts`: whether any connection may be cut, `stales`:
    whether any kept one may. `exit_codes`: none if the server must survive. `respawn`: whether it
    needs an engine that is respawned, or one that is not; `ranked`: one of several ranks.
    `replaces`: how the names begin of the processes that may be others after it. `restarts`: it
    ends the server, and another is started at once on its port. `answered_within_s`: until the last
    client that it hit has heard of it; `over_within_s`: until all is gone, or whole again."""

    strike: Callable[[Scene, Blow], Struck]
    errors: frozenset[str] = _NONE
    cuts: bool = False
    stales: bool = False
    exit_codes: frozenset[int] = frozenset()
    respawn: bool | None = None
    scripted: bool = False
    ranked: bool = False
    replaces: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    answered_within_s: float = 40.0
    over_within_s: float = 40.0
    leaves_directory: bool = False
    tracebacks: bool = False
    restarts: bool = False


def _survived(strike: Strike, **what: Any) -> Kind:
    """An acceptor is struck, or several: the others serve on, and it has a successor."""
    return Kind(strike=strike, **({"replaces": ("acceptor",)} | what))


def _paused(strike: Strike, **what: Any) -> Kind:
    """Nobody may die of a pause, and nobody may hear of one."""
    return Kind(strike=strike, **what)


def _respawned(strike: Strike, *, seen_within_s: float = STALL_KILL_S, **what: Any) -> Kind:
    """The engine has a successor; until that is ready, clients are told."""
    return Kind(
        strike=strike, errors=_ENGINE_GONE, respawn=True,
        answered_within_s=seen_within_s + _SLACK_S, **({"replaces": ("engine",)} | what),
    )  # fmt: skip


def _fatal(strike: Strike, *, seen_within_s: float = STALL_KILL_S, **what: Any) -> Kind:
    """The engine's end is the server's: kept connections are closed as it goes."""
    over_within_s = seen_within_s + _DEAD_EXIT_TIMEOUT_S + _SLACK_S
    return Kind(
        strike=strike, errors=_ENGINE_GONE, stales=True, respawn=False,
        exit_codes=frozenset({70}), answered_within_s=seen_within_s + _SLACK_S,
        **({"over_within_s": over_within_s} | what),
    )  # fmt: skip


def _replacing(strike: Strike) -> Kind:
    """Acceptors are replaced one by one: each closes what connections it has kept."""
    return _survived(strike, stales=True, over_within_s=_ALL_REPLACED_WITHIN_S)


def _orderly(strike: Strike, **what: Any) -> Kind:
    """The server is told to end: everybody is served, or told so."""
    return Kind(strike=strike, stales=True, errors=_DRAINING, exit_codes=frozenset({0}), **what)


def _forced(first: int, second: int) -> Kind:
    """A second signal ends it at once, in the middle of answers: as its sender wants it."""
    return Kind(
        strike=partial(terminate_twice, numbers=(first, second)), stales=True, cuts=True,
        errors=_DRAINING, exit_codes=frozenset({128 + second}), over_within_s=_SLACK_S,
    )  # fmt: skip


def _killed(number: int, **what: Any) -> Kind:
    """With the supervisor, everybody goes: there is nobody left to say so."""
    return Kind(
        strike=partial(signal_supervisor, numbers=[number]), cuts=True, stales=True,
        exit_codes=frozenset({-number}), leaves_directory=True,
        over_within_s=_ALL_GONE_WITHIN_S + _SLACK_S, **what,
    )  # fmt: skip


_ACCEPTORS = {
    "acceptor kill": _survived(partial(strike_acceptors, number=_KILL)),
    "acceptor segv": _survived(partial(strike_acceptors, number=_SEGV)),
    # Not told by its supervisor, it drains all the same.
    "acceptor term": _survived(terminate_acceptor, stales=True, errors=_DRAINING),
    "acceptor stop": _survived(stop_acceptor),
    "acceptor kill, successor stop": _survived(
        stop_successor, over_within_s=START_TIMEOUT_S_MAX + 30.0
    ),
    "acceptor pause": _paused(pause_acceptor),
    "all acceptors kill": _survived(partial(strike_acceptors, number=_KILL, share=1.0)),
}  # fmt: skip

# A death is seen at once, and told.
_TOLD = {"seen_within_s": 1.0}

# How the engine ends, or one of its ranks.
_DEATHS: dict[str, tuple[Strike, dict[str, Any]]] = {
    "rank kill": (partial(strike_rank, number=_KILL), {"ranked": True, **_TOLD}),
    "rank stop": (partial(strike_rank, number=_STOP), {"ranked": True}),
    "engine kill": (partial(strike_engine, number=_KILL), _TOLD),
    "engine segv": (partial(strike_engine, number=_SEGV), _TOLD),
    "engine term": (partial(strike_engine, number=_TERM), _TOLD),
    "engine stop": (partial(strike_engine, number=_STOP), {}),
    "engine exception": (
        partial(script_engine, die_by="exception"),
        {"scripted": True, "tracebacks": True, **_TOLD},
    ),
    "engine exit": (partial(script_engine, die_by="exit"), {"scripted": True, **_TOLD}),
    "engine hang": (script_engine, {"scripted": True}),
}  # fmt: skip

_HELD_UP: dict[str, Any] = {
    "seen_within_s": DEAD_EXIT_TIMEOUT_S,  # by those that were held up
    "over_within_s": DEAD_EXIT_TIMEOUT_S + _SLACK_S / 2,
    "flags": _DEAD_EXIT,
}

_ENGINES = {
    **{name: _fatal(strike, **what) for name, (strike, what) in _DEATHS.items()},
    **{
        f"{name}, respawned": _respawned(strike, **what)
        for name, (strike, what) in _DEATHS.items()
    },
    "engine kill, client stopped": _fatal(partial(strike_engine_held_up, stop=False), **_HELD_UP),
    "engine kill, acceptor stopped": _fatal(partial(strike_engine_held_up, stop=True), **_HELD_UP),
    "engine kill twice, respawned": _respawned(kill_engine_twice),
    "engine and acceptor kill": _respawned(
        kill_engine_and_acceptor, replaces=("acceptor", "engine")
    ),
    "engine pause": _paused(
        partial(pause, names=["engine"], least_s=0.05, most_s=STALL_KILL_S / 3)
    ),
    "engine pause, acceptor kill": _survived(kill_acceptor_of_paused_engine),
}  # fmt: skip

_TERM_WITH = {
    "flags": _SHORT_DRAIN,
    "over_within_s": SHORT_DRAIN_TIMEOUT_S + _TERMINATE_TIMEOUT_S + _SLACK_S,
}

_SUPERVISORS = {
    "supervisor pause": _paused(
        partial(pause, names=["supervisor"], least_s=0.05, most_s=SILENT_TIMEOUT_S + 2)
    ),
    "everybody pause": _paused(pause_tree),
    "supervisor hup": _replacing(hang_up),
    "supervisor hup storm": _replacing(hang_up_again_and_again),
    "supervisor hup, acceptor kill": _replacing(hang_up_and_kill),
    "supervisor hup, acceptor stop": _replacing(hang_up_and_stop),
    "supervisor hup, term": _orderly(hang_up_and_terminate),
    "supervisor term": _orderly(partial(signal_supervisor, numbers=[_TERM])),
    "supervisor term, engine stopped": _orderly(
        partial(terminate_with, stopped="engine"), **_TERM_WITH
    ),
    "supervisor term, acceptor stopped": _orderly(
        partial(terminate_with, stopped="acceptor"), **_TERM_WITH
    ),
    "supervisor term twice": _forced(_TERM, _TERM),
    "supervisor int, term": _forced(_INT, _TERM),
    "supervisor kill": _killed(_KILL),
    "supervisor segv": _killed(_SEGV),
    "supervisor kill, restart": _killed(_KILL, restarts=True, errors=_STARTING),
}  # fmt: skip

KINDS: dict[str, Kind] = _ACCEPTORS | _ENGINES | _SUPERVISORS


def kinds_for(engine: Engine, *, ranks: int = 1) -> list[str]:
    """The kinds that an engine of so many ranks can be dealt."""
    return [
        name
        for name, kind in KINDS.items()
        if (engine == "sim" or not kind.scripted) and (ranks > 1 or not kind.ranked)
    ]
