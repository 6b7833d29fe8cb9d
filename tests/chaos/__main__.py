"""`python -m tests.chaos`: many blows of every kind, under load, and what they cost as a table.

A run is drawn from its seed: what failed is dealt again by the same command line.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.blows import kinds_for
from tests.chaos.driver import Setup, drive
from tests.chaos.figures import table

if TYPE_CHECKING:
    from tests.chaos.driver import Outcome


def main(argv: list[str] | None = None) -> int:
    """Run; return 1 if anything was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--engine", choices=["sim", "embedded"], default="sim")
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="of the engine, over MPI")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--blows", type=int, default=50, help="of each kind")
    parser.add_argument("--kind", action="append", help="this kind alone; may be repeated")
    options = parser.parse_args(argv)
    known = kinds_for(options.engine, ranks=options.ranks)
    kinds = options.kind or known
    if unknown := set(kinds) - set(known):
        parser.error(f"no such kind for {options.engine}: {unknown}; known: {known}")
    print(f"seed {options.seed}", flush=True)
    began_s = time.monotonic()

    def tell(outcome: Outcome) -> None:
        print(
            f"{time.monotonic() - began_s:7.1f} {outcome.blow.kind}:"
            f" answered {outcome.answered_s:.2f} s, over {outcome.over_s:.2f} s"
            f" {' '.join(f'{ending}={count}' for ending, count in outcome.endings.items())}",
            *(f"\n        VIOLATION {violation}" for violation in outcome.violations),
            flush=True,
        )

    with tempfile.TemporaryDirectory(prefix="fs-chaos-") as scratch:
        outcomes = drive(
            Setup(
                engine=options.engine,
                frontends=options.frontends,
                ranks=options.ranks,
                clients=options.clients,
                directory=Path(scratch),
            ),
            seed=options.seed,
            kinds=kinds,
            blows=options.blows,
            tell=tell,
        )
    print(table(outcomes))
    violated = sum(bool(outcome.violations) for outcome in outcomes)
    print(f"{len(outcomes)} blows, {violated} violated something; seed {options.seed}")
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
