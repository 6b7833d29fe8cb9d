"""`python -m bench aims`: what a user would notice, each figure beside what it should be.

    startup    until an acceptor answers, and until the server is ready
    spread     connections over 8 acceptors
    latency    what the host adds to the engine's time, in a closed loop and with Poisson arrivals

Each figure is a row beside its aim; exit code 1 if one was missed. Server and load have cores of
their own; a figure that others disturbed is marked `?`, and means little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import aims_parts
from bench.report import environment
from fastserve.load.build import LoadError, build
from fastserve.load.cpu import parse_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.aims_parts import Figure, Setting

PARTS: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "startup": aims_parts.startup,
    "spread": aims_parts.spread,
    "latency": aims_parts.latency,
}


@dataclass(frozen=True, slots=True)
class Row:
    """A figure and the part that it is of."""

    part: str
    figure: Figure

    def as_markdown(self) -> str:
        each = self.figure
        aim = "" if each.aim is None else f"<= {each.aim:g}"
        met = {None: "", True: "met", False: "**missed**"}[each.met]
        mark = "" if each.quiet else " ?"
        return f"| {self.part} | {each.name} | {each.value:.4g} {each.unit}{mark} | {aim} | {met} |"


def main(argv: list[str]) -> int:
    """Measure the parts that are asked for. Returns 1 if an aim was missed. Raises LoadError."""
    arguments = _parser().parse_args(argv)
    setting = _setting(arguments)
    build()
    rows: list[Row] = []
    print("| part | figure | value | aim | |\n|---|---|---|---|---|", flush=True)
    try:
        for part in arguments.part or PARTS:
            for figure in PARTS[part](setting):
                rows.append(Row(part, figure))
                print(rows[-1].as_markdown(), flush=True)
    finally:
        # What is there is worth keeping, however this ends.
        if arguments.json is not None:
            arguments.json.write_text(as_json(rows, setting))
    return int(any(row.figure.met is False for row in rows))


def as_json(rows: Sequence[Row], setting: Setting) -> str:
    """All rows, and what they were measured with."""
    settings = dataclasses.asdict(setting)
    settings |= {name: sorted(settings[name]) for name in ("server_cores", "load_cores")}
    figures = [
        {"part": row.part} | dataclasses.asdict(row.figure) | {"met": row.figure.met}
        for row in rows
    ]
    document = {"environment": environment(), "setting": settings, "figures": figures}
    return json.dumps(document, indent=1)


def _setting(arguments: argparse.Namespace) -> Setting:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise LoadError("two cores are needed, one for the server and one for the load")
    return aims_parts.Setting(
        server_cores=arguments.server_cores or frozenset(cores[:1]),
        load_cores=arguments.load_cores or frozenset(cores[-1:]),
        window_s=arguments.window_s,
        frontends=arguments.frontends,
        starts=arguments.starts,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench aims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--part", action="append", choices=PARTS, help="one to measure; may be repeated (all)")
    add("--frontends", type=int, default=8, help="startup, spread: acceptors (%(default)s)")
    add("--starts", type=int, default=3, help="startup: so many of each (%(default)s)")
    add("--window-s", type=float, default=2.0, help="seconds of a measurement (%(default)s)")
    add("--server-cores", type=parse_cores, help="cores for the server (the first)")
    add("--load-cores", type=parse_cores, help="cores for the load (the last)")
    add("--json", type=Path, help="write the figures to this file, too")
    return parser
