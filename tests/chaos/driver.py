"""Drives a plan: starts servers, loads them, deals the blows, and checks what must hold after each.

every request has one ending, and none that the blow does not excuse
the engine's count of requests, and the acceptors', come back to zero
nobody was replaced but the victims
a server that was to end did, with the right code, and left nothing
all of it within bounds
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.request import urlopen

import psutil

from tests.chaos.asking import Ending, embedded, simulated
from tests.chaos.kinds import KINDS
from tests.chaos.load import Load
from tests.chaos.plan import plan
from tests.chaos.scene import (
    DRAIN_TIMEOUT_S,
    SILENT_TIMEOUT_S,
    STALL_KILL_S,
    START_TIMEOUT_S,
    START_TIMEOUT_S_MAX,
    Scene,
)
from tests.e2e.harness import DEADLINE_S, Server, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.chaos.kinds import Kind
    from tests.chaos.load import Result
    from tests.chaos.plan import Life
    from tests.chaos.scene import Blow, Engine, Struck

_SETTLED_WITHIN_S = 20.0
_AFTER_RECOVERY_S = 0.2
_FEW = 4
# From a request on a kept connection until its client sees that this was closed: one round trip, on
# a machine whose cores have other things to do.
_STALE_WITHIN_S = 1.0
# What a request is counted as, besides the endings.
LOST = "lost"

FLAGS = (
    "--lane-heartbeat-interval-s", "0.1",
    "--respawn-restarts-max", "1000",
    "--respawn-silent-timeout-s", str(SILENT_TIMEOUT_S),
    "--engine-stall-unhealthy-s", str(STALL_KILL_S / 2),
    "--engine-stall-kill-s", str(STALL_KILL_S),
    "--engine-respawn-window-s", "10",
    "--drain-timeout-s", str(DRAIN_TIMEOUT_S),
    )  # fmt: skip
_ENGINE_FLAGS: dict[Engine, tuple[str, ...]] = {
    "sim": ("--engine", "sim", "--sim-step-ms", "4", "--engine-max-seq-len", "8192"),
    "embedded": ("--engine", "llamacpp", "--engine-max-num-seqs", "16"),
}


class Violation(AssertionError):
    """Something that must hold after a blow did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is put under load. `directory` is where every server of the run has its own.

    `flags` are for the server, besides those that the blows need. Its engine has so many `ranks`:
    itself, and processes named "rank 1" and so on.
    """

    engine: Engine
    frontends: int
    clients: int
    directory: Path
    flags: tuple[str, ...] = ()
    ranks: int = 1


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a blow cost. `answered_s`: until the last client that it hit was answered; `over_s`:
    until the process tree was gone, or whole again."""

    blow: Blow
    answered_s: float = 0.0
    over_s: float = 0.0
    endings: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


def drive(
    setup: Setup,
    *,
    seed: int,
    kinds: Sequence[str],
    blows: int,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Deal `blows` of each of `kinds`; return what each cost, violations among it."""
    make = simulated if setup.engine == "sim" else embedded
    make(random.Random(seed))  # reads the vocabulary, so that nobody waits for that under load
    outcomes = []
    with Load(make, seed=str(seed), num_clients=setup.clients) as load:
        for life in plan(seed, kinds, blows=blows):
            for outcome in _Living(setup, life, load).live():
                tell(outcome)
                outcomes.append(outcome)
    return outcomes


class _Living:
    """One life of a server."""

    def __init__(self, setup: Setup, life: Life, load: Load) -> None:
        self._setup = setup
        self._life = life
        self._load = load
        self._server = self._start()

    @property
    def _start_timeout_s(self) -> float:
        return START_TIMEOUT_S if self._setup.frontends <= _FEW else START_TIMEOUT_S_MAX

    def _start(self, *flags: str) -> Server:
        return Server(
            "--run-directory", str(self._setup.directory),
            "--frontends", str(self._setup.frontends), "--dp-size", str(self._setup.ranks),
            *_ENGINE_FLAGS[self._setup.engine], *FLAGS,
            "--start-timeout-s", str(self._start_timeout_s),
            "--engine-respawn", "100" if self._life.respawn else "0",
            *KINDS[self._life.last.kind].flags, *self._setup.flags, *flags,
        )  # fmt: skip

    def live(self) -> list[Outcome]:
        """Deal every blow of this life. A server that is not as it should be is given up."""
        outcomes = []
        try:
            self._server.wait_ready(deadline_s=2 * self._start_timeout_s)
            self._load.port = self._server.port
            scene = Scene(
                self._server,
                self._load,
                engine=self._setup.engine,
                frontends=self._setup.frontends,
                ranks=self._setup.ranks,
            )
            for blow in (*self._life.survives, self._life.last):
                outcomes.append(self._deal(scene, blow))
                if outcomes[-1].violations:
                    print(self._server.log[-4000:])
                    break
        finally:
            self._load.hold()
            self._load.take()
            self._server.remember_processes()
            self._server.kill_everything()
            if outcomes and outcomes[-1].violations:
                _sweep(self._setup.directory)
        return outcomes

    def _deal(self, scene: Scene, blow: Blow) -> Outcome:
        outcome = Outcome(blow=blow)
        kind = KINDS[blow.kind]
        try:
            before = scene.processes()
            self._check_tree(before)
            self._load.go()
            time.sleep(blow.after_s)
            began_s = time.monotonic()
            struck = kind.strike(scene, blow)
            struck.began_s = began_s
            if kind.exit_codes:
                self._see_it_end(kind, outcome, struck)
                if kind.restarts:
                    self._see_it_start_again(outcome)
            else:
                wait_until(struck.recovered, deadline_s=kind.over_within_s)
                outcome.over_s = time.monotonic() - struck.at_s
                time.sleep(_AFTER_RECOVERY_S)
            self._load.hold()
            results = self._load.take()
            _judge(kind, outcome, struck, results, setup=self._setup)
            if not kind.exit_codes:
                self._see_it_settle(kind, scene, before)
            self._see_no_traceback(blow)
        except (AssertionError, OSError, subprocess.TimeoutExpired, psutil.Error) as error:
            outcome.violations.append(f"{type(error).__name__}: {error}")
        return outcome

    # ---- a server that ends

    def _see_it_end(self, kind: Kind, outcome: Outcome, struck: Struck) -> None:
        code = self._server.wait_exit()
        if code not in kind.exit_codes:
            outcome.violations.append(f"exit code {code}, not one of {set(kind.exit_codes)}")
        wait_until(lambda: not self._server._alive(), deadline_s=10.0)
        outcome.over_s = time.monotonic() - struck.at_s
        if outcome.over_s > kind.over_within_s:
            outcome.violations.append(f"over after {outcome.over_s:.1f} s")
        left = [path.name for path in self._setup.directory.iterdir()]
        if len(left) > kind.leaves_directory:
            outcome.violations.append(f"left in the run directory: {left}")
        if not kind.leaves_directory and self._server.port_file.exists():
            outcome.violations.append("left: the port file")
        # Not by binding to it: the kernel may have given it to somebody's outgoing connection.
        if _is_listened_on(self._load.port):
            outcome.violations.append("left: somebody listens on the port")

    def _see_it_start_again(self, outcome: Outcome) -> None:
        """As an init system would: at once, on the same port, with the clients still there."""
        with self._start("--port", str(self._load.port)) as server:
            self._load.hold()
            answered = len(self._load.results)
            self._load.go()
            wait_until(lambda: len(self._load.results) > answered + self._setup.clients)
            self._load.hold()
            late = self._load.results[answered:]
            outcome.violations += [
                f"a request to the next server ended {result.ending} {result.verdict.detail}"
                for result in late
                if result.ending not in (Ending.WELL, Ending.LEFT)
            ]
            server.process.terminate()
            code = server.wait_exit()
            if code:
                outcome.violations.append(f"the next server's exit code: {code}")
            # It has swept what the killed one left.
            if left := [path.name for path in self._setup.directory.iterdir()]:
                outcome.violations.append(f"left in the run directory: {left}")

    # ---- a server that lives on

    def _see_it_settle(self, kind: Kind, scene: Scene, before: Mapping[str, object]) -> None:
        wait_until(lambda: self._num_in_flight() == (0, 0), deadline_s=_SETTLED_WITHIN_S)
        status, body = self._server.get("/health")
        assert (status, body["status"]) == (200, "ready"), body
        after = scene.processes()
        self._check_tree(after)
        others = {name for name in before if after[name] != before[name]}
        # An engine's other ranks end with it.
        victims = (*kind.replaces, *(["rank"] if "engine" in kind.replaces else []))
        assert all(name.startswith(victims) for name in others), f"replaced: {others}"
        [_] = self._setup.directory.iterdir()

    def _check_tree(self, processes: Mapping[str, object]) -> None:
        names = {"supervisor", "engine"}
        names |= {f"acceptor {lane}" for lane in range(self._setup.frontends)}
        names |= {f"rank {number}" for number in range(1, self._setup.ranks)}
        assert set(processes) == names, f"processes: {sorted(processes)}"

    def _num_in_flight(self) -> tuple[int, int]:
        """What the engine has, and what the acceptors think that it has."""
        with urlopen(self._server.url + "/metrics", timeout=DEADLINE_S) as answer:
            metrics = answer.read().decode()
        each = re.findall(r"^fastserve_requests_in_flight\{.*\} (\S+)$", metrics, re.MULTILINE)
        assert len(each) == self._setup.frontends
        return self._server.num_in_engine(), round(sum(float(count) for count in each))

    def _see_no_traceback(self, blow: Blow) -> None:
        dealt = {each.kind for each in self._life.survives} | {blow.kind}
        if not any(KINDS[kind].tracebacks for kind in dealt):
            assert "Traceback" not in self._server.log, "a traceback in the log"


def _is_listened_on(port: int) -> bool:
    return any(
        each.status == psutil.CONN_LISTEN and each.laddr[1:] == (port,)
        for each in psutil.net_connections("tcp")
    )


def _judge(
    kind: Kind, outcome: Outcome, struck: Struck, results: list[Result], *, setup: Setup
) -> None:
    """Count the endings, and name those that the blow does not excuse."""
    for result in results:
        ending = counted_as(kind, struck, result)
        outcome.endings[ending] = outcome.endings.get(ending, 0) + 1
        if ending == LOST:
            after_s = result.began_s - struck.at_s
            took_s = result.ended_s - result.began_s
            outcome.violations.append(
                f"a request ended {result.ending} {result.verdict.detail}"
                f" (began {after_s:+.3f} s from the blow, took {took_s:.3f} s)"
            )
    in_flight = [r for r in results if r.began_s <= struck.at_s <= r.ended_s]
    hit = [r for r in in_flight if r.ending in (Ending.ERROR, Ending.CUT)] or in_flight
    outcome.answered_s = max((r.ended_s - struck.at_s for r in hit), default=0.0)
    if outcome.answered_s > kind.answered_within_s:
        outcome.violations.append(f"answered after {outcome.answered_s:.1f} s")
    if not kind.exit_codes and not any(
        r.ending is Ending.WELL and r.ended_s > struck.at_s + outcome.over_s for r in results
    ):
        outcome.violations.append("nobody was answered after it")


def counted_as(kind: Kind, struck: Struck, result: Result) -> str:
    """Return the ending if it is as asked for, or the blow excuses it; LOST if nothing does."""
    if result.ending in (Ending.WELL, Ending.LEFT):
        return result.ending
    excused = result.ended_s >= struck.began_s and _is_excused(kind, struck, result)
    return result.ending if excused else LOST


def _is_excused(kind: Kind, struck: Struck, result: Result) -> bool:
    match result.ending:
        case Ending.ERROR:  # an honest one, and one of this blow's
            return result.verdict.detail in kind.errors
        case Ending.REFUSED:  # nobody listens any more, and nobody is to
            return bool(kind.exit_codes) and result.ended_s > struck.at_s
        case Ending.STALE if kind.stales and result.ended_s - result.began_s < _STALE_WITHIN_S:
            # It has crossed with the close of an idle connection, for which RFC 9112 9.3.1 has the
            # remedy. One that was read and then dropped would have taken longer.
            return True
        case Ending.STALE | Ending.CUT:
            # The kernel has closed it, with the process that had it: the only one there was, or one
            # of those that were held by a victim as it stood still, before it was killed.
            return kind.cuts or result.port in struck.held
        case _:
            return False


def _sweep(directory: Path) -> None:
    """After a violation: the next server must not be blamed for what this one left."""
    for leftover in directory.iterdir():
        shutil.rmtree(leftover)
