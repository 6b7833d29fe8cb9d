"""What a run's blows cost, as a table."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from tests.chaos.asking import Ending
from tests.chaos.blows import KINDS
from tests.chaos.driver import LOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.driver import Outcome

_COUNTED = {
    "well": Ending.WELL,
    "error": Ending.ERROR,
    "left": Ending.LEFT,
    "cut with its process": Ending.CUT,
    "stale": Ending.STALE,
    "refused": Ending.REFUSED,
    LOST: LOST,
}
_HEAD = (
    "| blow | number | answered s, median | worst | gone or whole s, median | worst | requests | "
    + " | ".join(_COUNTED)
    + " |"
)


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, one row for each kind and one for all.

    Lost are those whose end nothing excuses; stale, those on a kept connection that was closed
    before they could be seen; refused, those to a server that has ended.
    """
    lines = [_HEAD, "|---" * _HEAD.count(" |") + "|"]
    kinds = [kind for kind in KINDS if any(o.blow.kind == kind for o in outcomes)]
    for kind in kinds:
        lines.append(_row(kind, [o for o in outcomes if o.blow.kind == kind]))
    return "\n".join([*lines, _row("all", outcomes)])


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    answered = [outcome.answered_s for outcome in outcomes]
    over = [outcome.over_s for outcome in outcomes]
    counts = [sum(o.endings.get(ending, 0) for o in outcomes) for ending in _COUNTED.values()]
    cells = [
        name, len(outcomes),
        f"{statistics.median(answered):.2f}", f"{max(answered):.2f}",
        f"{statistics.median(over):.2f}", f"{max(over):.2f}",
        sum(counts), *counts,
    ]  # fmt: skip
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
