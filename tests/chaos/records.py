"""What each blow cost, one line of JSON each, so that many runs make one table.

A file may be appended to by several runs at a time: a line is written by one system call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import msgspec
import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.chaos.driver import Outcome, Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An Outcome, and what it came from. `engine`, `frontends`, `ranks` and `flags` as in Setup."""

    kind: str
    seed: int
    engine: str
    frontends: int
    ranks: int = 1
    flags: tuple[str, ...] = ()
    answered_s: float
    over_s: float
    endings: dict[str, int] = field(default_factory=dict)
    violations: tuple[str, ...] = ()

    @classmethod
    def of(cls, outcome: Outcome, setup: Setup, *, seed: int) -> Self:
        return cls(
            kind=outcome.blow.kind,
            seed=seed,
            engine=setup.engine,
            frontends=setup.frontends,
            ranks=setup.ranks,
            flags=setup.flags,
            answered_s=round(outcome.answered_s, 4),
            over_s=round(outcome.over_s, 4),
            endings={str(ending): count for ending, count in outcome.endings.items()},
            violations=tuple(outcome.violations),
        )

    @property
    def configuration(self) -> str:
        """In words: the engine, its ranks, the acceptors, and flags that are not the usual ones."""
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return " ".join((f"{self.engine}{ranks}, K = {self.frontends}", *self.flags))


def append(path: Path, record: Record) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(orjson.dumps(record) + b"\n")


def read(paths: Iterable[Path]) -> list[Record]:
    """Raises msgspec.DecodeError where a line is no record."""
    decode = msgspec.json.Decoder(Record).decode
    return [decode(line) for path in paths for line in path.read_bytes().splitlines()]
