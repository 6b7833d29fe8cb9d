"""The command: read the settings, then do as asked.

Light on purpose: `--help` and every refusal come before anything slow is imported, and a refusal
before any process is started.

Exit codes of its own: 0 for what was asked and done, 1 for a start that failed, 2 for a setting
that cannot be. launch.py has those of a server that ran.
"""

from __future__ import annotations

import os
import sys

import fastserve
from fastserve.config import config_toml, help_text, read_command_line, resolve
from fastserve.errors import ConfigError, StartError

EXIT_START = 1
EXIT_CONFIG = 2


def main(argv: list[str] | None = None) -> int:
    """Run `argv` (the process's own arguments if None); return the exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return _refuse(error, code=EXIT_CONFIG)
    except StartError as error:
        return _refuse(error, code=EXIT_START)


def _run(argv: list[str]) -> int:
    command_line = read_command_line(argv)
    # Help and version are for those whose settings are wrong, too.
    if command_line.action == "help":
        return _show(help_text())
    if command_line.action == "version":
        return _show(f"fastserve {fastserve.__version__}\n")
    config = resolve(command_line, os.environ)
    if command_line.action == "print-config":
        return _show(config_toml(config))
    from fastserve.launch import launch  # noqa: PLC0415 - imports what the above does without

    return launch(config)


def _show(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # `fastserve --help | head` is no failure. Without this the interpreter flushes once more
        # at its exit, and complains (Python's documentation of SIGPIPE).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _refuse(error: Exception, *, code: int) -> int:
    for line in str(error).splitlines():
        print(f"fastserve: {line}", file=sys.stderr)  # noqa: T201 - the answer to a command
    return code
