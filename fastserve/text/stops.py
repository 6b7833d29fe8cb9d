"""Stop strings: the text up to the first of them, as it comes.

The stop that is complete first ends the text, whatever the order in which they were given; of two
that are complete at the same character, the one that began earlier. Text is held back only while
it ends in what could yet become a stop, so the result does not depend on how the text was sliced.
"""

from __future__ import annotations


class StopMatcher:
    """Releases the text before the first stop. `matched` is that stop, once it is complete.

    `include`: release the stop itself too. No stop may be empty: that is refused with the request.
    """

    __slots__ = ("_beginnings", "_firsts", "_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string would end every text before it began"
        self._stops = stops
        self._include = include
        self._firsts = frozenset(stop[0] for stop in stops)
        self._beginnings = frozenset(stop[:n] for stop in stops for n in range(1, len(stop)))
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now known to come before any stop; "" once one has matched."""
        if self.matched is not None:
            return ""
        # Most tokens hold no character that any stop begins with.
        if not self._held and self._firsts.isdisjoint(text):
            return text
        text = self._held + text
        found = self._first_complete(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        free = len(text) - self._tail_length(text)
        self._held = text[free:]
        return text[:free]

    def flush(self) -> str:
        """What was held back, when no more text comes: it became no stop after all."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        """Where the first stop to be complete begins, and which it is."""
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, key=lambda at: (at[0] + len(at[1]), at[0]), default=None)

    def _tail_length(self, text: str) -> int:
        """The length of the longest end of the text that is the beginning of a stop."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0
