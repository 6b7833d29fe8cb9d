"""Blows under load, and what must hold after each: a few on every run, all of them when asked for.

A failure names the command that deals the same blows again.
"""

from __future__ import annotations

import random
import shlex
from typing import TYPE_CHECKING

import pytest

from tests.chaos.driver import Setup, drive
from tests.chaos.figures import table
from tests.chaos.kinds import kinds_for
from tests.chaos.records import Record

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chaos.scene import Engine

# Of each kind of process, and of each way to end; those that wait for a time limit are left out.
QUICK = [
    "acceptor kill", "acceptor term", "acceptor pause", "all acceptors kill",
    "engine kill, respawned", "engine and acceptor kill", "engine pause", "engine kill",
    "supervisor hup storm", "supervisor term", "supervisor term twice",
    "supervisor kill, restart",
]  # fmt: skip
QUICK_EMBEDDED = ["acceptor kill", "engine kill, respawned", "engine kill", "supervisor term"]


def deal(
    directory: Path,
    *,
    engine: Engine,
    frontends: int,
    kinds: list[str],
    blows: int,
    ranks: int = 1,
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    setup = Setup(engine=engine, frontends=frontends, clients=12, directory=directory, ranks=ranks)
    outcomes = drive(setup, seed=seed, kinds=kinds, blows=blows)
    print(table([Record.of(outcome, setup, seed=seed) for outcome in outcomes]))
    again = (
        f"python -m tests.chaos --seed {seed} --engine {engine} --frontends {frontends}"
        f" --ranks {ranks} --clients 12 --blows {blows} --kinds {shlex.join(kinds)}"
    )
    violations = [f"{o.blow.kind}: {each}" for o in outcomes for each in o.violations]
    assert not violations, "\n".join([*violations, again])
    assert len(outcomes) >= blows * len(kinds)


@pytest.mark.timeout(300)
def test_a_few_blows(tmp_path: Path) -> None:
    deal(tmp_path, engine="sim", frontends=4, kinds=QUICK, blows=1)


@pytest.mark.timeout(300)
def test_a_few_blows_with_a_real_model(tmp_path: Path) -> None:
    deal(tmp_path, engine="embedded", frontends=1, kinds=QUICK_EMBEDDED, blows=1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("frontends", [1, 4, 16])
@pytest.mark.parametrize("engine", ["sim", "embedded"])
def test_every_blow(tmp_path: Path, engine: Engine, frontends: int) -> None:
    deal(tmp_path, engine=engine, frontends=frontends, kinds=kinds_for(engine), blows=3)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_blow_to_an_engine_of_ranks(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("mpi4py")
    kinds = kinds_for("sim", ranks=ranks)
    deal(tmp_path, engine="sim", frontends=4, ranks=ranks, kinds=kinds, blows=2)
