"""The plan of a run: which blows in which lives of a server. It is drawn from its seed alone.

A life is some blows that the server must survive, and a last one that ends it, in a certain way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos.kinds import KINDS
from tests.chaos.scene import Blow

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A server's: the blows that it must survive, and the one that ends it."""

    survives: tuple[Blow, ...]
    last: Blow

    @property
    def respawn(self) -> bool:
        return KINDS[self.last.kind].respawn is not False


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
