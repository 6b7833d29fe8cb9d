"""What a declaration amounts to, shown on settings made up for the purpose."""

from __future__ import annotations

import pickle
import re
import tomllib
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest

from fastserve.errors import ConfigError
from fastserve.settings import (
    HIDDEN,
    Section,
    Setting,
    Value,
    all_settings,
    render_toml,
    setting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oven(Section):
    """What bakes."""

    section: ClassVar[str] = "oven"

    trays: int = setting(2, "Trays in the oven.", at_least=1, at_most=4)
    heat_c: float = setting(180.0, "How hot.", unit="degrees", at_least=0, at_most=300)
    fan: bool = setting(False, "Whether air is moved.")
    light: bool = setting(True, "Whether it is lit.")
    mode: Literal["bake", "grill"] = setting("bake", "Where heat comes from.")
    dish: str = setting("pie", "What is in it.")
    cook: str | None = setting(None, "Who to call.", placeholder="NAME")
    timer_s: int | None = setting(None, "When.", unit="seconds", at_least=1, at_most=9)
    spices: tuple[str, ...] = setting((), "What it tastes of.")
    recipes: tuple[str, ...] = setting((), "Grandmother's.", secret=True)
    code: str | None = setting(None, "Of the lock.", secret=True)

    def check(self) -> None:
        if self.mode == "grill" and self.fan:
            raise ConfigError("oven.fan: not with oven.mode grill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kitchen:
    oven: Oven = field(default_factory=Oven)


SETTINGS = {one.name: one for one in all_settings(Kitchen())}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("trays", "3", 3),
        ("trays", "0_4", 4),
        ("heat_c", "20", 20.0),
        ("heat_c", "2e2", 200.0),
        ("fan", "true", True),
        ("fan", "ON", True),
        ("fan", "0", False),
        ("mode", "grill", "grill"),
        ("dish", "a b", "a b"),
        ("dish", "12", "12"),
        ("cook", "Ann", "Ann"),
        ("cook", "", None),
        ("timer_s", "9", 9),
        ("timer_s", "", None),
        ("spices", "salt", ("salt",)),
        ("spices", "salt, pepper", ("salt", "pepper")),
        ("spices", "", ()),
        ("recipes", "a,b", ("a", "b")),
    ],
)
def test_texts_are_read_by_the_type_of_the_setting(name: str, text: str, value: Value) -> None:
    read = SETTINGS[name].from_text(text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("trays", "5", "5 is not from 1 to 4"),
        ("trays", "0", "0 is not from 1 to 4"),
        ("trays", "-1", "-1 is not from 1 to 4"),
        ("trays", "two", '"two" is not a whole number'),
        ("trays", "2.0", '"2.0" is not a whole number'),
        ("trays", "", '"" is not a whole number'),
        ("trays", "9" * 5000, f'"{"9" * 59}... is not a whole number'),
        ("heat_c", "300.5", "300.5 is not from 0 to 300"),
        ("heat_c", "nan", "nan is not from 0 to 300"),
        ("heat_c", "inf", "inf is not from 0 to 300"),
        ("heat_c", "-1e999", "-inf is not from 0 to 300"),
        ("heat_c", "hot", '"hot" is not a number'),
        ("fan", "maybe", '"maybe" is not true or false'),
        ("fan", "", '"" is not true or false'),
        ("mode", "bak", '"bak" is not one of bake, grill; did you mean bake?'),
        ("mode", "", '"" is not one of bake, grill'),
        ("dish", "", "must not be empty"),
        ("dish", "a\0b", r"'a\x00b' has a NUL or is not UTF-8"),
        ("dish", "a\udcff", r"'a\udcff' has a NUL or is not UTF-8"),
        ("timer_s", "10", "10 is not from 1 to 9"),
        ("spices", "salt,,pepper", "must not be empty"),
        ("recipes", "a,b\0", "(not shown) has a NUL or is not UTF-8"),
        ("recipes", "(not shown)", "(not shown) stands for a secret; write the secret itself"),
        ("code", "(not shown)", "(not shown) stands for a secret; write the secret itself"),
    ],
)
def test_impossible_texts_are_refused_with_what_would_be_right(
    name: str, text: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        SETTINGS[name].from_text(text)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("trays", True, "true is not a whole number"),
        ("trays", 2.0, "2.0 is not a whole number"),
        ("trays", "2", '"2" is not a whole number'),
        ("trays", [2], "[2] is not a whole number"),
        ("trays", None, "not set is not a whole number"),
        ("heat_c", False, "false is not a number"),
        pytest.param("heat_c", 10**400, f"1{'0' * 59}... is not from 0 to 300", id="a huge number"),
        ("fan", 1, "1 is not true or false"),
        ("dish", 1, "1 is not text"),
        ("cook", {"name": "Ann"}, "{'name': 'Ann'} is not text"),
        ("spices", "salt", '"salt" is not a list of texts'),
        ("spices", ["salt", 1], "['salt', 1] is not a list of texts"),
        ("recipes", "a", "(not shown) is not a list of texts"),
        ("code", 1234, "(not shown) is not text"),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        SETTINGS[name].checked(value)


def test_a_section_checks_its_values_however_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"^oven\.trays: 5 is not from 1 to 4$"):
        Oven(trays=5)
    with pytest.raises(ConfigError, match=r"^oven\.fan: not with oven\.mode grill$"):
        Oven(fan=True, mode="grill")


def test_a_section_can_be_pickled() -> None:
    oven = Oven(trays=4, cook="Ann")
    assert pickle.loads(pickle.dumps(oven)) == oven


@pytest.mark.parametrize(
    ("section", "name", "flag", "variable"),
    [
        ("server", "port_file", "--port-file", "FASTSERVE_PORT_FILE"),
        ("sim", "step_ms", "--sim-step-ms", "FASTSERVE_SIM_STEP_MS"),
    ],
)
def test_only_the_section_named_server_is_left_out(
    section: str, name: str, flag: str, variable: str
) -> None:
    trays = SETTINGS["trays"]
    one = Setting(
        section=section,
        name=name,
        kind=trays.kind,
        optional=trays.optional,
        listed=trays.listed,
        choices=trays.choices,
        default=trays.default,
        declaration=trays.declaration,
    )
    assert (one.flag, one.variable) == (flag, variable)


@pytest.mark.parametrize(
    ("name", "remarks"),
    [
        ("trays", "1 to 4; default: 2"),
        ("heat_c", "0 to 300 degrees; default: 180"),
        ("fan", "default: false"),
        ("mode", 'bake | grill; default: "bake"'),
        ("cook", "default: not set"),
        ("timer_s", "1 to 9 seconds; default: not set"),
    ],
)
def test_remarks_say_what_may_be_written(name: str, remarks: str) -> None:
    assert SETTINGS[name].remarks == remarks


def test_a_number_without_a_range_cannot_be_declared() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Endless(Section):
        section: ClassVar[str] = "endless"
        length: int = setting(1, "How long.", at_least=0)

    with pytest.raises(AssertionError, match=r"endless\.length: has no range"):
        Endless()


ODD = 'a "b" \\ \t\n\x7f\x1b é \N{GRINNING FACE} \u2028'


@pytest.mark.parametrize(
    "oven",
    [
        pytest.param(Oven(), id="the defaults"),
        pytest.param(
            Oven(
                trays=1,
                heat_c=1e-5,
                fan=True,
                light=False,
                mode="bake",
                dish="x",
                cook="Ann",
                timer_s=1,
            ),
            id="everything",
        ),
        pytest.param(Oven(dish=ODD, cook=ODD), id="odd characters"),
    ],
)
def test_a_rendered_file_reads_back_as_the_same(oven: Oven) -> None:
    table = tomllib.loads(render_toml(Kitchen(oven=oven), preamble="Kitchen."))["oven"]
    lists = {name: tuple(value) for name, value in table.items() if isinstance(value, list)}
    assert Oven(**(table | lists)) == oven


def test_a_rendered_file_keeps_secrets() -> None:
    oven = Oven(recipes=("plum", "pear"), code="1234")
    text = render_toml(Kitchen(oven=oven), preamble="Kitchen.")
    table = tomllib.loads(text)["oven"]
    assert (table["recipes"], table["code"]) == ([HIDDEN, HIDDEN], HIDDEN)
    assert "plum" not in text


def test_a_rendered_file_explains_each_setting() -> None:
    text = render_toml(Kitchen(oven=Oven(trays=4)), preamble="A kitchen.\n\nFor pies.")
    assert text.startswith(
        "# A kitchen.\n#\n# For pies.\n\n\n# What bakes.\n[oven]\n\n"
        "# Trays in the oven. [1 to 4; default: 2]\ntrays = 4\n\n"
        "# How hot. [0 to 300 degrees; default: 180]\nheat_c = 180.0\n"
    )
    assert "# When. [1 to 9 seconds; default: not set]\n# timer_s =\n" in text
    assert "# What it tastes of. [default: []]\nspices = []\n" in text
