"""Thoughts as DeepSeek's and Qwen's models write them: before the answer, in `<think>` tags.

Some templates end a prompt with the opening tag, and Qwen's with both where it shall not think; so
where an answer begins is seen in the prompt. DeepSeek's models think whether or not they say so.
Spaces beside a tag belong to it. A thought that does not end is a thought to its end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastserve.text.tool_calls.source import BrokenOff, Markers, Part

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from fastserve.text.tool_calls.source import Source

OPEN, CLOSE = "<think>", "</think>"

_END = Markers([CLOSE])


class Thinking(enum.Enum):
    """Where an answer begins: within a thought, before one (if it opens one), or after it."""

    WITHIN = enum.auto()
    BEFORE = enum.auto()
    AFTER = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a model writes thoughts. `always`: it thinks also where nothing opens a thought."""

    always: bool
    shown: tuple[str, ...] = (OPEN, CLOSE)

    def beginning(self, prompt: str) -> Thinking:
        """Where the answer to a prompt begins."""
        prompt = prompt[-64:].rstrip()
        if prompt.endswith(OPEN):
            return Thinking.WITHIN
        if prompt.endswith(CLOSE):
            return Thinking.AFTER
        return Thinking.WITHIN if self.always else Thinking.BEFORE


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(always=True),
    "qwen3": ReasoningFormat(always=False),
}


def thoughts(source: Source, thinking: Thinking) -> Generator[None]:
    """Read what comes before the answer itself."""
    if thinking is Thinking.AFTER:
        return
    if thinking is Thinking.WITHIN:
        yield from source.spaces()
        yield from source.find(OPEN)
    else:
        source.hold()
        try:
            yield from source.spaces()
            yield from source.expect(OPEN)
            source.release()
        except BrokenOff:
            source.rewind()
            return
    yield from source.spaces()
    if (yield from _END.read_to(source, Part.REASONING)) is not None:
        yield from source.spaces()


class ThoughtTokens:
    """Counts the tokens that are thoughts: those up to the closing tag, which is one of them.

    So it does not depend on how the tokens came, nor on what was shown of them.
    """

    __slots__ = ("_began", "_bytes", "_count", "_ended", "_tail")

    def __init__(self, token_bytes: Sequence[bytes], thinking: Thinking) -> None:
        self._bytes = token_bytes
        self._count = 0
        self._tail = b""
        self._began = thinking is Thinking.WITHIN
        self._ended = thinking is Thinking.AFTER

    @property
    def number(self) -> int:
        """How many of the tokens so far."""
        return self._count if self._began else 0

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._ended:
                return
            self._count += 1
            self._look(self._tail + self._bytes[token_id])

    def _look(self, text: bytes) -> None:
        """`text`: all of it until a thought has begun, and then the last of it."""
        opening = text.lstrip()[: len(OPEN)]
        if not self._began and opening == OPEN.encode():
            self._began = True
        if not self._began:
            self._ended = not OPEN.encode().startswith(opening)
            self._tail = text
            return
        self._ended = CLOSE.encode() in text
        self._tail = text[-len(CLOSE) + 1 :]
