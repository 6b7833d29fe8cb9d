"""`fastserve bench`: load on any OpenAI-compatible server, and what came of it.

By default a closed loop: each of --connections clients asks again when it has its answer. --rate is
an open loop, in which requests come when they come, and latencies count from when they should have
been sent; --trace replays recorded requests at their times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve.load.ask import ask_model
from fastserve.load.build import LoadError
from fastserve.load.chats import chat_bodies
from fastserve.load.cpu import Meter, parse_cores
from fastserve.load.plan import Plan, Request, poisson, read_trace, target_of
from fastserve.load.run import Progress, Result, run

if TYPE_CHECKING:
    from fastserve.load.plan import Target

_QUANTILES = (0.5, 0.9, 0.99, 0.999)


def main(argv: list[str]) -> int:
    """Carry out the command. Returns the exit code: 1 if any answer failed, 2 if it never began."""
    # As an exception it ends the load on its way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = parser().parse_args(argv)
    try:
        return put_load(arguments)
    except LoadError as error:
        print(f"fastserve bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def put_load(arguments: argparse.Namespace) -> int:
    """Load a server and print figures. Returns 1 if any answer failed. Raises LoadError."""
    target = target_of(arguments.url, api_key=os.environ.get("OPENAI_API_KEY"))
    plan = _plan(arguments, target)
    cores = arguments.cores or os.sched_getaffinity(0)
    meter = None
    if arguments.server_pid is not None:
        meter = Meter(arguments.server_pid, cores=os.sched_getaffinity(arguments.server_pid))
    result = run(
        plan,
        cores=cores,
        processes=arguments.processes,
        on_progress=_show,
        on_window_edge=meter.read if meter else lambda: None,
    )
    if sys.stderr.isatty():
        print(file=sys.stderr)
    server_s = meter.usage().server_s if meter and len(meter.readings) > 1 else None
    print(as_text(result, server_s=server_s))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(result, server_s=server_s), indent=1))
    return int(bool(+result.failures) or result.unfinished > 0 or not result.answered)


def as_text(result: Result, *, server_s: float | None = None) -> str:
    """The figures, for people."""
    seconds = result.window_s or 1.0
    merged = result.merged / result.chunks if result.chunks else 0.0
    done = result.chunks or result.requests
    lines = [
        f"window      {result.window_s:.2f} s",
        f"requests    {result.requests} ({result.requests / seconds:.1f}/s)",
        f"chunks      {result.chunks} ({result.chunks / seconds:.0f}/s, {merged:.1%} merged)",
    ]
    for name, times in (("ttft", result.ttft), ("itl", result.itl), ("latency", result.latency)):
        if times.total:
            shown = "  ".join(f"p{100 * q:g} {times.quantile_ms(q):.2f}" for q in _QUANTILES)
            lines.append(f"{name:<11} {shown}  max {times.max_ns / 1e6:.2f} ms  (n={times.total})")
    if server_s is not None and done:
        lines.append(f"server CPU  {server_s:.2f} s ({server_s / done * 1e6:.1f} us each)")
    if done:
        lines.append(f"load CPU    {result.cpu_s:.2f} s ({result.cpu_s / done * 1e6:.2f} us each)")
    failures = ", ".join(f"{name} {number}" for name, number in (+result.failures).items())
    lines.append(f"failures    {failures or 'none'}; unfinished {result.unfinished}")
    return "\n".join([*lines, *(f"            {note}" for note in result.notes)])


def as_json(result: Result, *, server_s: float | None = None) -> dict[str, Any]:
    """The figures, for machines."""
    fields = {
        field.name: getattr(result, field.name)
        for field in dataclasses.fields(result)
        if field.name not in ("ttft", "itl", "latency", "failures")
    }
    for name, times in (("ttft", result.ttft), ("itl", result.itl), ("latency", result.latency)):
        fields[f"{name}_ms"] = {f"p{100 * q:g}": times.quantile_ms(q) for q in _QUANTILES} | {
            "max": times.max_ns / 1e6 if times.total else None,
            "mean": times.mean_ms(),
            "count": times.total,
        }
    return fields | {"failures": dict(result.failures), "server_cpu_s": server_s}


def _plan(arguments: argparse.Namespace, target: Target) -> Plan:
    if arguments.trace is not None:
        try:
            lines = arguments.trace.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise LoadError(f"the trace cannot be read: {error}") from error
        requests, sends = read_trace(lines)
        return Plan(
            target=target,
            requests=tuple(requests),
            sends=tuple(sends),
            connections=arguments.connections,
            warm_s=0.0,
            # All of the trace counts, to its last answer, with which it is over.
            window_s=sends[-1].at_s + arguments.drain_s,
            drain_s=0.0,
        )
    requests = _requests(arguments, target)
    duration_s = arguments.warm_s + arguments.duration_s
    sends = []
    if arguments.rate is not None:
        sends = poisson(
            rate_per_s=arguments.rate,
            duration_s=duration_s,
            num_requests=len(requests),
            seed=arguments.seed,
        )
        if not sends:
            raise LoadError("at this rate nothing is sent in this time: try another --seed")
    return Plan(
        target=target,
        requests=tuple(requests),
        sends=tuple(sends),
        connections=arguments.connections,
        ramp_s=arguments.ramp_s,
        warm_s=arguments.warm_s,
        window_s=arguments.duration_s,
        drain_s=arguments.drain_s,
    )


def _requests(arguments: argparse.Namespace, target: Target) -> list[Request]:
    expected = arguments.max_tokens if arguments.exact else 0
    if arguments.body is not None:
        try:
            body = arguments.body.read_bytes()
            json.loads(body)
        except (OSError, ValueError) as error:
            raise LoadError(f"{arguments.body}: {error}") from error
        return [Request(body=body, expected_chunks=expected)]
    if not target.path.endswith("/chat/completions"):
        raise LoadError(f"chats are not for {target.path}: give --body or --trace")
    model = arguments.model or ask_model(target)
    if model is None:
        raise LoadError(f"{arguments.url} lists no model: is it up? Or give --model")
    bodies = chat_bodies(model=model, tokens=arguments.max_tokens, stream=not arguments.no_stream)
    return [Request(body=body, expected_chunks=expected) for body in bodies]


def _show(progress: Progress) -> None:
    """How far it is: on a terminal one line that changes, elsewhere a line each time."""
    on_terminal = sys.stderr.isatty()
    start = "\r" if on_terminal else ""
    print(
        f"{start}in flight {progress.in_flight}  "
        f"requests {progress.requests}  chunks {progress.chunks}  failures {progress.failures}  ",
        end="" if on_terminal else "\n",
        file=sys.stderr,
        flush=True,
    )


def parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    parser = argparse.ArgumentParser(
        prog="fastserve bench",
        description=__doc__,
        epilog="The API key, if one is needed, is read from OPENAI_API_KEY.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", required=True, help="http://HOST:PORT, with or without /v1 or the endpoint")
    add("--model", help="the model to ask for (the first that the server lists)")
    add("--connections", "-c", type=int, default=64, help="at most so many at once (%(default)s)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--rate", type=float, help="open loop: requests per second")
    kind.add_argument("--trace", type=Path, help='JSONL of {"at_s": seconds, "body": {...}}')
    add("--max-tokens", type=int, default=64, help="tokens to ask for (%(default)s)")
    add("--no-stream", action="store_true", help="ask for whole answers")
    add("--body", type=Path, help="a file with the request's JSON, instead of a small chat")
    add("--exact", action="store_true", help="every answer must have exactly --max-tokens")
    add("--duration-s", type=float, default=10.0, help="seconds that count (%(default)s)")
    add("--warm-s", type=float, default=1.0, help="seconds before them (%(default)s)")
    add("--ramp-s", type=float, default=0.0, help="over which clients come (%(default)s)")
    add("--drain-s", type=float, default=30.0, help="to wait for last answers (%(default)s)")
    add("--seed", type=int, default=0, help="of the open loop's chance (%(default)s)")
    add("--processes", type=int, default=1, help="programs that share the load (%(default)s)")
    add("--cores", type=parse_cores, help="cores for the load (wherever it may run)")
    add("--server-pid", type=int, help="a local server's process: its CPU time is told, too")
    add("--json", type=Path, help="write the figures to this file, too")
    return parser
