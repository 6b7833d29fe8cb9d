"""A text that is read while it comes, and what its parts are.

A format is a generator that reads a Source and yields where it needs more text: so it is written as
if the text were all there, and what it says cannot depend on how that was sliced. Each piece of
text is looked at a bounded number of times, and kept only while it is not known what it is.

What looked like a call and is none is said as content, as it was written. Once a call has begun it
stays one: where its arguments break off, they end, and what follows is content.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

T = TypeVar("T")

# What may be read of a call before its name and the beginning of its arguments are known; beyond
# it, it is no call. Nearly all models write the name first, within 100 characters.
UNDECIDED_CHARS_MAX = 8192

# Spaces that stand before a call or after a thought belong to the form. Longer runs are content,
# but for so many characters.
GAP_CHARS_MAX = 64

_SPACES = re.compile(r"\s*")


class Part(enum.Enum):
    """What a piece of an answer is. A CALL has its name, ARGUMENTS are a piece of JSON text."""

    CONTENT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()
    ARGUMENTS = enum.auto()
    CALL_END = enum.auto()


Event = tuple[Part, str]


class BrokenOff(Exception):
    """What is read is not what it looked like, or the text has ended within it."""


class Source:
    """The text not yet read, from `at` in `text`; `closed`: no more will come.

    Read by generators that wait in `more`. What is `held` can be read again; what is `told` is said
    as that part as far as it has been read.
    """

    __slots__ = ("_begin", "_events", "_held", "_part", "at", "closed", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.closed = False
        self._held: int | None = None
        self._part: Part | None = None
        self._begin = 0
        self._events: list[tuple[Part, list[str]]] = []

    def feed(self, text: str) -> None:
        """Add what has come, and let go of what has been read."""
        keep = self.at if self._held is None else self._held
        self.text = self.text[keep:] + text
        self.at -= keep
        self._begin = self.at
        if self._held is not None:
            self._held = 0

    def taken(self) -> list[Event]:
        """What has been said since the last time."""
        self._flush()
        events, self._events = self._events, []
        return [(part, "".join(pieces)) for part, pieces in events]

    def say(self, part: Part, text: str = "") -> None:
        """Say what the next part is. Pieces of one part become one, within a feed."""
        if not text and part is not Part.CALL_END:
            return
        events = self._events
        if events and events[-1][0] is part:
            events[-1][1].append(text)
        else:
            events.append((part, [text]))

    # ---- reading

    def more(self) -> Generator[None]:
        """Wait until there is something to read. Raises BrokenOff at the end of the text."""
        while self.at >= len(self.text):
            if self.closed:
                raise BrokenOff
            self.check_held()
            self._flush()
            yield

    def next(self) -> Generator[None, None, str]:
        """The next character, which is not read yet. Raises BrokenOff at the end of the text."""
        yield from self.more()
        return self.text[self.at]

    def spaces(self) -> Generator[None]:
        """Read spaces, if there are any, until what follows them is there, or the end."""
        while True:
            found = _SPACES.match(self.text, self.at)
            assert found is not None, "it may be empty"
            self.at = found.end()
            if self.at < len(self.text) or self.closed:
                return
            self.check_held()
            self._flush()
            yield

    def expect(self, wanted: str) -> Generator[None]:
        """Read exactly these characters. Raises BrokenOff."""
        if not (yield from self.find(wanted)):
            raise BrokenOff

    def find(self, wanted: str) -> Generator[None, None, bool]:
        """Read these characters if they come next; return whether they do."""
        while len(self.text) - self.at < len(wanted):
            rest = self.text[self.at :]
            if self.closed or not wanted.startswith(rest):
                return False
            # More than what is there is needed, and none of it is read yet.
            self.check_held()
            self._flush()
            yield
        if not self.text.startswith(wanted, self.at):
            return False
        self.at += len(wanted)
        return True

    def word(self, pattern: re.Pattern[str], *, chars_max: int) -> Generator[None, None, str]:
        """Read what the pattern, one or more of some characters, matches. Raises BrokenOff."""
        while True:
            found = pattern.match(self.text, self.at)
            end = self.at if found is None else found.end()
            if end - self.at > chars_max:
                raise BrokenOff
            if end < len(self.text) or self.closed:
                break
            self.check_held()
            self._flush()
            yield
        if end == self.at:
            raise BrokenOff
        word = self.text[self.at : end]
        self.at = end
        return word

    # ---- reading what may turn out to be something else

    def hold(self) -> None:
        """From here on, what is read may be read again."""
        assert self._part is None
        self._held = self.at

    @property
    def held(self) -> bool:
        """Whether what has been read may be read again."""
        return self._held is not None

    def held_from(self, start: int) -> str:
        """What has been read since `start`, counted from the hold."""
        assert self._held is not None
        return self.text[self._held + start : self.at]

    @property
    def num_held(self) -> int:
        """How much has been read since the hold."""
        assert self._held is not None
        return self.at - self._held

    def release(self) -> None:
        """What has been read since the hold is what it looked like. Raises BrokenOff if too long.

        So that is decided by the text alone, and not by how much of it was there at a time.
        """
        self.check_held()
        self._held = None

    def rewind(self) -> None:
        """Read again what has been read since the hold."""
        assert self._held is not None
        self.at = self._begin = self._held
        self._held = None

    def check_held(self) -> None:
        """Raise BrokenOff if more is held than may be."""
        if self._held is not None and self.at - self._held > UNDECIDED_CHARS_MAX:
            raise BrokenOff

    # ---- reading what is already known

    def tell(self, part: Part | None) -> None:
        """Say what is read from here on as `part`, as far as it has come; None: no more."""
        self._flush()
        self._part = part
        self._begin = self.at

    def _flush(self) -> None:
        if self._part is not None and self.at > self._begin:
            self.say(self._part, self.text[self._begin : self.at])
            self._begin = self.at


class Markers:
    """Strings that may stand in a text, and where the text before them ends for sure."""

    __slots__ = ("_beginnings", "_firsts", "_longest", "_pattern")

    def __init__(self, texts: Iterable[str]) -> None:
        texts = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._beginnings = frozenset(text[:n] for text in texts for n in range(1, len(text)))
        self._firsts = frozenset(text[0] for text in texts)
        self._longest = len(texts[0])

    def read_to(self, source: Source, part: Part) -> Generator[None, None, str | None]:
        """Say the text before the first marker, and read that; None at the end of the text.

        Return the marker with the spaces before it, which have not been said.
        """
        while True:
            text, start = source.text, source.at
            found = self._pattern.search(text, start)
            if found is not None:
                begin = _before_spaces(text, start, found.start())
                source.say(part, text[start:begin])
                source.at = found.end()
                return text[begin : found.end()]
            if source.closed:
                source.say(part, text[start:])
                source.at = len(text)
                return None
            end = len(text)
            # Most pieces of text neither hold what a marker begins with nor end with spaces.
            if text[end - 1 : end].isspace() or not self._firsts.isdisjoint(
                text[max(start, end - self._longest) :]
            ):
                end = _before_spaces(text, start, end - self._tail_length(text, start))
            source.say(part, text[start:end])
            source.at = end
            yield

    def next_piece(self, source: Source) -> tuple[str, bool]:
        """What there is of the text before the first marker, and whether that has been read, too.

        What may be the beginning of one is left, unless no more will come.
        """
        text, start = source.text, source.at
        found = self._pattern.search(text, start)
        if found is not None:
            source.at = found.end()
            return text[start : found.start()], True
        end = len(text) if source.closed else len(text) - self._tail_length(text, start)
        source.at = end
        return text[start:end], False

    def _tail_length(self, text: str, start: int) -> int:
        """The length of the longest end of the text that is the beginning of a marker."""
        for length in range(min(self._longest - 1, len(text) - start), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


def _before_spaces(text: str, start: int, end: int) -> int:
    """Where the spaces before `end` begin, of which no more than GAP_CHARS_MAX count."""
    first = max(start, end - GAP_CHARS_MAX)
    return first + len(text[first:end].rstrip())
