"""How a setting's value is found: in a file, in the environment, on the command line.

Every source becomes a row of entries, and the rows are laid over each other, the last one winning.
Problems are collected on the way and raised together, so that a bad file is mended in one go; a
name that is not known is answered with the one that was likely meant.

Knows no setting by name, reads no file but the one it is given, and never prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import shutil
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

from fastserve.errors import ConfigError
from fastserve.settings import (
    BARE_SECTION,
    PREFIX,
    Section,
    Setting,
    Value,
    all_settings,
    did_you_mean,
    heading,
    sections_of,
    settings_of,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from _typeshed import DataclassInstance

    ConfigT = TypeVar("ConfigT", bound=DataclassInstance)

FILE_VARIABLE = "FASTSERVE_CONFIG"
SEE_HELP = "; see --help"
HELP_COLUMNS_MAX = 100

# What Kubernetes and Docker put into a container's environment for a service called fastserve or
# fastserve-SOMETHING. Naming the service after the server is natural, and must not stop it.
SERVICE_LINK = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value found for a setting. `text`: it is yet to be read. `origin` is for messages."""

    setting: Setting
    value: object
    text: bool
    origin: str


@dataclass(frozen=True, slots=True)
class Source:
    """What one source says, and what is wrong with it."""

    entries: list[Entry] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)


def from_environment(config: DataclassInstance, environ: Mapping[str, str]) -> Source:
    """Read every FASTSERVE_ variable but FASTSERVE_CONFIG."""
    source = Source()
    known = {one.variable: one for one in all_settings(config)}
    for name, value in environ.items():
        if not name.startswith(PREFIX) or name == FILE_VARIABLE or _is_service_link(name, value):
            continue
        if name in known:
            source.entries.append(Entry(setting=known[name], value=value, text=True, origin=name))
        else:
            words = [one.removeprefix(PREFIX) for one in (*known, FILE_VARIABLE)]
            # Some will spell out the section that variables leave out.
            word = name.removeprefix(PREFIX).removeprefix(f"{BARE_SECTION.upper()}_")
            hint = did_you_mean(word, words, prefix=PREFIX) or SEE_HELP
            source.problems.append(f"{name}: no such setting{hint}")
    return source


def _is_service_link(name: str, value: str) -> bool:
    if name.endswith("_PORT") and SERVICE_ADDRESS.match(value):
        return True
    return SERVICE_LINK.fullmatch(name) is not None


def from_file(config: DataclassInstance, path: str) -> Source:
    """Read a TOML file of [sections]. Raises ConfigError where it cannot be read at all."""
    import tomllib  # noqa: PLC0415 - most starts have no file, and the import is not free

    try:
        with Path(path).open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    # UnicodeDecodeError is a ValueError, as TOMLDecodeError is; the latter names line and column.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    source = Source()
    sections = sections_of(config)
    for name, table in tables.items():
        if name in sections and isinstance(table, dict):
            _read_table(source, path, table, type(sections[name]), config)
        else:
            source.problems.append(f"{path}: {_misplaced(name, table, config)}")
    return source


def _read_table(
    source: Source,
    path: str,
    table: dict[str, object],
    section: type[Section],
    config: DataclassInstance,
) -> None:
    known = {one.name: one for one in settings_of(section)}
    for name, value in table.items():
        if name in known:
            source.entries.append(Entry(setting=known[name], value=value, text=False, origin=path))
            continue
        hint = did_you_mean(name, known, prefix=f"{section.section}.") or _elsewhere(name, config)
        source.problems.append(
            f"{path}: {section.section}.{name}: no such setting{hint}; "
            f"known in [{section.section}]: {', '.join(sorted(known))}"
        )


def _misplaced(name: str, value: object, config: DataclassInstance) -> str:
    """What is wrong with something at the top level of a file that is not a section of ours."""
    sections = sections_of(config)
    if isinstance(value, dict):
        hint = did_you_mean(name, sections)
        return f"[{name}]: no such section{hint}; known: {', '.join(sections)}"
    if name in sections:
        return f"{name}: is a section, to be written [{name}]"
    return f"{name}: stands outside any [section]{_elsewhere(name, config)}"


def _elsewhere(name: str, config: DataclassInstance) -> str:
    """Suggest the setting of this name, or nearly so, in whatever section it is."""
    by_name = {one.name: one.key for one in reversed(all_settings(config))}
    nearest = difflib.get_close_matches(name, by_name, n=1)
    return f"; did you mean {by_name[nearest[0]]}?" if nearest else ""


# --- the command line ---

Action = Literal["run", "help", "version", "print-config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What was asked for. `config_path` None: --config was not given."""

    action: Action
    config_path: str | None
    source: Source


class _Format(argparse.RawDescriptionHelpFormatter):
    """argparse's, less lines as wide as the screen, which nobody can read."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(prog, width=min(columns, HELP_COLUMNS_MAX) - 2)


class _Parser(argparse.ArgumentParser):
    """argparse, less its habit of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def parser_of(config: DataclassInstance, *, prog: str, description: str, epilog: str) -> _Parser:
    """The command line that the declarations of `config` amount to."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--SETTING VALUE ...]",
        description=description,
        epilog=epilog,
        formatter_class=_Format,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    own = parser.add_argument_group("options")
    own.add_argument("-h", "--help", action="store_true", help="show this and exit")
    own.add_argument("--version", action="store_true", help="show the version and exit")
    own.add_argument(
        "--print-config", action="store_true", help="show the resulting settings as a file and exit"
    )
    own.add_argument("--config", metavar="PATH", help="read this TOML file; there is no default")
    for section in sections_of(config).values():
        group = parser.add_argument_group(f"[{section.section}]", heading(type(section)))
        for one in settings_of(type(section)):
            _add_flag(group, one)
    return parser


def _add_flag(group: argparse._ArgumentGroup, one: Setting) -> None:
    text = f"{one.declaration.meaning} [{one.remarks}]".replace("%", "%%")
    if one.declaration.aliases:
        text += f" Also {', '.join(f'--{alias}' for alias in one.declaration.aliases)}."
    # One line of help for all of its names.
    for flags, shown_text in ((one.flag,), text), (one.alias_flags, argparse.SUPPRESS):
        if not flags:
            continue
        if one.kind is bool:
            group.add_argument(
                *flags, dest=one.key, action=argparse.BooleanOptionalAction, help=shown_text
            )
        else:
            group.add_argument(
                *flags,
                dest=one.key,
                metavar=one.placeholder,
                action="append" if one.listed else "store",
                help=shown_text,
            )


def parse_command_line(
    config: DataclassInstance, parser: argparse.ArgumentParser, argv: Sequence[str]
) -> CommandLine:
    """Read the flags; --a_b is --a-b. Raises ConfigError where a flag lacks its value."""
    found, unknown = parser.parse_known_args([_dashed(word) for word in argv])
    given = vars(found)
    action: Action = "run"
    for wanted in typing.get_args(Action):
        if given.get(wanted.replace("-", "_")):
            action = wanted
            break
    entries = [
        Entry(
            setting=one,
            # A list is as many flags, and commas separate within one.
            value=",".join(given[one.key]) if one.listed else given[one.key],
            text=not isinstance(given[one.key], bool),  # --x and --no-x come as booleans
            origin=_as_typed(one, argv),
        )
        for one in all_settings(config)
        if one.key in given
    ]
    return CommandLine(
        action=action,
        config_path=given.get("config"),
        source=Source(entries, _unknown_words(unknown, parser)),
    )


def _as_typed(one: Setting, argv: Sequence[str]) -> str:
    """By which of its names the setting was given."""
    typed = (word.partition("=")[0] for word in argv)
    return next((name for name in typed if _dashed(name) in one.alias_flags), one.flag)


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _unknown_words(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    flags = [word.partition("=")[0] for word in words if word.startswith("-") and len(word) > 1]
    if not flags:
        return [f"{shown(word)}: not a flag; every setting is --NAME VALUE" for word in words]
    # What follows an unknown flag is most likely its value, and not worth a line of its own.
    known = parser._option_string_actions  # noqa: SLF001 - argparse has no public list
    return [
        f"{flag}: no such flag"
        + (did_you_mean(flag.replace(f"--{BARE_SECTION}-", "--"), known) or SEE_HELP)
        for flag in flags
    ]


# --- all together ---


def merge(defaults: ConfigT, sources: Iterable[Source]) -> ConfigT:
    """Lay the sources over the defaults, the last one winning. Raises ConfigError naming all
    that is wrong, one problem a line; also a value that a later source overrides."""
    problems: list[str] = []
    values: dict[str, dict[str, Value]] = {}
    for source in sources:
        problems += source.problems
        for entry in source.entries:
            one = entry.setting
            try:
                value = one.from_text(str(entry.value)) if entry.text else one.checked(entry.value)
                values.setdefault(one.section, {})[one.name] = value
            except ValueError as error:
                problems.append(f"{one.key}: {error} (from {entry.origin})")
    if problems:
        raise ConfigError("\n".join(problems))
    sections = sections_of(defaults)
    return dataclasses.replace(
        defaults,
        **{
            name: dataclasses.replace(typing.cast("DataclassInstance", sections[name]), **changes)
            for name, changes in values.items()
        },
    )
