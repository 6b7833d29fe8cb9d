"""Tokens of one generation to the text that its client sees: detokenized, and ended by a stop.

The concatenated pushes and the finish are the text that a client would get who does not stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.text.detokenizer import Detokenizer
from fastserve.text.stops import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastserve.text.token_table import TokenTable
    from fastserve.text.tokenizer import Tokenizer


class TextStream:
    """`push` tokens as they come, then `finish`; `stopped` is the stop string that ended it."""

    __slots__ = ("_detokenizer", "_matcher", "_push", "push")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        table: TokenTable | None = None,
    ) -> None:
        """`table`: what the tokens are, if not what the tokenizer says."""
        table = table or tokenizer.table
        self._detokenizer = Detokenizer(table, skip_special_tokens=skip_special_tokens)
        self._push = self._detokenizer.push
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None
        # Without stops the detokenizer's own: this is called for every token.
        self.push: Callable[[Sequence[int]], str] = self._push_matched if stops else self._push

    def _push_matched(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add; "" once `stopped`."""
        assert self._matcher is not None
        return self._matcher.push(self._push(token_ids))

    def finish(self) -> str:
        """The text still held back, when no more tokens come; "" if `stopped`."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        # The rest may complete a stop, where a stop contains U+FFFD.
        rest = self._matcher.push(rest)
        return rest + self._matcher.flush()

    @property
    def pending(self) -> bool:
        """Whether what comes next will be preceded by something that is held back."""
        return self._detokenizer.pending or self._matcher is not None

    @property
    def stopped(self) -> str | None:
        """The stop string that the text ran into. Nothing pushed after it is shown."""
        return None if self._matcher is None else self._matcher.matched
