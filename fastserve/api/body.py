"""From the bytes of a body to checked JSON, and from a decoder's complaint to an OpenAI error.

orjson reads the document, because it refuses what a server must refuse: NaN, infinities, numbers
beyond a double, a byte order mark, bad UTF-8, lone surrogates and deep nesting. msgspec then checks
the fields against a Struct. An absent field and null mean the same, so nulls go first.

Knows no field by name (requests.py).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import orjson

from fastserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

# Values that pass through us (template arguments, tool calls, engine scripts) are later walked by
# recursion, and orjson refuses to dump more than 254 levels. No honest request comes near this.
NESTING_MAX = 64

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1

T = TypeVar("T")

_CONTAINERS = (dict, list)

# What a JSON value is called, by its Python type; msgspec names the same kinds in its complaints.
_JSON_WORDS = {
    bool: "a boolean",
    dict: "an object",
    float: "a decimal number",
    int: "an integer",
    list: "an array",
    str: "a string",
    type(None): "null",
}
_GOT_WORDS = {
    "array": "an array",
    "bool": "a boolean",
    "float": "a decimal number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
    # Of the tag of a union msgspec tells Python's own type.
    "NoneType": "null",
    "dict": "an object",
    "list": "an array",
}
_WANT_WORDS = _GOT_WORDS | {"bool": "true or false", "float": "a number"}
_COMPARISONS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_CODE_NAMES = {"int": "integer", "float": "decimal", "str": "string"}
_LENGTH_UNITS = {"str": "characters", "array": "items", "object": "entries"}

# The wording of msgspec's ValidationError; tests pin every form that our Structs can cause.
_COMPLAINT = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`)?", re.S)
_WRONG_TYPE = re.compile(r"Expected `(?P<want>[^`]*)`, got `(?P<got>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_OUT_OF_RANGE = re.compile(r"Expected `(?P<kind>\w+)` (?P<op>[<>]=?) (?P<bound>\S+)")
_WRONG_FORM = re.compile(r"Expected `str` matching regex .*", re.S)
_WRONG_LENGTH = re.compile(r"Expected `(?P<kind>\w+)` of length (?P<op>[<>]=?) (?P<bound>\d+)")


def load_object(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object (RFC 8259), without those that are null.

    Raises InvalidRequest for anything else. Of a repeated name the last value counts.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(_malformed(body, error)) from None
    if type(value) is not dict:
        raise InvalidRequest(f"The request body must be a JSON object, not {json_word(value)}.")
    if None in value.values():
        return {name: field for name, field in value.items() if field is not None}
    return value


def load_value(text: str) -> object:
    """The value of a JSON text that a client put into a string; None if it is not JSON."""
    try:
        value: object = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value


def convert(fields: dict[str, Any], into: type[T]) -> T:
    """Check `fields` against the Struct `into`. Raises InvalidRequest naming the first at fault."""
    try:
        return msgspec.convert(fields, into, str_keys=True)
    except msgspec.ValidationError as error:
        _raise_translated(str(error), fields)


def check_nesting(value: object, *, param: str) -> None:
    """Raise InvalidRequest if arrays and objects nest more than NESTING_MAX deep in `value`."""
    layer = [value]
    for _ in range(NESTING_MAX):
        layer = [item for outer in layer for item in _items(outer) if type(item) in _CONTAINERS]
        if not layer:
            return
    raise InvalidRequest(
        f"'{param}' is nested more than {NESTING_MAX} levels deep.",
        param=param,
        code="invalid_value",
    )


def json_word(value: object) -> str:
    """What a JSON value is called, in words for an error message."""
    return _JSON_WORDS.get(type(value), "something else")


def wrong_type(param: str, *, want: str, got: object) -> InvalidRequest:
    """The error for a field of the wrong type; `want` is in words, like 'an array'."""
    return InvalidRequest(
        f"'{param}' must be {want}, not {json_word(got)}.", param=param, code="invalid_type"
    )


def missing(param: str) -> InvalidRequest:
    """The error for a field that must be there."""
    return InvalidRequest(f"'{param}' is required.", param=param, code="missing_required_parameter")


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _malformed(body: bytes, error: orjson.JSONDecodeError) -> str:
    if not body:
        return "The request body is empty; a JSON object was expected."
    if error.msg.startswith("str is not valid UTF-8"):
        return "The request body is not valid UTF-8."
    # The parser's own words name its internals (allocation, doubles), so only the place is told.
    return f"The request body is not valid JSON at line {error.lineno}, column {error.colno}."


def _raise_translated(complaint: str, fields: dict[str, Any]) -> NoReturn:
    match = _COMPLAINT.fullmatch(complaint)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    if absent := _MISSING.fullmatch(what):
        raise missing(f"{path}.{absent['name']}" if path else absent["name"])
    param = path.removesuffix("[...]")
    place = f"A key of '{param}'" if match["key"] else f"'{param}'"
    if path != param:
        place = f"A value of '{param}'"
    message, code = _translate(what, place=place, value=fields.get(param))
    raise InvalidRequest(message, param=param or None, code=code)


def _translate(what: str, *, place: str, value: object) -> tuple[str, str]:
    if match := _WRONG_TYPE.fullmatch(what):
        if match["got"] == "float" and _is_huge(value):
            return f"{place} does not fit a 64-bit integer.", "invalid_value"
        kinds = [kind for kind in match["want"].split(" | ") if kind != "null"]
        if not kinds:
            return f"{place} is not supported.", "unsupported_value"
        want = " or ".join(_WANT_WORDS[kind] for kind in kinds)
        return f"{place} must be {want}, not {_GOT_WORDS[match['got']]}.", "invalid_type"
    if match := _UNKNOWN.fullmatch(what):
        return f"{place} has no field '{match['name']}'.", "unknown_parameter"
    if match := _OUT_OF_RANGE.fullmatch(what):
        side = "below_min" if match["op"].startswith(">") else "above_max"
        shown = f"; it is {value}" if isinstance(value, int | float) else ""
        bound = match["bound"].removesuffix(".0")
        code = f"{_CODE_NAMES[match['kind']]}_{side}_value"
        return f"{place} must be {_COMPARISONS[match['op']]} {bound}{shown}.", code
    if match := _WRONG_FORM.fullmatch(what):
        form = what.removeprefix("Expected `str` matching regex ").strip("'")
        return f"{place} must match {form}.", "invalid_value"
    if match := _WRONG_LENGTH.fullmatch(what):
        if match["bound"] == "1":
            return f"{place} must not be empty.", "invalid_value"
        unit = _LENGTH_UNITS[match["kind"]]
        code = f"{_CODE_NAMES.get(match['kind'], match['kind'])}_above_max_length"
        return f"{place} must have at most {match['bound']} {unit}.", code
    return f"{place} is not valid.", "invalid_value"


def _is_huge(value: object) -> bool:
    """Whether orjson read `value` as a float for want of bits, rather than for its fraction."""
    return isinstance(value, float) and value.is_integer() and not INT64_MIN < value < INT64_MAX
