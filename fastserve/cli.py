"""The command: serve as the settings say, or carry out one of the other commands.

Light on purpose: `--help` and every refusal come before anything slow is imported, and a refusal
before any process is started.

Exit codes of its own: 0 for what was asked and done, 1 for a start that failed, 2 for a setting
that cannot be. launch.py has those of a server that ran.
"""

from __future__ import annotations

import importlib
import os
import sys

import fastserve
from fastserve.config import config_toml, help_text, read_command_line, resolve
from fastserve.errors import ConfigError, StartError
from fastserve.settings import did_you_mean, shown

EXIT_START = 1
EXIT_CONFIG = 2

# The first word may name one: module, and what it is for. Each has `main(argv) -> int`, and reads
# its own arguments.
COMMANDS = {
    "check": ("fastserve.check.command", "would a server with these settings start here?"),
    "top": ("fastserve.top.command", "watch a running server"),
    "bench": ("fastserve.load.command", "put load on any OpenAI-compatible server"),
    "completion": ("fastserve.completion", "print what bash, zsh or fish need to complete these"),
}


def main(argv: list[str] | None = None) -> int:
    """Run `argv` (the process's own arguments if None); return the exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return _refuse(error, code=EXIT_CONFIG)
    except StartError as error:
        return _refuse(error, code=EXIT_START)


def _run(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        command = importlib.import_module(COMMANDS[argv[0]][0])
        code: int = command.main(argv[1:])
        return code
    if argv and not argv[0].startswith("-"):
        hint = did_you_mean(argv[0], COMMANDS) or "; every setting is --NAME VALUE"
        raise ConfigError(f"{shown(argv[0])}: neither a flag nor a command{hint}")
    command_line = read_command_line(argv)
    # Help and version are for those whose settings are wrong, too.
    if command_line.action == "help":
        return _show(f"{help_text()}\n{_commands_text()}")
    if command_line.action == "version":
        return _show(f"fastserve {fastserve.__version__}\n")
    config = resolve(command_line, os.environ)
    if command_line.action == "print-config":
        return _show(config_toml(config))
    from fastserve.launch import launch  # noqa: PLC0415 - imports what the above does without

    return launch(config)


def _commands_text() -> str:
    lines = [f"  fastserve {name:10} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["other commands (each has its own --help):", *lines, ""])


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
