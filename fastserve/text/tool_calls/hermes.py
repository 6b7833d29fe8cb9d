"""Calls as Hermes and Qwen write them: JSON between tags, `<tool_call>{...}</tool_call>`.

The tags are those of Nous Research's Hermes function calling; Qwen 2.5 and 3 took them over. A tag
within a string of the JSON is part of the string.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastserve.text.tool_calls import json_calls
from fastserve.text.tool_calls.source import BrokenOff, Markers, Part

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from fastserve.text.tool_calls.source import Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_MARKERS = Markers([OPEN])


def hermes(source: Source, _tools: Mapping[str, Any]) -> Generator[None]:
    """Read an answer."""
    while (gap := (yield from _MARKERS.read_to(source, Part.CONTENT))) is not None:
        source.hold()
        try:
            yield from source.spaces()
            yield from json_calls.call(source)
        except BrokenOff:
            source.rewind()
            source.say(Part.CONTENT, gap)
            continue
        yield from source.spaces()
        yield from source.find(CLOSE)
        yield from source.spaces()
