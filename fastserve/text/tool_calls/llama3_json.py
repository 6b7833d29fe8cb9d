"""Calls as Llama 3.1 and 3.2 write them: an answer that is `{"name": ..., "parameters": {...}}`.

Meta's prompt format: no tags, several calls are parted by ";", and `<|python_tag|>` may come first.
Without the tag an answer that begins with "{" is a call only if it has the name of a tool and no
other members; else it is a text that happens to be JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastserve.text.tool_calls import json_calls
from fastserve.text.tool_calls.source import BrokenOff, Markers, Part

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping

    from fastserve.text.tool_calls.source import Source

PYTHON_TAG = "<|python_tag|>"

_MARKERS = Markers([PYTHON_TAG])


def llama3_json(source: Source, tools: Mapping[str, Any]) -> Generator[None]:
    """Read an answer."""
    source.hold()
    try:
        yield from source.spaces()
        yield from _calls(source, tools)
    except BrokenOff:
        source.rewind()
    while (gap := (yield from _MARKERS.read_to(source, Part.CONTENT))) is not None:
        source.hold()
        try:
            yield from source.spaces()
            yield from _calls(source, None)
        except BrokenOff:
            source.rewind()
            source.say(Part.CONTENT, gap)


def _calls(source: Source, names: Collection[str] | None) -> Generator[None]:
    """Read calls. The source must be held. Raises BrokenOff if the first is none."""
    yield from json_calls.call(source, known=names)
    while True:
        source.hold()
        try:
            yield from source.spaces()
            yield from source.find(";")
            yield from source.spaces()
            yield from json_calls.call(source, known=names)
        except BrokenOff:
            source.rewind()
            break
    yield from source.spaces()
