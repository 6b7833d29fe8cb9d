"""Calls as Mistral's models write them, after the control token [TOOL_CALLS].

Up to version 7 of their tokenizer an array of JSON objects follows; from version 11 on a name and
its arguments, `[TOOL_CALLS]f[ARGS]{...}` or without [ARGS], once for each call (mistral-common).
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from fastserve.text.tool_calls import json_calls
from fastserve.text.tool_calls.source import BrokenOff, Markers, Part

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from fastserve.text.tool_calls.source import Source

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_MARKERS = Markers([TOOL_CALLS])
_NAME_CHARS = re.compile(r"[\w.:/-]+")
_NAME_CHARS_MAX = 128


def mistral(source: Source, _tools: Mapping[str, Any]) -> Generator[None]:
    """Read an answer."""
    while (gap := (yield from _MARKERS.read_to(source, Part.CONTENT))) is not None:
        source.hold()
        try:
            yield from source.spaces()
            first = yield from source.next()
            if first == "[":
                yield from json_calls.calls(source)
            elif first == "{":
                yield from json_calls.call(source)
            else:
                yield from _named_call(source)
        except BrokenOff:
            source.rewind()
            source.say(Part.CONTENT, gap)
            continue
        yield from source.spaces()


def _named_call(source: Source) -> Generator[None]:
    """Read a name and its arguments. The source must be held. Raises BrokenOff if it is none."""
    name = yield from source.word(_NAME_CHARS, chars_max=_NAME_CHARS_MAX)
    yield from source.spaces()
    if (yield from source.find(CALL_ID)):
        yield from source.word(_NAME_CHARS, chars_max=_NAME_CHARS_MAX)
    yield from source.find(ARGS)
    yield from source.spaces()
    if (yield from source.next()) != "{":
        raise BrokenOff
    source.release()
    source.say(Part.CALL, name)
    source.tell(Part.ARGUMENTS)
    with contextlib.suppress(BrokenOff):  # what there is of them has been said
        yield from json_calls.value(source)
    source.tell(None)
    source.say(Part.CALL_END)
