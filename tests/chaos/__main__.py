"""`python -m tests.chaos`: many blows of every kind, under load, and what they cost as a table.

A run is drawn from its seed: what failed is dealt again by the same command line.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.driver import Setup, drive
from tests.chaos.figures import by_configuration, table
from tests.chaos.kinds import kinds_for
from tests.chaos.records import Record, append, read

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
    parser.add_argument("--kinds", nargs="+", default=["all"], help="by name, or all")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append a line for each blow")
    parser.add_argument(
        "--table", type=Path, nargs="+", metavar="FILE", help="deal nothing: show these records"
    )
    parser.add_argument("flags", nargs="*", help="after --: more flags for the server")
    options = parser.parse_args(argv)
    if options.table:
        return _show(read(options.table))
    known = kinds_for(options.engine, ranks=options.ranks)
    kinds = known if options.kinds == ["all"] else options.kinds
    if unknown := set(kinds) - set(known):
        parser.error(f"no such kind for {options.engine}: {unknown}; known: {known}")
    print(f"seed {options.seed}", flush=True)
    began_s = time.monotonic()

    records: list[Record] = []

    def tell(outcome: Outcome) -> None:
        records.append(Record.of(outcome, setup, seed=options.seed))
        if options.record:
            append(options.record, records[-1])
        print(
            f"{time.monotonic() - began_s:7.1f} {outcome.blow.kind}:"
            f" answered {outcome.answered_s:.2f} s, over {outcome.over_s:.2f} s"
            f" {' '.join(f'{ending}={count}' for ending, count in outcome.endings.items())}",
            *(f"\n        VIOLATION {violation}" for violation in outcome.violations),
            flush=True,
        )

    # A run that is interrupted has its figures, too.
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="fs-chaos-") as scratch,
    ):
        setup = Setup(
            engine=options.engine,
            frontends=options.frontends,
            ranks=options.ranks,
            clients=options.clients,
            directory=Path(scratch),
            flags=tuple(options.flags),
        )
        drive(setup, seed=options.seed, kinds=kinds, blows=options.blows, tell=tell)
    if records:
        print(table(records))
    violated = sum(bool(record.violations) for record in records)
    print(f"{len(records)} blows, {violated} violated something; seed {options.seed}")
    return 1 if violated else 0


def _show(records: list[Record]) -> int:
    print(table(records), by_configuration(records), sep="\n\n")
    violated = [record for record in records if record.violations]
    for record in violated:
        print(f"\n{record.configuration}, {record.kind}, seed {record.seed}:", *record.violations)
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
