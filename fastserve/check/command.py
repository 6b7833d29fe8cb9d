"""The command `fastserve check`: the flags of a server, and a table of what is and is not well.

Nothing is left running, and no weights are loaded. Exit codes: 0, the server would start; 2, it
would not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING

from fastserve.check import machine, server
from fastserve.check.findings import Verdict, as_table, fail, ok
from fastserve.config import command_line_parser, read_command_line, resolve
from fastserve.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from fastserve.check.findings import Finding
    from fastserve.config import Config

_DESCRIPTION = """\
Would a server with these settings start here? Checks the configuration, credentials, the port, the
engine's library, the model's files, processors, memory, limits, shared memory, MPI and GPUs.
Exits with 0 if it would start, else with 2."""


def main(argv: list[str]) -> int:
    """Check, print, and return the exit code."""
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(parser().format_help())
        return 0
    findings = check([word for word in argv if word != "--json"])
    if "--json" in argv:
        shown = json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1)
    else:
        shown = as_table(findings)
    sys.stdout.write(f"{shown}\n")
    return 2 if any(finding.verdict is Verdict.FAIL for finding in findings) else 0


def parser() -> argparse.ArgumentParser:
    """The flags of the command: those of a server, and one more."""
    parser = command_line_parser(prog="fastserve check", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def check(argv: list[str]) -> list[Finding]:
    """Every finding about a server with these flags, and this environment."""
    try:
        config = resolve(read_command_line(argv), os.environ)
    except ConfigError as error:
        # Nothing else can be told without it.
        return [fail("configuration", line) for line in str(error).splitlines()]
    return [ok("configuration", "every setting is known and possible"), *_check_all(config)]


def _check_all(config: Config) -> list[Finding]:
    model, _, model_bytes = server.check_model_files(config)
    return [
        server.check_credentials(config),
        server.check_port(config),
        server.check_run_directory(config),
        server.check_library(config),
        *server.check_spans(config),
        model,
        machine.check_kernel(),
        machine.check_processors(config),
        machine.check_memory(config, model_bytes=model_bytes),
        machine.check_descriptors(config),
        machine.check_shared_memory(config),
        machine.check_mpi(config),
        machine.check_gpus(config),
    ]
