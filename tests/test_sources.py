"""Sources laid over each other, shown on settings made up for the purpose: switches, mostly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from fastserve.errors import ConfigError
from fastserve.settings import Section, setting
from fastserve.sources import Source, from_environment, merge, parse_command_line, parser_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Lamp(Section):
    """What lights."""

    section: ClassVar[str] = "lamp"

    lit: bool = setting(False, "Whether it is 100% lit.")
    night_light: bool = setting(True, "Whether it glimmers.")
    bulbs: int = setting(1, "Bulbs.", at_least=1, at_most=9, aliases=("lamps", "light_bulbs"))
    dimmed: bool = setting(False, "Whether it is dimmed.", aliases=("dim_it",))


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    lamp: Lamp = field(default_factory=Lamp)


def house(argv: str, environ: dict[str, str] | None = None) -> House:
    defaults = House()
    parser = parser_of(defaults, prog="house", description="A house.", epilog="The end.")
    command_line = parse_command_line(defaults, parser, argv.split())
    return merge(defaults, [from_environment(defaults, environ or {}), command_line.source])


@pytest.mark.parametrize(
    ("argv", "environ", "lamp"),
    [
        ("", {}, Lamp()),
        ("--lamp-lit", {}, Lamp(lit=True)),
        ("--lamp_lit", {}, Lamp(lit=True)),
        ("--no-lamp-night-light", {}, Lamp(night_light=False)),
        ("--no_lamp_night_light --lamp-lit", {}, Lamp(lit=True, night_light=False)),
        ("--lamp-lit --no-lamp-lit", {}, Lamp()),
        ("", {"FASTSERVE_LAMP_LIT": "yes"}, Lamp(lit=True)),
        ("--no-lamp-lit", {"FASTSERVE_LAMP_LIT": "yes"}, Lamp()),
        ("", {"FASTSERVE_LAMP_NIGHT_LIGHT": "Off"}, Lamp(night_light=False)),
    ],
)
def test_a_switch_has_a_flag_for_each_way(argv: str, environ: dict[str, str], lamp: Lamp) -> None:
    assert house(argv, environ).lamp == lamp


@pytest.mark.parametrize(
    ("argv", "environ", "problem"),
    [
        ("--lamp-lit=yes", {}, "--lamp-lit/--no-lamp-lit: ignored explicit argument 'yes'"),
        ("--no-lamp-bulbs", {}, "--no-lamp-bulbs: no such flag; did you mean --lamp-bulbs?"),
        ("", {"FASTSERVE_LAMP_LIT": "2"},
         'lamp.lit: "2" is not true or false (from FASTSERVE_LAMP_LIT)'),
    ],
)  # fmt: skip
def test_a_switch_takes_no_other_value(argv: str, environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        house(argv, environ)
    # Python 3.11 and 3.12 differ in how they list a flag's names.
    assert str(refusal.value).replace("--lamp-lit, --no", "--lamp-lit/--no") == problem


@pytest.mark.parametrize(
    ("argv", "lamp"),
    [
        ("--lamps 2", Lamp(bulbs=2)),
        ("--light_bulbs=3", Lamp(bulbs=3)),
        ("--light-bulbs 3", Lamp(bulbs=3)),
        ("--lamps 2 --lamp-bulbs 4", Lamp(bulbs=4)),
        ("--lamp-bulbs 4 --lamps 2", Lamp(bulbs=2)),
        ("--dim_it", Lamp(dimmed=True)),
        ("--dim-it --no_dim_it", Lamp()),
    ],
)
def test_a_setting_answers_to_its_other_names(argv: str, lamp: Lamp) -> None:
    assert house(argv).lamp == lamp


def test_what_is_wrong_is_told_by_the_name_that_was_given() -> None:
    for name in ("--lamps", "--light_bulbs", "--light-bulbs", "--lamp-bulbs"):
        with pytest.raises(ConfigError) as refusal:
            house(f"{name}=10")
        assert str(refusal.value) == f"lamp.bulbs: 10 is not from 1 to 9 (from {name})"


def test_other_names_take_one_line_of_help() -> None:
    text = parser_of(House(), prog="house", description="A house.", epilog="The end.").format_help()
    words = " ".join(text.split())
    assert "--lamp-bulbs N Bulbs. [1 to 9; default: 1] Also --lamps, --light_bulbs." in words
    assert text.count("--light_bulbs") == 1


def test_help_shows_both_ways_and_takes_a_percent_sign() -> None:
    text = parser_of(House(), prog="house", description="A house.", epilog="The end.").format_help()
    assert "--lamp-lit, --no-lamp-lit" in text
    assert "Whether it is 100% lit. [default: false]" in " ".join(text.split())


def test_without_sources_the_defaults_hold() -> None:
    house = House(lamp=Lamp(bulbs=3))
    assert merge(house, []) == house
    assert merge(house, [Source()]) == house
