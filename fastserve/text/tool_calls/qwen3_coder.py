"""Calls as Qwen3-Coder and Qwen3.5 write them: a tag for each argument, whose value is plain text.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

What type a value has is for the tool's schema to say: a string is told as it comes, anything else
once it is complete, as JSON if it is JSON and as a string otherwise.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from fastserve.text.tool_calls.source import BrokenOff, Markers, Part

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from fastserve.text.tool_calls.source import Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"

# Some answers leave the outer tag out.
_MARKERS = Markers([OPEN, _FUNCTION])
# The newline before the tag belongs to it.
_END_OF_VALUE = Markers([_PARAMETER_END, f"\n{_PARAMETER_END}"])
_NAME = re.compile(r"[^\s<>=\"'\\]+")
_NAME_CHARS_MAX = 128
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def qwen3_coder(source: Source, tools: Mapping[str, Any]) -> Generator[None]:
    """Read an answer."""
    while (gap := (yield from _MARKERS.read_to(source, Part.CONTENT))) is not None:
        source.hold()
        try:
            if gap.endswith(OPEN):
                yield from source.spaces()
                yield from source.expect(_FUNCTION)
            name = yield from _name(source)
            source.release()
        except BrokenOff:
            source.rewind()
            source.say(Part.CONTENT, gap)
            continue
        source.say(Part.CALL, name)
        try:
            yield from _arguments(source, tools.get(name))
        except BrokenOff:
            source.say(Part.CALL_END)
            continue
        source.say(Part.CALL_END)
        yield from source.spaces()
        yield from source.find(CLOSE)
        yield from source.spaces()


def _name(source: Source) -> Generator[None, None, str]:
    """Read a name and the end of its tag. Raises BrokenOff."""
    name = yield from source.word(_NAME, chars_max=_NAME_CHARS_MAX)
    yield from source.expect(">")
    return name


def _arguments(source: Source, schema: object) -> Generator[None]:
    """Read parameters up to the function's end, and say them as a JSON object."""
    source.say(Part.ARGUMENTS, "{")
    comma = ""
    yield from source.spaces()
    while not (yield from source.find(_FUNCTION_END)):
        yield from source.expect(_PARAMETER)
        name = yield from _name(source)
        yield from source.find("\n")
        source.say(Part.ARGUMENTS, f"{comma}{_json(name)}: ")
        comma = ", "
        if _is_string(schema, name):
            source.say(Part.ARGUMENTS, '"')
            yield from _value(source, told=True)
            source.say(Part.ARGUMENTS, '"')
        else:
            source.say(Part.ARGUMENTS, _as_json((yield from _value(source, told=False))))
        yield from source.spaces()
    source.say(Part.ARGUMENTS, "}")


def _value(source: Source, *, told: bool) -> Generator[None, None, str]:
    """Read a value and its end; `told`: say it as it comes, within a string. Raises BrokenOff."""
    pieces: list[str] = []
    while True:
        piece, ended = _END_OF_VALUE.next_piece(source)
        if told:
            source.say(Part.ARGUMENTS, _json(piece)[1:-1])
        else:
            pieces.append(piece)
        if ended:
            return "".join(pieces)
        if source.closed:
            raise BrokenOff
        yield


def _is_string(schema: object, name: str) -> bool:
    """Whether an argument is a string, by the schema of the function's parameters.

    One of which nothing is known is, too.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    known = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(known, dict):
        return True
    if "type" not in known:
        return not known.keys() & {"anyOf", "allOf", "oneOf", "$ref", "enum", "const"}
    return bool(known["type"] in ("string", ["string"]))


def _as_json(text: str) -> str:
    """A value as JSON: itself if that is what it is."""
    text = text.strip()
    text = _CONSTANTS.get(text, text)
    try:
        json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return _json(text)
    return text


def _no_json(word: str) -> None:
    """Python would take NaN and the infinities, which JSON has not."""
    raise ValueError(word)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
