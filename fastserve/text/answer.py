"""An answer's text to its parts: thoughts, content, calls of tools.

The text is given in any pieces, as it comes; what is said of it in all is the same however it was
sliced. Nothing a model writes is an error: what is no call is content, as it was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastserve.text.reasoning import thoughts
from fastserve.text.tool_calls.json_calls import named, required, rest
from fastserve.text.tool_calls.source import Part, Source

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from fastserve.text.reasoning import Thinking
    from fastserve.text.tool_calls.formats import ToolFormat
    from fastserve.text.tool_calls.source import Event

__all__ = ["AnswerParser", "Part"]


class AnswerParser:
    """`push` a text as it comes, then `finish`; both return the parts that are known by then."""

    __slots__ = ("_reading", "_source")

    def __init__(self, reading: Generator[None], source: Source) -> None:
        self._source = source
        self._reading = reading
        next(reading, None)

    @classmethod
    def of_model(
        cls,
        *,
        thinking: Thinking | None = None,
        tools: ToolFormat | None = None,
        schemas: Mapping[str, Any] | None = None,
    ) -> AnswerParser:
        """Of an answer as the model likes to write it.

        `schemas`: those of the tools' parameters, by the names of the tools.
        """
        source = Source()
        return cls(_read(source, thinking, tools, schemas or {}), source)

    @classmethod
    def of_calls(cls, *, name: str | None = None) -> AnswerParser:
        """Of an answer that a grammar makes to be calls, or the arguments of the one of `name`."""
        source = Source()
        return cls(required(source) if name is None else named(source, name), source)

    def push(self, text: str) -> list[Event]:
        """The parts that `text` completes or adds to."""
        self._source.feed(text)
        next(self._reading, None)
        return self._source.taken()

    def finish(self) -> list[Event]:
        """The parts that are known now that there is no more text."""
        self._source.closed = True
        next(self._reading, None)
        return self._source.taken()


def _read(
    source: Source,
    thinking: Thinking | None,
    tools: ToolFormat | None,
    schemas: Mapping[str, Any],
) -> Generator[None]:
    if thinking is not None:
        yield from thoughts(source, thinking)
    if tools is not None:
        yield from tools.read(source, schemas)
    else:
        yield from rest(source)
