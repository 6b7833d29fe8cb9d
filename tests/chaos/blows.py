"""The blows: what each does to a server under load, and from what moment its cost is counted.

A function strikes once, at places and with waits that are drawn from the Blow alone, and returns
what it did. What must hold after it is told in kinds.py.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import psutil

from tests.chaos.asking import endless, lasting, simulated
from tests.chaos.scene import SILENT_TIMEOUT_S, STALL_KILL_S, Struck, standing
from tests.e2e.harness import DEADLINE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.chaos.scene import Blow, Scene


# ---- acceptors


def strike_acceptors(scene: Scene, blow: Blow, *, number: int, share: float = 0.0) -> Struck:
    """Signal one acceptor, or a share of them. It is stopped first, so that what it holds is known.

    The signal finds it where it stopped, which is anywhere.
    """
    count = max(1, round(scene.frontends * share))
    lanes = [(blow.lane + each) % scene.frontends for each in range(count)]
    victims = {f"acceptor {lane}": scene.find(f"acceptor {lane}") for lane in lanes}
    struck = Struck(at_s=time.monotonic())
    for victim in victims.values():
        victim.suspend()
    struck.held = scene.held_by(*[standing(victim) for victim in victims.values()])
    struck.at_s = time.monotonic()
    for victim in victims.values():
        victim.send_signal(number)
    if number not in (signal.SIGKILL, signal.SIGSTOP):  # any other waits for it to wake up
        for victim in victims.values():
            victim.resume()
    pids = {name: victim.pid for name, victim in victims.items()}
    struck.recovered = lambda: scene.replaced(pids)
    return struck


def terminate_acceptor(scene: Scene, blow: Blow) -> Struck:
    """Told to end by somebody who is not its supervisor: it lets its requests finish."""
    name = f"acceptor {blow.lane % scene.frontends}"
    victim = scene.find(name)
    struck = Struck(at_s=time.monotonic(), recovered=partial(scene.replaced, {name: victim.pid}))
    victim.terminate()
    return struck


def stop_acceptor(scene: Scene, blow: Blow) -> Struck:
    """Stopped for good: only its silence tells."""
    return strike_acceptors(scene, blow, number=signal.SIGSTOP)


def stop_successor(scene: Scene, blow: Blow) -> Struck:
    """The successor of a killed acceptor stands still before it has begun to accept."""
    name = f"acceptor {blow.lane % scene.frontends}"
    victim = scene.find(name)
    struck = strike_acceptors(scene, blow, number=signal.SIGKILL)
    successor = wait_until(lambda: (now := scene.processes().get(name)) != victim and now)
    successor.suspend()
    struck.recovered = lambda: scene.replaced({name: successor.pid})
    return struck


# ---- the engine


def strike_engine(scene: Scene, _blow: Blow, *, number: int) -> Struck:
    victim = scene.find("engine")
    struck = Struck(at_s=time.monotonic(), recovered=_engine_replaced(scene, victim))
    victim.send_signal(number)
    return struck


def strike_rank(scene: Scene, blow: Blow, *, number: int) -> Struck:
    """One of the ranks that the engine has started: its end is the engine's."""
    engine = scene.find("engine")
    victim = scene.find(f"rank {1 + blow.lane % (scene.ranks - 1)}")
    struck = Struck(at_s=time.monotonic(), recovered=_engine_replaced(scene, engine))
    victim.send_signal(number)
    return struck


def _engine_replaced(scene: Scene, victim: psutil.Process) -> Callable[[], bool]:
    pid = victim.pid
    return lambda: scene.replaced({"engine": pid})


def strike_engine_held_up(scene: Scene, blow: Blow, *, stop: bool) -> Struck:
    """Clients that stop in the middle of a request, or an acceptor that stands still, hold up no
    end."""
    rng = random.Random(blow.seed)
    held: set[int] = set()
    if stop:
        victim = scene.find(f"acceptor {blow.lane % scene.frontends}")
        victim.suspend()
        held = scene.held_by(standing(victim))
    else:
        for _ in range(2 * scene.frontends):
            scene.load.ask(
                endless(rng, engine=scene.engine, leaves_after=0), share=rng.uniform(0.1, 0.9)
            )
        time.sleep(0.3)
    struck = strike_engine(scene, blow, number=signal.SIGKILL)
    struck.held = held
    return struck


def script_engine(scene: Scene, blow: Blow, **script: object) -> Struck:
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


def kill_engine_and_acceptor(scene: Scene, blow: Blow) -> Struck:
    engine = scene.find("engine")
    struck = strike_acceptors(scene, blow, number=signal.SIGKILL)
    engine.kill()
    acceptors = struck.recovered
    struck.recovered = lambda: acceptors() and scene.replaced({"engine": engine.pid})
    return struck


def kill_engine_twice(scene: Scene, blow: Blow) -> Struck:
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


def pause(scene: Scene, blow: Blow, *, names: Sequence[str], least_s: float, most_s: float
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


def pause_acceptor(scene: Scene, blow: Blow) -> Struck:
    name = f"acceptor {blow.lane % scene.frontends}"
    return pause(scene, blow, names=[name], least_s=0.05, most_s=SILENT_TIMEOUT_S / 2)


def pause_tree(scene: Scene, blow: Blow) -> Struck:
    """As a container's pause does: longer than anybody may be silent."""
    most_s = max(SILENT_TIMEOUT_S, STALL_KILL_S) + 1.0
    return pause(scene, blow, names=list(scene.processes()), least_s=most_s - 0.5, most_s=most_s)


def kill_acceptor_of_paused_engine(scene: Scene, blow: Blow) -> Struck:
    """What the dead acceptor had asked for reaches the engine together with its successor."""
    engine = scene.find("engine")
    engine.suspend()
    standing(engine)
    rng = random.Random(blow.seed)
    for _ in range(4 * scene.frontends):
        scene.load.ask(endless(rng, engine=scene.engine, leaves_after=4000))
    time.sleep(0.3)  # until they have been submitted
    struck = strike_acceptors(scene, blow, number=signal.SIGKILL)
    name = f"acceptor {blow.lane % scene.frontends}"
    wait_until(lambda: name in scene.processes())
    time.sleep(0.5 + blow.hold)
    engine.resume()
    return struck


# ---- the supervisor


def hang_up(scene: Scene, _blow: Blow) -> Struck:
    acceptors = {
        name: process.pid for name, process in scene.processes().items() if "acceptor" in name
    }
    struck = Struck(at_s=time.monotonic(), recovered=lambda: scene.replaced(acceptors))
    scene.server.process.send_signal(signal.SIGHUP)
    return struck


def hang_up_again_and_again(scene: Scene, blow: Blow) -> Struck:
    """What comes while they are being replaced asks for nothing new."""
    struck = hang_up(scene, blow)
    for _ in range(20):
        time.sleep(blow.hold / 100)
        scene.server.process.send_signal(signal.SIGHUP)
    return struck


def hang_up_and_terminate(scene: Scene, blow: Blow) -> Struck:
    """The end comes while acceptors are being replaced."""
    hang_up(scene, blow)
    time.sleep(2 * blow.hold)
    return signal_supervisor(scene, blow, numbers=[signal.SIGTERM])


def hang_up_and_kill(scene: Scene, blow: Blow) -> Struck:
    """While acceptors are replaced one by one, one more dies."""
    struck = hang_up(scene, blow)
    time.sleep(blow.hold)
    killed = strike_acceptors(scene, blow, number=signal.SIGKILL)
    struck.held = killed.held
    return struck


def hang_up_and_stop(scene: Scene, blow: Blow) -> Struck:
    """An acceptor that stands still in the middle of being replaced holds up nobody."""
    victim = scene.find(f"acceptor {blow.lane % scene.frontends}")
    struck = hang_up(scene, blow)
    time.sleep(blow.hold / 10)
    if victim.is_running():
        victim.suspend()
        with contextlib.suppress(psutil.NoSuchProcess, OSError):  # it had drained by then
            struck.held = scene.held_by(standing(victim))
    return struck


def signal_supervisor(scene: Scene, blow: Blow, *, numbers: Iterable[int]) -> Struck:
    struck = Struck(at_s=time.monotonic())
    for count, number in enumerate(numbers):
        if count:
            time.sleep(blow.hold)
        if scene.server.process.poll() is None:
            scene.server.process.send_signal(number)
    return struck


def terminate_twice(scene: Scene, blow: Blow, *, numbers: Sequence[int]) -> Struck:
    """The second ends what the first would have waited for: a request that has no end."""
    begun = scene.load.ask(lasting(random.Random(blow.seed), engine=scene.engine))
    assert begun.wait(DEADLINE_S), "it is not answered"
    first, second = numbers
    scene.server.process.send_signal(first)
    time.sleep(blow.hold)
    struck = Struck(at_s=time.monotonic())
    scene.server.process.send_signal(second)
    return struck


def terminate_with(scene: Scene, blow: Blow, *, stopped: str) -> Struck:
    name = stopped if stopped == "engine" else f"acceptor {blow.lane % scene.frontends}"
    victim = scene.find(name)
    victim.suspend()
    held = set() if name == "engine" else scene.held_by(standing(victim))
    struck = signal_supervisor(scene, blow, numbers=[signal.SIGTERM])
    struck.held = held
    return struck
