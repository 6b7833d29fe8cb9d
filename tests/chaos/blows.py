"""The blows: what is done to a server, what it may cost its clients, and when it is over.

A Kind says what must hold after it. The plan of a run is drawn from its seed alone: a server's life
is some blows that it must survive and a last one that ends it, in a certain way.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import psutil

from tests.chaos.asking import endless, lasting, simulated
from tests.e2e.harness import DEADLINE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.chaos.load import Load
    from tests.e2e.harness import Server

Engine = Literal["sim", "embedded"]

# The settings that the waits of some kinds are made for; see FLAGS in driver.py.
SILENT_TIMEOUT_S = 3.0
STALL_KILL_S = 6.0
DRAIN_TIMEOUT_S = 10.0
START_TIMEOUT_S = 30.0
# Of a server of many acceptors, which start one after the other.
START_TIMEOUT_S_MAX = 100.0
# Longer than the default, so that what a slow machine adds does not hide what it is for.
DEAD_EXIT_TIMEOUT_S = 10.0
SHORT_DRAIN_TIMEOUT_S = 1.0
_SHORT_DRAIN = ("--drain-timeout-s", str(SHORT_DRAIN_TIMEOUT_S))

_ENGINE_GONE = frozenset({"engine_dead", "engine_starting"})
# Who comes while the whole server drains is told so, and who has not finished at its end.
_DRAINING = frozenset({"shutting_down"})
# The default of server.terminate_timeout_s, and what a slow machine adds to any end.
_TERMINATE_TIMEOUT_S = 5.0
_SLACK_S = 4.0
# One by one, each with the start of a process.
_ALL_REPLACED_WITHIN_S = 150.0
_NONE: frozenset[str] = frozenset()
_SIGTERM, _SIGKILL, _SIGSEGV = signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One of the plan: after `after_s` of load, with `lane` the first victim where there are many,
    and `hold_s`, from 0 to 1, the place within the kind's own range of waits."""

    kind: str
    after_s: float
    lane: int
    hold: float
    seed: int


@dataclass(slots=True, kw_only=True)
class Struck:
    """What was done. `held`: the client ports of connections that died with their acceptor;
    `until_s`: connections begun before may have been such ones, too. `recovered`: whether the
    server is whole again."""

    at_s: float
    held: set[int] = field(default_factory=set)
    until_s: float = 0.0
    recovered: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`errors`: what clients may be told; `cuts`: whether any connection may be cut, `stales`:
    whether any kept one may. `exit_codes`: none if the server must survive. `respawn`: whether it
    needs an engine that is respawned, or one that is not; `ranked`: one of several ranks.
    `replaces`: how the names begin of the processes that may be others after it. `restarts`: it
    ends the server, and another is started at once on its port."""

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
    over_within_s: float = 40.0
    leaves_directory: bool = False
    tracebacks: bool = False
    restarts: bool = False


class Scene:
    """A running server under load, with hands on its processes."""

    def __init__(
        self, server: Server, load: Load, *, engine: Engine, frontends: int, ranks: int = 1
    ) -> None:
        self.engine = engine
        self.server = server
        self.load = load
        self.frontends = frontends
        self.ranks = ranks

    def processes(self) -> dict[str, psutil.Process]:
        """Every process by name: engine, supervisor, acceptor 0, ..."""
        return {
            title.removeprefix("fastserve: "): process
            for title, process in self.server.remember_processes().items()
            if title.startswith("fastserve: ")
        }

    def find(self, name: str) -> psutil.Process:
        return self.server.find(name)

    def replaced(self, victims: dict[str, int]) -> bool:
        """Whether each of the victims, name to pid, has a successor that serves."""
        now = self.processes()
        if any(name not in now or now[name].pid == pid for name, pid in victims.items()):
            return False
        if len(now) != self.frontends + 1 + self.ranks:
            return False
        # Whoever of the acceptors answers.
        return all(self.server.get("/ready")[0] == 200 for _ in range(2))

    def held_by(self, process: psutil.Process) -> set[int]:
        """The ports of the clients that are connected to this process, which stands still."""
        return {
            each.raddr.port
            for each in process.net_connections("tcp")
            if each.raddr and each.laddr.port == self.server.port
        }


# ---- acceptors


def _strike_acceptors(scene: Scene, blow: Blow, *, number: int, share: float = 0.0) -> Struck:
    """Signal one acceptor, or a share of them. It is stopped first, so that what it holds is known.

    The signal finds it where it stopped, which is anywhere.
    """
    count = max(1, round(scene.frontends * share))
    lanes = [(blow.lane + each) % scene.frontends for each in range(count)]
    victims = {f"acceptor {lane}": scene.find(f"acceptor {lane}") for lane in lanes}
    struck = Struck(at_s=time.monotonic())
    for victim in victims.values():
        victim.suspend()
    for victim in victims.values():
        struck.held |= scene.held_by(_standing(victim))
    struck.at_s = time.monotonic()
    for victim in victims.values():
        victim.send_signal(number)
    if number not in (signal.SIGKILL, signal.SIGSTOP):  # any other waits for it to wake up
        for victim in victims.values():
            victim.resume()
        # It may still accept between waking up and reading its signal.
        struck.until_s = struck.at_s + 1.0
    pids = {name: victim.pid for name, victim in victims.items()}
    struck.recovered = lambda: scene.replaced(pids)
    return struck


def _terminate_acceptor(scene: Scene, blow: Blow) -> Struck:
    """Told to end by somebody who is not its supervisor: it lets its requests finish."""
    name = f"acceptor {blow.lane % scene.frontends}"
    victim = scene.find(name)
    struck = Struck(at_s=time.monotonic(), recovered=partial(scene.replaced, {name: victim.pid}))
    victim.terminate()
    return struck


def _stop_acceptor(scene: Scene, blow: Blow) -> Struck:
    """Stopped for good: only its silence tells."""
    return _strike_acceptors(scene, blow, number=signal.SIGSTOP)


def _standing(process: psutil.Process) -> psutil.Process:
    """Wait until it has stopped: a signal takes its time. Raises psutil.NoSuchProcess."""
    wait_until(lambda: process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    return process


def _stop_successor(scene: Scene, blow: Blow) -> Struck:
    """The successor of a killed acceptor stands still before it has begun to accept."""
    name = f"acceptor {blow.lane % scene.frontends}"
    victim = scene.find(name)
    struck = _strike_acceptors(scene, blow, number=signal.SIGKILL)
    successor = wait_until(lambda: (now := scene.processes().get(name)) != victim and now)
    successor.suspend()
    struck.recovered = lambda: scene.replaced({name: successor.pid})
    return struck


# ---- the engine


def _strike_engine(scene: Scene, _blow: Blow, *, number: int) -> Struck:
    victim = scene.find("engine")
    struck = Struck(at_s=time.monotonic(), recovered=_engine_replaced(scene, victim))
    victim.send_signal(number)
    return struck


def _strike_rank(scene: Scene, blow: Blow, *, number: int) -> Struck:
    """One of the ranks that the engine has started: its end is the engine's."""
    engine = scene.find("engine")
    victim = scene.find(f"rank {1 + blow.lane % (scene.ranks - 1)}")
    struck = Struck(at_s=time.monotonic(), recovered=_engine_replaced(scene, engine))
    victim.send_signal(number)
    return struck


def _engine_replaced(scene: Scene, victim: psutil.Process) -> Callable[[], bool]:
    pid = victim.pid
    return lambda: scene.replaced({"engine": pid})


def _strike_engine_held_up(scene: Scene, blow: Blow, *, stop: bool) -> Struck:
    """Clients that stop in the middle of a request, or an acceptor that stands still, hold up no
    end."""
    rng = random.Random(blow.seed)
    held: set[int] = set()
    if stop:
        victim = scene.find(f"acceptor {blow.lane % scene.frontends}")
        victim.suspend()
        held = scene.held_by(_standing(victim))
    else:
        for _ in range(2 * scene.frontends):
            scene.load.ask(
                endless(rng, engine=scene.engine, leaves_after=0), share=rng.uniform(0.1, 0.9)
            )
        time.sleep(0.3)
    struck = _strike_engine(scene, blow, number=signal.SIGKILL)
    struck.held = held
    return struck


def _script_engine(scene: Scene, blow: Blow, **script: object) -> Struck:
    """A request makes it die or hang at one of its first steps."""
    rng = random.Random(blow.seed)
    at = "die_at" if "die_by" in script else "hang_at"
    ask = replace(simulated(rng, **script, **{at: 0}), leaves_after=None)
    ask.fields["sim"] |= {at: rng.randrange(len(ask.pieces)), "delay_ms": 0}
    victim = scene.find("engine")
    struck = Struck(at_s=time.monotonic(), recovered=_engine_replaced(scene, victim))
    scene.load.ask(ask)
    wait_until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
    if "die_by" in script:
        struck.at_s = time.monotonic()  # when it was seen, at the latest
    return struck


def _kill_engine_and_acceptor(scene: Scene, blow: Blow) -> Struck:
    engine = scene.find("engine")
    struck = _strike_acceptors(scene, blow, number=signal.SIGKILL)
    engine.kill()
    acceptors = struck.recovered
    struck.recovered = lambda: acceptors() and scene.replaced({"engine": engine.pid})
    return struck


def _kill_engine_twice(scene: Scene, blow: Blow) -> Struck:
    """Its successor, too, at some moment of its start."""
    first = scene.find("engine")
    first.kill()

    def successor() -> psutil.Process | None:
        found = scene.processes().get("engine")
        return found if found != first else None

    second = wait_until(successor)
    time.sleep(blow.hold / 2)
    struck = Struck(at_s=time.monotonic(), recovered=_engine_replaced(scene, second))
    second.kill()
    return struck


# ---- pauses: nobody may die of one


def _pause(scene: Scene, blow: Blow, *, names: Sequence[str], least_s: float, most_s: float
           ) -> Struck:  # fmt: skip
    victims = [scene.find(name) for name in names]
    rng = random.Random(blow.seed)
    rng.shuffle(victims)
    struck = Struck(at_s=time.monotonic())
    for victim in victims:
        victim.suspend()
    time.sleep(least_s + blow.hold * (most_s - least_s))
    rng.shuffle(victims)
    for victim in victims:
        victim.resume()
    return struck


def _pause_acceptor(scene: Scene, blow: Blow) -> Struck:
    name = f"acceptor {blow.lane % scene.frontends}"
    return _pause(scene, blow, names=[name], least_s=0.05, most_s=SILENT_TIMEOUT_S / 2)


def _pause_tree(scene: Scene, blow: Blow) -> Struck:
    """As a container's pause does: longer than anybody may be silent."""
    most_s = max(SILENT_TIMEOUT_S, STALL_KILL_S) + 1.0
    return _pause(scene, blow, names=list(scene.processes()), least_s=most_s - 0.5, most_s=most_s)


def _kill_acceptor_of_paused_engine(scene: Scene, blow: Blow) -> Struck:
    """What the dead acceptor had asked for reaches the engine together with its successor."""
    engine = scene.find("engine")
    engine.suspend()
    _standing(engine)
    rng = random.Random(blow.seed)
    for _ in range(4 * scene.frontends):
        scene.load.ask(endless(rng, engine=scene.engine, leaves_after=4000))
    time.sleep(0.3)  # until they have been submitted
    struck = _strike_acceptors(scene, blow, number=signal.SIGKILL)
    name = f"acceptor {blow.lane % scene.frontends}"
    wait_until(lambda: name in scene.processes())
    time.sleep(0.5 + blow.hold)
    engine.resume()
    return struck


# ---- the supervisor


def _hang_up(scene: Scene, _blow: Blow) -> Struck:
    acceptors = {
        name: process.pid for name, process in scene.processes().items() if "acceptor" in name
    }
    struck = Struck(at_s=time.monotonic(), recovered=lambda: scene.replaced(acceptors))
    scene.server.process.send_signal(signal.SIGHUP)
    return struck


def _hang_up_again_and_again(scene: Scene, blow: Blow) -> Struck:
    """What comes while they are being replaced asks for nothing new."""
    struck = _hang_up(scene, blow)
    for _ in range(20):
        time.sleep(blow.hold / 100)
        scene.server.process.send_signal(signal.SIGHUP)
    return struck


def _hang_up_and_terminate(scene: Scene, blow: Blow) -> Struck:
    """The end comes while acceptors are being replaced."""
    _hang_up(scene, blow)
    time.sleep(2 * blow.hold)
    return _signal_supervisor(scene, blow, numbers=[_SIGTERM])


def _hang_up_and_kill(scene: Scene, blow: Blow) -> Struck:
    """While acceptors are replaced one by one, one more dies."""
    struck = _hang_up(scene, blow)
    time.sleep(blow.hold)
    killed = _strike_acceptors(scene, blow, number=signal.SIGKILL)
    struck.held, struck.until_s = killed.held, killed.at_s
    return struck


def _hang_up_and_stop(scene: Scene, blow: Blow) -> Struck:
    """An acceptor that stands still in the middle of being replaced holds up nobody."""
    victim = scene.find(f"acceptor {blow.lane % scene.frontends}")
    struck = _hang_up(scene, blow)
    time.sleep(blow.hold / 10)
    if victim.is_running():
        victim.suspend()
        with contextlib.suppress(psutil.NoSuchProcess):  # it had drained by then
            struck.held = scene.held_by(_standing(victim))
    return struck


def _signal_supervisor(scene: Scene, blow: Blow, *, numbers: Iterable[int]) -> Struck:
    struck = Struck(at_s=time.monotonic())
    for count, number in enumerate(numbers):
        if count:
            time.sleep(blow.hold)
        if scene.server.process.poll() is None:
            scene.server.process.send_signal(number)
    return struck


def _terminate_twice(scene: Scene, blow: Blow, *, numbers: Sequence[int]) -> Struck:
    """The second ends what the first would have waited for: a request that has no end."""
    begun = scene.load.ask(lasting(random.Random(blow.seed), engine=scene.engine))
    assert begun.wait(DEADLINE_S), "it is not answered"
    first, second = numbers
    scene.server.process.send_signal(first)
    time.sleep(blow.hold)
    struck = Struck(at_s=time.monotonic())
    scene.server.process.send_signal(second)
    return struck


def _terminate_with(scene: Scene, blow: Blow, *, stopped: str) -> Struck:
    name = stopped if stopped == "engine" else f"acceptor {blow.lane % scene.frontends}"
    victim = scene.find(name)
    victim.suspend()
    held = set() if name == "engine" else scene.held_by(_standing(victim))
    struck = _signal_supervisor(scene, blow, numbers=[_SIGTERM])
    struck.held = held
    return struck


def _engine_kinds() -> dict[str, Kind]:
    """Each death of the engine, twice: the server follows it, or has it respawned."""
    deaths: dict[str, tuple[Callable[[Scene, Blow], Struck], bool]] = {
        "kill": (partial(_strike_engine, number=_SIGKILL), False),
        "segv": (partial(_strike_engine, number=_SIGSEGV), False),
        "term": (partial(_strike_engine, number=_SIGTERM), False),
        "stop": (partial(_strike_engine, number=signal.SIGSTOP), False),
        "exception": (partial(_script_engine, die_by="exception"), True),
        "exit": (partial(_script_engine, die_by="exit"), True),
        "hang": (_script_engine, True),
    }
    kinds = {}
    for name, number in (("kill", _SIGKILL), ("stop", signal.SIGSTOP)):
        strike_rank = partial(_strike_rank, number=number)
        kinds[f"rank {name}"] = Kind(
            strike=strike_rank, ranked=True, errors=_ENGINE_GONE, stales=True, respawn=False,
            exit_codes=frozenset({70}),
        )  # fmt: skip
        kinds[f"rank {name}, respawned"] = Kind(
            strike=strike_rank,
            ranked=True,
            errors=_ENGINE_GONE,
            respawn=True,
            replaces=("engine",),
        )
    for name, (strike, scripted) in deaths.items():
        kinds[f"engine {name}"] = Kind(
            strike=strike, scripted=scripted, errors=_ENGINE_GONE, stales=True, respawn=False,
            exit_codes=frozenset({70}), tracebacks=name == "exception",
        )  # fmt: skip
        kinds[f"engine {name}, respawned"] = Kind(
            strike=strike, scripted=scripted, errors=_ENGINE_GONE, respawn=True,
            replaces=("engine",), tracebacks=name == "exception",
        )  # fmt: skip
    for name, stop in (("client stopped", False), ("acceptor stopped", True)):
        kinds[f"engine kill, {name}"] = Kind(
            strike=partial(_strike_engine_held_up, stop=stop), errors=_ENGINE_GONE, stales=True,
            respawn=False, exit_codes=frozenset({70}),
            over_within_s=DEAD_EXIT_TIMEOUT_S + _SLACK_S / 2,
            flags=("--engine-dead-exit-timeout-s", str(DEAD_EXIT_TIMEOUT_S)),
        )  # fmt: skip
    return kinds


KINDS: dict[str, Kind] = {
    **{
        f"acceptor {name}": Kind(
            strike=partial(_strike_acceptors, number=number), replaces=("acceptor",)
        )
        for name, number in (("kill", _SIGKILL), ("segv", _SIGSEGV))
    },
    "acceptor term": Kind(
        strike=_terminate_acceptor, stales=True, errors=_DRAINING, replaces=("acceptor",)
    ),
    "acceptor stop": Kind(strike=_stop_acceptor, replaces=("acceptor",)),
    "acceptor kill, successor stop": Kind(
        strike=_stop_successor, replaces=("acceptor",), over_within_s=START_TIMEOUT_S_MAX + 30.0
    ),
    "acceptor pause": Kind(strike=_pause_acceptor),
    "all acceptors kill": Kind(
        strike=partial(_strike_acceptors, number=_SIGKILL, share=1.0), replaces=("acceptor",)
    ),
    **_engine_kinds(),
    "engine pause": Kind(
        strike=partial(_pause, names=["engine"], least_s=0.05, most_s=STALL_KILL_S / 3)
    ),
    "engine pause, acceptor kill": Kind(
        strike=_kill_acceptor_of_paused_engine, replaces=("acceptor",)
    ),
    "engine kill twice, respawned": Kind(
        strike=_kill_engine_twice, respawn=True, errors=_ENGINE_GONE, replaces=("engine",)
    ),
    "engine and acceptor kill": Kind(
        strike=_kill_engine_and_acceptor, respawn=True, errors=_ENGINE_GONE,
        replaces=("acceptor", "engine"),
    ),
    "supervisor pause": Kind(
        strike=partial(_pause, names=["supervisor"], least_s=0.05, most_s=SILENT_TIMEOUT_S + 2)
    ),
    "everybody pause": Kind(strike=_pause_tree),
    "supervisor hup": Kind(
        strike=_hang_up, stales=True, replaces=("acceptor",),
        over_within_s=_ALL_REPLACED_WITHIN_S,
    ),
    "supervisor hup storm": Kind(
        strike=_hang_up_again_and_again, stales=True, replaces=("acceptor",),
        over_within_s=_ALL_REPLACED_WITHIN_S,
    ),
    "supervisor hup, acceptor kill": Kind(
        strike=_hang_up_and_kill, stales=True, replaces=("acceptor",),
        over_within_s=_ALL_REPLACED_WITHIN_S,
    ),
    "supervisor hup, acceptor stop": Kind(
        strike=_hang_up_and_stop, stales=True, replaces=("acceptor",),
        over_within_s=_ALL_REPLACED_WITHIN_S,
    ),
    "supervisor hup, term": Kind(
        strike=_hang_up_and_terminate, stales=True, errors=_DRAINING, exit_codes=frozenset({0})
    ),
    "supervisor term": Kind(
        strike=partial(_signal_supervisor, numbers=[_SIGTERM]), stales=True, errors=_DRAINING,
        exit_codes=frozenset({0}),
    ),
    **{
        f"supervisor {name}": Kind(
            strike=partial(_terminate_twice, numbers=numbers), stales=True, cuts=True,
            errors=_DRAINING, exit_codes=frozenset({128 + numbers[1]}), over_within_s=_SLACK_S,
        )
        for name, numbers in (
            ("term twice", (_SIGTERM, _SIGTERM)), ("int, term", (signal.SIGINT, _SIGTERM))
        )
    },
    **{
        f"supervisor term, {stopped} stopped": Kind(
            strike=partial(_terminate_with, stopped=stopped), stales=True, errors=_DRAINING,
            exit_codes=frozenset({0}), flags=_SHORT_DRAIN,
            over_within_s=SHORT_DRAIN_TIMEOUT_S + _TERMINATE_TIMEOUT_S + _SLACK_S,
        )
        for stopped in ("engine", "acceptor")
    },
    **{
        f"supervisor {name}": Kind(
            strike=partial(_signal_supervisor, numbers=[number]), cuts=True, stales=True,
            exit_codes=frozenset({-number}), leaves_directory=True, restarts=restarts,
            errors=frozenset({"engine_starting"}) if restarts else _NONE,
        )
        for name, number, restarts in (
            ("kill", _SIGKILL, False), ("segv", _SIGSEGV, False), ("kill, restart", _SIGKILL, True)
        )
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A server's: the blows that it must survive, and the one that ends it."""

    survives: tuple[Blow, ...]
    last: Blow

    @property
    def respawn(self) -> bool:
        return KINDS[self.last.kind].respawn is not False


def kinds_for(engine: Engine, *, ranks: int = 1) -> list[str]:
    """The kinds that an engine of so many ranks can be dealt."""
    return [
        name
        for name, kind in KINDS.items()
        if (engine == "sim" or not kind.scripted) and (ranks > 1 or not kind.ranked)
    ]


def plan(seed: int, kinds: Sequence[str], *, blows: int) -> list[Life]:
    """`blows` of each kind, in an order and at moments that depend on the seed alone."""
    rng = random.Random(seed)
    all_blows = [_drawn(rng, kind) for kind in kinds for _ in range(blows)]
    rng.shuffle(all_blows)
    last = [blow for blow in all_blows if KINDS[blow.kind].exit_codes]
    survived = [blow for blow in all_blows if not KINDS[blow.kind].exit_codes]
    if survived and not any(_hosts(blow, respawn=True) for blow in last):
        last.append(_drawn(rng, "supervisor term"))
    dealt: list[list[Blow]] = [[] for _ in last]
    for count, blow in enumerate(survived):
        lives = [
            index
            for index, end in enumerate(last)
            if _hosts(end, respawn=KINDS[blow.kind].respawn is True)
        ]
        dealt[lives[count % len(lives)]].append(blow)
    return [Life(survives=tuple(s), last=end) for s, end in zip(dealt, last, strict=True)]


def _hosts(last: Blow, *, respawn: bool) -> bool:
    """Whether a life that ends so has others before: with the usual settings, and an engine that is
    respawned if it must be."""
    kind = KINDS[last.kind]
    return not kind.flags and not (respawn and kind.respawn is False)


def _drawn(rng: random.Random, kind: str) -> Blow:
    return Blow(
        kind=kind,
        after_s=rng.uniform(0.1, 0.6),
        lane=rng.randrange(64),
        hold=rng.random(),
        seed=rng.randrange(1 << 32),
    )
