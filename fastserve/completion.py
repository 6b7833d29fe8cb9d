"""The command `fastserve completion SHELL`: what a shell needs to complete our command line.

Made of the declarations themselves, so that what is completed is what is accepted.

    source <(fastserve completion bash)                             # in ~/.bashrc
    fastserve completion zsh > "${fpath[1]}/_fastserve"
    fastserve completion fish > ~/.config/fish/completions/fastserve.fish
"""

from __future__ import annotations

import argparse
import importlib
import sys

import shtab

from fastserve.cli import COMMANDS
from fastserve.config import Config, command_line_parser
from fastserve.settings import all_settings

_SHELLS = ("bash", "zsh", "fish")
# What a flag's value stands for, where a shell can list what there is.
_COMPLETE = {"PATH": shtab.FILE, "FILE": shtab.FILE, "DIRECTORY": shtab.DIRECTORY}


def main(argv: list[str]) -> int:
    """Print the script of a shell."""
    shell: str = parser().parse_args(argv).shell
    sys.stdout.write(shtab.complete(command_line(), shell=shell) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastserve completion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=_SHELLS, help="whose script to print")
    return parser


def command_line() -> argparse.ArgumentParser:
    """Everything that can be on our command line, as one parser."""
    whole = _completed(command_line_parser())
    commands = whole.add_subparsers(title="commands", parser_class=argparse.ArgumentParser)
    for name, (module, purpose) in COMMANDS.items():
        own: argparse.ArgumentParser = importlib.import_module(module).parser()
        commands.add_parser(name, parents=[_completed(own)], add_help=False, help=purpose)
    return whole


def _completed(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The same parser, and what the values of its flags may be."""
    settings = {one.key: one for one in all_settings(Config())}
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list
        setting = settings.get(action.dest)
        if setting is not None and setting.choices and not setting.listed:
            action.choices = setting.choices
        complete = _COMPLETE.get(str(action.metavar))
        if complete is not None:
            action.complete = complete  # type: ignore[attr-defined]  # shtab's own attribute
    return parser
