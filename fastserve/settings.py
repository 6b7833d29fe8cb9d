"""How a setting is declared.

A setting is a field of a frozen dataclass, one dataclass for each section. Its annotation gives
the type, `setting(...)` the rest; how each source spells it, what it accepts, the help and the
rendered file all derive from that one declaration.

Knows no setting by name (config.py), and not where values come from (sources.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import textwrap
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from fastserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import DataclassInstance

T = TypeVar("T")
Value = bool | int | float | str | tuple[str, ...] | None

PREFIX = "FASTSERVE_"
# The settings of this section are so common that flags and variables go without its name.
BARE_SECTION = "server"

SWITCH_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}

# Longer values are cut in messages: a whole file given as a value should not fill the screen.
SHOWN_CHARS_MAX = 60

# What stands for a secret wherever settings are shown. It is refused as a value: else a file made
# of what was shown would have this for a key.
HIDDEN = "(not shown)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declaration:
    """What an annotation cannot say of a setting."""

    meaning: str
    unit: str
    at_least: float | None
    at_most: float | None
    placeholder: str
    secret: bool
    aliases: tuple[str, ...]


def setting(
    default: T,
    meaning: str,
    *,
    unit: str = "",
    at_least: float | None = None,
    at_most: float | None = None,
    placeholder: str = "",
    secret: bool = False,
    aliases: tuple[str, ...] = (),
) -> T:
    """Declare a field of a Section. `meaning` says what it does and what happens at a limit.

    A number must have both bounds, which belong to its range: every limit has a limit.
    `placeholder` stands for the value in the help. A `secret` is never shown, not even a wrong one.
    `aliases` are further names for its flag: those that people know from another server.
    """
    declaration = _Declaration(
        meaning=meaning,
        unit=unit,
        at_least=at_least,
        at_most=at_most,
        placeholder=placeholder,
        secret=secret,
        aliases=aliases,
    )
    return dataclasses.field(default=default, metadata={"declaration": declaration})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, and how each source spells it. `kind` is bool, int, float or str.

    `listed`: the value is a tuple of texts; a flag may be repeated, and commas separate.
    """

    section: str
    name: str
    kind: type
    optional: bool
    listed: bool
    choices: tuple[str, ...]
    default: Value
    declaration: _Declaration

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        words = self.name if self.section == BARE_SECTION else f"{self.section}_{self.name}"
        return "--" + words.replace("_", "-")

    @property
    def alias_flags(self) -> tuple[str, ...]:
        return tuple("--" + alias.replace("_", "-") for alias in self.declaration.aliases)

    @property
    def variable(self) -> str:
        return PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def placeholder(self) -> str:
        """What stands for the value in the help."""
        unit = self.declaration.unit.replace(" ", "_").upper()
        word = self.name.upper() if self.choices else "TEXT"
        return self.declaration.placeholder or unit or (word if self.kind is str else "N")

    @property
    def remarks(self) -> str:
        """Range or choices, unit and default, as the help and the file show them."""
        declared = self.declaration
        wanted = " | ".join(self.choices)
        if self.ranged:
            wanted = f"{_plain(declared.at_least)} to {_plain(declared.at_most)} {declared.unit}"
        default = f"default: {_plain(self.default)}"
        return f"{wanted.rstrip()}; {default}" if wanted else default

    @property
    def ranged(self) -> bool:
        return self.kind in (int, float)

    def from_text(self, text: str) -> Value:
        """Read a flag's or a variable's text. Raises ValueError saying what would be right."""
        value: object = text
        if self.listed:
            value = tuple(word.strip() for word in text.split(",")) if text else ()
        elif self.kind is bool:
            value = SWITCH_WORDS.get(text.lower(), text)
        elif self.kind is not str:
            with contextlib.suppress(ValueError):
                value = self.kind(text)
        return self.checked(value)

    def checked(self, value: object) -> Value:
        """Return `value` as this setting holds it. Raises ValueError saying what would be right.

        Nothing, and the empty text, unset what is optional: so a flag can undo what a file sets.
        """
        if self.optional and value in (None, ""):
            return None
        if self.listed:
            return self._checked_list(value)
        # An exact type, for a bool is an int and `true` is no number; but 5 is as good as 5.0.
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
            raise ValueError(f"{self._shown(value)} is not {wanted[self.kind]}")
        if isinstance(value, str):
            return self._checked_text(value)
        assert isinstance(value, bool | int | float)
        low, high = self.declaration.at_least, self.declaration.at_most
        # Written so that NaN, which is neither below nor above anything, fails as well.
        if low is not None and high is not None and not low <= value <= high:
            raise ValueError(f"{shown(value)} is not from {_plain(low)} to {_plain(high)}")
        return float(value) if self.kind is float else value

    def _checked_list(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"{self._shown(value)} is not a list of texts")
        return tuple(self._checked_text(each) for each in value)

    def _shown(self, value: object) -> str:
        return HIDDEN if self.declaration.secret else shown(value)

    def _quoted(self, text: str) -> str:
        return HIDDEN if self.declaration.secret else ascii(text)

    def _checked_text(self, text: str) -> str:
        if self.choices and text not in self.choices:
            hint = did_you_mean(text, self.choices)
            raise ValueError(f"{shown(text)} is not one of {', '.join(self.choices)}{hint}")
        if not text:
            raise ValueError("must not be empty")
        # Neither can be in a host name or a TOML file, and the first ends a path early.
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{self._quoted(text)} has a NUL or is not UTF-8")
        if self.declaration.secret and text == HIDDEN:
            raise ValueError(f"{HIDDEN} stands for a secret; write the secret itself")
        return text


class Section:
    """The base of the sections: values are checked however a section comes to be.

    A subclass is a frozen dataclass with slots; its docstring's first line is its heading.
    """

    __slots__ = ()
    section: ClassVar[str]

    def __post_init__(self) -> None:
        for declared in settings_of(type(self)):
            try:
                declared.checked(getattr(self, declared.name))
            except ValueError as error:
                raise ConfigError(f"{declared.key}: {error}") from None
        self.check()

    def check(self) -> None:
        """Refuse settings that are impossible together. Raises ConfigError."""


_SETTINGS_OF: dict[type[Section], tuple[Setting, ...]] = {}


def settings_of(section: type[Section]) -> tuple[Setting, ...]:
    """The settings that a section declares, in order."""
    if section not in _SETTINGS_OF:
        hints = typing.get_type_hints(section)
        fields = dataclasses.fields(typing.cast("type[DataclassInstance]", section))
        _SETTINGS_OF[section] = tuple(
            _setting(section.section, field, hints[field.name]) for field in fields
        )
    return _SETTINGS_OF[section]


def _setting(section: str, field: dataclasses.Field[Value], hint: object) -> Setting:
    # A union with a Literal is of typing's own kind.
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        hint, nothing = typing.get_args(hint)
        assert nothing is types.NoneType, f"{section}.{field.name}: only `X | None` may be a union"
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    listed = hint == tuple[str, ...]
    kind = str if choices or listed else hint
    assert isinstance(kind, type), f"{section}.{field.name}: no setting can be a {hint}"
    declaration: _Declaration = field.metadata["declaration"]
    bounds = (declaration.at_least, declaration.at_most)
    assert kind in (bool, str) or None not in bounds, f"{section}.{field.name}: has no range"
    return Setting(
        section=section,
        name=field.name,
        kind=kind,
        optional=optional,
        listed=listed,
        choices=choices,
        default=field.default if field.default is not dataclasses.MISSING else None,
        declaration=declaration,
    )


def sections_of(config: DataclassInstance) -> dict[str, Section]:
    """The sections of a configuration by name, in order."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def all_settings(config: DataclassInstance) -> list[Setting]:
    """Every setting of a configuration, in order."""
    return [one for section in sections_of(config).values() for one in settings_of(type(section))]


def render_toml(config: DataclassInstance, *, preamble: str) -> str:
    """The configuration as a file that reads back as the same, with what each setting means."""
    lines = [*_comment(preamble)]
    for name, section in sections_of(config).items():
        lines += ["", "", f"# {heading(type(section))}", f"[{name}]"]
        for one in settings_of(type(section)):
            value = getattr(section, one.name)
            if one.declaration.secret and value:
                value = (HIDDEN,) * len(value) if one.listed else HIDDEN
            assignment = f"# {one.name} =" if value is None else f"{one.name} = {_toml(value)}"
            lines += ["", *_comment(f"{one.declaration.meaning} [{one.remarks}]"), assignment]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return [
        f"# {line}".rstrip()
        for paragraph in text.splitlines()
        for line in textwrap.wrap(paragraph, width=98, break_on_hyphens=False) or [""]
    ]


def _toml(value: bool | float | str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        # JSON's escapes are TOML's; only DEL is allowed in the one and not in the other.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def heading(section: type[Section]) -> str:
    return (section.__doc__ or "").partition("\n")[0]


def shown(value: object) -> str:
    """A value as a person would write it in the file, cut where it is long."""
    if value is None:
        return "not set"
    text = _toml(value) if isinstance(value, bool | int | float | str | tuple) else repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "..."


def _plain(value: object) -> str:
    """As `shown`, but 30.0 is 30: for what is declared, where the type is no news."""
    if isinstance(value, float) and value.is_integer():
        return shown(int(value))
    return shown(value)


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The end of a refusal: which of the `known` words was likely meant, if any."""
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""
