"""`python -m bench run`: fastserve and its peers side by side, into a directory of results."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

from bench import plots, report
from bench.compare import Cell, Options, compare
from bench.servers import BUNDLED, BY_CHOICE, Server, fastserve
from bench.works import WORKS, Work
from fastserve.load.build import LoadError, build
from fastserve.load.cpu import parse_cores


def main(argv: list[str]) -> int:
    """Measure and write results. Returns 1 if any answer was wrong. Raises LoadError."""
    arguments = _parser().parse_args(argv)
    servers = _servers(arguments)
    works = _works(arguments.work)
    options = _options(arguments)
    build()
    cells: list[Cell] = []
    directory: Path = arguments.out
    directory.mkdir(parents=True, exist_ok=True)
    say(f"{len(servers)} servers, {len(works)} works, {options.rounds} rounds")
    try:
        for cell in compare(servers, works, options, say=say):
            cells.append(cell)
    finally:
        # What is there is worth keeping, however this ends.
        _write(cells, servers, works, options, directory=directory)
    print(report.as_markdown(cells, servers, works, options))
    return int(not cells or any(cell.failures for cell in cells))


def say(line: str) -> None:
    """Progress goes to stderr, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def _write(
    cells: list[Cell],
    servers: list[Server],
    works: list[Work],
    options: Options,
    *,
    directory: Path,
) -> None:
    if not cells:
        return
    (directory / "results.json").write_text(report.as_json(cells, servers, works, options))
    (directory / "results.md").write_text(report.as_markdown(cells, servers, works, options))
    try:
        drawn = plots.draw(cells, servers, works, directory=directory)
    except ImportError:
        say("no plots: matplotlib is not installed")
        drawn = []
    say(f"written to {directory}: results.json, results.md, {len(drawn)} plots")


def _servers(arguments: argparse.Namespace) -> list[Server]:
    """Who is measured: those that are chosen, as far as they are installed."""
    known = {each.name: each for each in (*BUNDLED, *BY_CHOICE)}
    names = [each.name for each in BUNDLED] if arguments.peer is None else arguments.peer
    unknown = [name for name in names if name not in known and name != "none"]
    if unknown:
        raise LoadError(f"no such peer: {', '.join(unknown)}; known: {', '.join(known)}, none")
    servers = [fastserve(frontends=number) for number in arguments.frontends]
    for name in names:
        if name == "none":
            continue
        missing = known[name].missing()
        if missing:
            say(f"{name} is skipped: {', '.join(missing)} not installed")
        else:
            servers.append(known[name])
    for text in arguments.server:
        name, _, command = text.partition("=")
        if not command:
            raise LoadError(f"--server {text!r} is not NAME=COMMAND")
        servers.append(Server(name=name, command=command, paced="{step_ms}" in command))
    if not servers:
        raise LoadError("there is no server to measure")
    return servers


def _works(pattern: str) -> list[Work]:
    works = [work for work in WORKS if re.search(pattern, work.name)]
    if not works:
        raise LoadError(f"no work is called {pattern!r}: {', '.join(w.name for w in WORKS)}")
    return works


def _options(arguments: argparse.Namespace) -> Options:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 and not (arguments.server_cores and arguments.load_cores):
        raise LoadError("two cores are needed, one for the server and one for the load")
    return Options(
        rounds=arguments.rounds,
        window_s=arguments.window_s,
        drain_s=arguments.drain_s,
        attempts_max=arguments.attempts,
        server_cores=arguments.server_cores or frozenset(cores[:1]),
        load_cores=arguments.load_cores or frozenset(cores[-1:]),
        model=arguments.model,
        start_timeout_s=arguments.start_timeout_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench run", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/bench"), help="where results go (%(default)s)")
    add("--rounds", type=int, default=3, help="how often everything is measured (%(default)s)")
    add("--window-s", type=float, default=2.0, help="seconds of a measurement (%(default)s)")
    add("--drain-s", type=float, default=5.0, help="seconds to wait for last answers (%(default)s)")
    add("--attempts", type=int, default=3, help="tries while others disturb (%(default)s)")
    add("--work", default="", metavar="REGEX", help="only works whose name it is found in")
    add(
        "--frontends",
        type=lambda text: [int(part) for part in text.split(",") if part],
        default=[1],
        metavar="K,K",
        help="fastserve's acceptors, each number a server of its own (1)",
    )
    names = ", ".join(each.name for each in (*BUNDLED, *BY_CHOICE))
    add("--peer", action="append", help=f"one to compare with, or none: {names}")
    add("--server", action="append", default=[], metavar="NAME=COMMAND", help="any other server")
    add("--model", help="for servers that need one: a path or a name, in their own way")
    add("--server-cores", type=parse_cores, help="cores for the server (the first)")
    add("--load-cores", type=parse_cores, help="cores for the load, one program on each (the last)")
    add("--start-timeout-s", type=float, default=120.0, help="to become ready (%(default)s)")
    return parser
