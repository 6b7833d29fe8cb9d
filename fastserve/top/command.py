"""The command `fastserve top`. Exit codes: 0; 1, the server was not reached (with --once)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections import deque

from rich.console import Console
from rich.live import Live

from fastserve.top.figures import Figures, figures
from fastserve.top.scrape import NotReached, Scrape, Server
from fastserve.top.view import screen, waiting

_HISTORY_MAX = 120
_TIMEOUT_S = 5.0


def main(argv: list[str]) -> int:
    """Watch a server until told to stop, or look once."""
    arguments = parser().parse_args(argv)
    api_key = os.environ.get("OPENAI_API_KEY") or os.environ.get("FASTSERVE_API_KEY")
    try:
        server = Server(arguments.url, api_key=api_key, timeout_s=_TIMEOUT_S)
    except ValueError as error:
        parser().error(str(error))
    try:
        if arguments.once:
            return _once(server, interval_s=arguments.interval_s, as_json=arguments.json)
        _watch(server, interval_s=arguments.interval_s)
    except NotReached as error:
        sys.stderr.write(f"fastserve top: {error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    parser = argparse.ArgumentParser(
        prog="fastserve top",
        description="Watch a running fastserve: acceptors, streams, tokens, latencies, the engine.",
        epilog="The API key, if one is needed, is read from OPENAI_API_KEY or FASTSERVE_API_KEY.",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="where the server is (%(default)s)")
    add(
        "--interval-s",
        type=_interval,
        default=1.0,
        help="seconds between looks, 0.1 to 3600 (%(default)s)",
    )
    add("--once", action="store_true", help="look twice, an interval apart, print, and end")
    add("--json", action="store_true", help="with --once: print JSON")
    return parser


def rendered(figures: Figures) -> str:
    """The figures, for programs; percentiles are called p50 and so on."""
    fields = dataclasses.asdict(figures)
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        fields[name] = {f"p{100 * share:g}": value for share, value in fields[name].items()}
    return json.dumps(fields, indent=1)


def _once(server: Server, *, interval_s: float, as_json: bool) -> int:
    before = server.scrape()
    time.sleep(interval_s)
    found = figures(before, server.scrape())
    if as_json:
        sys.stdout.write(f"{rendered(found)}\n")
    else:
        history = [found.generation_tokens_per_s]
        Console().print(screen(found, url=server.url, history=history))
    return 0


def _watch(server: Server, *, interval_s: float) -> None:
    """Draw until a KeyboardInterrupt. A server that is gone is waited for."""
    history: deque[float] = deque(maxlen=_HISTORY_MAX)
    before: Scrape | None = None
    found: Figures | None = None
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            problem = ""
            try:
                now = server.scrape()
                if before is not None:
                    found = figures(before, now)
                    history.append(found.generation_tokens_per_s)
                before = now
            except NotReached as error:
                problem = str(error)
            if found is not None:
                shown = screen(found, url=server.url, history=history, problem=problem)
            else:
                shown = waiting(problem or f"{server.url}: looking")
            live.update(shown, refresh=True)
            time.sleep(interval_s)


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not from 0.1 to 3600")
    return seconds
