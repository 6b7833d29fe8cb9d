"""Calls as Llama 3.2 and 4 and ToolACE write them: a Python list, `[f(a=1), g(b="x")]`.

Only an answer that begins with the list has calls, and only of functions that are among the tools:
else it is a text that happens to look so. Llama 4 may put `<|python_start|>` and `<|python_end|>`
around it. Arguments are literals, and become JSON as they come: what JSON has no form for
(a set, a name, an expression) breaks a call off.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from fastserve.text.tool_calls.json_calls import rest
from fastserve.text.tool_calls.source import BrokenOff, Part

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping

    from fastserve.text.tool_calls.source import Source

START, END = "<|python_start|>", "<|python_end|>"

# Generators in generators; no honest call comes near this.
NESTING_MAX = 64

_NAME = re.compile(r"[\w.]+")
_NAME_CHARS_MAX = 128
_ATOM = re.compile(r"[\w.+-]+")
_ATOM_CHARS_MAX = 512
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}

_UNTIL = {'"': re.compile(r'["\\\n]'), "'": re.compile(r"['\\\n]")}
_ESCAPED = {
    "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r",
    "t": "\t", "v": "\v", "\n": "",
}  # fmt: skip
_CODED = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile("[0-9a-fA-F]+")
_BRACKETS = {"[": "]", "(": ")", "{": "}"}


def pythonic(source: Source, tools: Mapping[str, Any]) -> Generator[None]:
    """Read an answer."""
    source.hold()
    try:
        yield from source.spaces()
        tagged = yield from source.find(START)
        yield from source.spaces()
        yield from source.expect("[")
        yield from _begin(source, tools)
    except BrokenOff:
        source.rewind()
    else:
        yield from _calls(source, tools, tagged=tagged)
    yield from rest(source)


def _calls(source: Source, names: Collection[str], *, tagged: bool) -> Generator[None]:
    """Read the arguments of the call that has begun, and the calls that follow."""
    while True:
        try:
            yield from _arguments(source)
        except BrokenOff:
            source.say(Part.CALL_END)
            return
        source.say(Part.CALL_END)
        source.hold()
        try:
            yield from source.spaces()
            if (yield from source.find("]")):
                break
            yield from source.expect(",")
            yield from _begin(source, names)
        except BrokenOff:
            source.rewind()
            return
    source.release()
    yield from source.spaces()
    if tagged and (yield from source.find(END)):
        yield from source.spaces()


def _begin(source: Source, names: Collection[str]) -> Generator[None]:
    """Read the name of a call, and say it. The source must be held. Raises BrokenOff."""
    yield from source.spaces()
    name = yield from source.word(_NAME, chars_max=_NAME_CHARS_MAX)
    yield from source.spaces()
    yield from source.expect("(")
    if name not in names:
        raise BrokenOff
    source.release()
    source.say(Part.CALL, name)


def _arguments(source: Source) -> Generator[None]:
    """Read `a=1, b="x")`, and say it as a JSON object."""
    _say(source, "{")
    yield from source.spaces()
    comma = ""
    while not (yield from source.find(")")):
        key = yield from source.word(_NAME, chars_max=_NAME_CHARS_MAX)
        yield from source.spaces()
        yield from source.expect("=")
        yield from source.spaces()
        _say(source, f"{comma}{_json(key)}: ")
        yield from _value(source, depth=1)
        comma = ", "
        yield from _comma(source, ")")
    _say(source, "}")


def _value(source: Source, *, depth: int) -> Generator[None]:
    first = yield from source.next()
    if first in _UNTIL:
        yield from _string(source)
    elif first in _BRACKETS:
        if depth > NESTING_MAX:
            raise BrokenOff
        yield from _collection(source, first, depth=depth)
    else:
        atom = yield from source.word(_ATOM, chars_max=_ATOM_CHARS_MAX)
        _say(source, _CONSTANTS.get(atom) or _number(atom))


def _collection(source: Source, bracket: str, *, depth: int) -> Generator[None]:
    """Read a list, a tuple or a dictionary."""
    end = _BRACKETS[bracket]
    source.at += 1
    _say(source, "{" if bracket == "{" else "[")
    yield from source.spaces()
    comma = ""
    while not (yield from source.find(end)):
        _say(source, comma)
        comma = ", "
        if bracket == "{":
            if (yield from source.next()) not in _UNTIL:
                raise BrokenOff
            yield from _string(source)
            yield from source.spaces()
            yield from source.expect(":")
            _say(source, ": ")
            yield from source.spaces()
        yield from _value(source, depth=depth + 1)
        yield from _comma(source, end)
    _say(source, "}" if bracket == "{" else "]")


def _comma(source: Source, end: str) -> Generator[None]:
    """Read what follows a value: a comma, or nothing where the end comes next."""
    yield from source.spaces()
    if (yield from source.next()) != end:
        yield from source.expect(",")
        yield from source.spaces()


def _string(source: Source) -> Generator[None]:
    quote = yield from source.next()
    until = _UNTIL[quote]
    source.at += 1
    _say(source, '"')
    while True:
        yield from source.more()
        start = source.at
        found = until.search(source.text, start)
        source.at = len(source.text) if found is None else found.start()
        _say(source, _json(source.text[start : source.at])[1:-1])
        if found is None:
            continue
        if found[0] == "\n":
            raise BrokenOff
        source.at += 1
        if found[0] == quote:
            break
        yield from _escape(source)
    _say(source, '"')


def _escape(source: Source) -> Generator[None]:
    """Read what follows a backslash (Python reference, 2.4.1.1)."""
    kind = yield from source.next()
    source.at += 1
    if kind in _ESCAPED:
        _say(source, _json(_ESCAPED[kind])[1:-1])
        return
    if kind not in _CODED:
        _say(source, _json("\\" + kind)[1:-1])  # as Python does, if under protest
        return
    digits = ""
    while len(digits) < _CODED[kind]:
        digits += yield from source.next()
        source.at += 1
    if not _HEX.fullmatch(digits):
        raise BrokenOff
    code = int(digits, 16)
    if code < 1 << 16:
        # JSON's own escape, which may be one half of a pair.
        _say(source, f"\\u{code:04x}")
    elif code <= 0x10FFFF:
        _say(source, chr(code))
    else:
        raise BrokenOff


def _number(atom: str) -> str:
    try:
        return str(int(atom))
    except ValueError:
        pass
    try:
        number = float(atom)
    except ValueError:
        raise BrokenOff from None
    if not math.isfinite(number):
        raise BrokenOff
    return repr(number)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _say(source: Source, text: str) -> None:
    source.say(Part.ARGUMENTS, text)
