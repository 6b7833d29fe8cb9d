"""Calls that are JSON objects: `{"name": "f", "arguments": {"a": 1}}`.

The arguments are told as the JSON text that the model wrote, while it writes. Where brackets and
strings end is followed; whether all between them is JSON is for the client to see, as OpenAI says.

Also answers that a grammar made to be calls, whatever the model's own way (`required`, `named`).
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING

from fastserve.text.tool_calls.source import BrokenOff, Part

if TYPE_CHECKING:
    from collections.abc import Container, Generator

    from fastserve.text.tool_calls.source import Source

# Letters of any language: some names are not OpenAI's. It keeps lone surrogates out as well.
NAME = re.compile(r"[\w.:/-]{1,128}")

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR = re.compile(r"[^\s,:{}\[\]\"]+")
_SCALAR_CHARS_MAX = 512

# What models write beside the name and the arguments, and which means nothing here.
_ALSO = frozenset({"id", "type", "index"})
_ARGUMENTS = frozenset({"arguments", "parameters"})


def call(source: Source, *, known: Container[str] | None = None) -> Generator[None]:
    """Read one call, and say it. The source must be held.

    Raises BrokenOff, with the source still held, if it is none. `known`: the names that it may
    have, and then it may have no other members either, where nothing but its form tells a call
    from a text.
    """
    yield from source.expect("{")
    name: str | None = None
    early: str | None = None
    try:
        while True:
            key = yield from _key(source)
            if key is None:
                break
            if key == "name" and name is None:
                name = yield from _name(source, known)
                if early is not None:
                    _begin(source, name, early)
            elif key in _ARGUMENTS and early is None:
                early = yield from _arguments(source, name)
            elif known is None or not source.held or key in _ALSO:
                yield from value(source)
            else:
                raise BrokenOff
            if not (yield from _comma(source)):
                break
        if name is None:
            raise BrokenOff
        if early is None:
            _begin(source, name, "{}")
    except BrokenOff:
        if source.held:
            raise
    source.tell(None)
    source.say(Part.CALL_END)


def calls(source: Source, *, known: Container[str] | None = None) -> Generator[None]:
    """Read an array of calls, and say them. The source must be held.

    Raises BrokenOff, with the source still held, if the first is none.
    """
    yield from source.expect("[")
    yield from source.spaces()
    yield from call(source, known=known)
    while True:
        source.hold()
        try:
            yield from source.spaces()
            if (yield from source.find("]")):
                source.release()
                return
            yield from source.expect(",")
            yield from source.spaces()
            yield from call(source, known=known)
        except BrokenOff:
            source.rewind()
            return


def required(source: Source) -> Generator[None]:
    """Read an answer that a grammar made to be an array of calls."""
    source.hold()
    try:
        yield from source.spaces()
        yield from calls(source)
        yield from source.spaces()
    except BrokenOff:
        source.rewind()
    yield from rest(source)


def named(source: Source, name: str) -> Generator[None]:
    """Read an answer that a grammar made to be the arguments of one function."""
    yield from source.spaces()
    with contextlib.suppress(BrokenOff):
        yield from source.more()
        source.say(Part.CALL, name)
        with contextlib.suppress(BrokenOff):
            source.tell(Part.ARGUMENTS)
            yield from value(source)
        source.tell(None)
        source.say(Part.CALL_END)
        yield from source.spaces()
    yield from rest(source)


def rest(source: Source) -> Generator[None]:
    """Say all that follows as content."""
    source.tell(Part.CONTENT)
    with contextlib.suppress(BrokenOff):
        while True:
            source.at = len(source.text)
            yield from source.more()
    source.tell(None)


def value(source: Source) -> Generator[None]:
    """Read one JSON value. Raises BrokenOff if the text ends before it does."""
    first = yield from source.next()
    if first == '"':
        yield from _string(source)
    elif first in "{[":
        yield from _nested(source)
    else:
        yield from source.word(_SCALAR, chars_max=_SCALAR_CHARS_MAX)


def _begin(source: Source, name: str, arguments: str) -> None:
    """Say that a call has begun, with the arguments that are known already."""
    source.release()
    source.say(Part.CALL, name)
    source.say(Part.ARGUMENTS, arguments)


def _key(source: Source) -> Generator[None, None, str | None]:
    """Read a key and what is before its value; None at the end of an empty object."""
    yield from source.spaces()
    if (yield from source.find("}")):
        return None
    start = source.num_held if source.held else None
    yield from _string(source)
    # What the key is does not matter once the call has begun.
    key = "" if start is None else _decoded(source.held_from(start))
    yield from source.spaces()
    yield from source.expect(":")
    yield from source.spaces()
    return key


def _name(source: Source, known: Container[str] | None) -> Generator[None, None, str]:
    start = source.num_held
    yield from value(source)
    name = _decoded(source.held_from(start))
    if not NAME.fullmatch(name) or (known is not None and name not in known):
        raise BrokenOff
    return name


def _arguments(source: Source, name: str | None) -> Generator[None, None, str]:
    """Read the arguments: said as they come if the name is known, and returned otherwise."""
    if name is None:
        start = source.num_held
        yield from value(source)
        return source.held_from(start)
    yield from source.more()
    _begin(source, name, "")
    source.tell(Part.ARGUMENTS)
    yield from value(source)
    source.tell(None)
    return ""


def _comma(source: Source) -> Generator[None, None, bool]:
    """Read what follows a member; return whether another one does."""
    yield from source.spaces()
    if (yield from source.find(",")):
        return True
    yield from source.expect("}")
    return False


def _nested(source: Source) -> Generator[None]:
    depth = 0
    while True:
        yield from source.more()
        found = _STRUCTURE.search(source.text, source.at)
        if found is None:
            source.at = len(source.text)
            continue
        source.at = found.start()
        mark = found[0]
        if mark == '"':
            yield from _string(source)
            continue
        source.at += 1
        depth += 1 if mark in "{[" else -1
        if depth == 0:
            return


def _string(source: Source) -> Generator[None]:
    yield from source.expect('"')
    while True:
        yield from source.more()
        found = _IN_STRING.search(source.text, source.at)
        if found is None:
            source.at = len(source.text)
            continue
        source.at = found.end()
        if found[0] == '"':
            return
        yield from source.more()
        source.at += 1


def _decoded(text: str) -> str:
    """The string that a JSON text is. Raises BrokenOff if it is none."""
    try:
        decoded = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise BrokenOff from None
    if not isinstance(decoded, str):
        raise BrokenOff
    return decoded
