"""How much of the prompts a step may take, so that who decodes meanwhile waits no longer than told.

On a processor a token of a prompt costs about what a decoding request's row costs, so a step's time
is shared out by rows. What was dearer than expected is believed at once, what was cheaper slowly:
the target is a bound, missed only by the first steps of a kind or where `TOKENS_MIN` cost more.

Knows nothing of clocks and requests: it is told how long steps took.
"""

from __future__ import annotations

# Less would be slow for nothing: a step costs something whatever is in it.
TOKENS_MIN = 8
# What is tried before anything is known.
_TOKENS_FIRST = 32
# The share of a cheaper step in the estimate.
_CHEAPER_SHARE = 0.3


class PrefillPace:
    """The budget of prompt tokens for a step, from the steps before it."""

    def __init__(self, *, tokens_max: int, target_s: float) -> None:
        """`tokens_max`: in any step; `target_s`: what prompts may add to a step of decode."""
        self._tokens_max = tokens_max
        self._target_s = target_s
        self._row_s = 0.0

    def budget(self, *, decoding: bool) -> int:
        """How many prompt tokens the next step may have; `decoding`: whether somebody waits."""
        if not decoding:
            return self._tokens_max
        tokens = int(self._target_s / self._row_s) if self._row_s else _TOKENS_FIRST
        return min(max(tokens, TOKENS_MIN), self._tokens_max)

    def took(self, elapsed_s: float, *, rows: int) -> None:
        """Learn from a step with prompts in it, that had so many rows in all."""
        row_s = elapsed_s / rows
        if row_s < self._row_s:
            row_s = self._row_s + _CHEAPER_SHARE * (row_s - self._row_s)
        self._row_s = row_s
