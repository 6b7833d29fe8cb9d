"""What a run's blows cost, as a table."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from tests.chaos.asking import Ending
from tests.chaos.blows import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.driver import Outcome

_HEAD = (
    "| blow | number | answered s, median | worst | gone or whole s, median | worst "
    "| requests | well | error | left | cut with its acceptor | refused after | lost |"
)


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, one row for each kind and one for all. Lost are those whose end nothing excuses."""
    lines = [_HEAD, "|---" * _HEAD.count(" |") + "|"]
    kinds = [kind for kind in KINDS if any(o.blow.kind == kind for o in outcomes)]
    for kind in kinds:
        lines.append(_row(kind, [o for o in outcomes if o.blow.kind == kind]))
    return "\n".join([*lines, _row("all", outcomes)])


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    answered = [outcome.answered_s for outcome in outcomes]
    over = [outcome.over_s for outcome in outcomes]
    count = {
        ending: sum(outcome.endings.get(ending, 0) for outcome in outcomes) for ending in Ending
    }
    lost = sum(v.startswith("a request ended") for o in outcomes for v in o.violations)
    cells = [
        name, len(outcomes),
        f"{statistics.median(answered):.2f}", f"{max(answered):.2f}",
        f"{statistics.median(over):.2f}", f"{max(over):.2f}",
        sum(count.values()), count[Ending.WELL], count[Ending.ERROR], count[Ending.LEFT],
        count[Ending.CUT] + count[Ending.STALE], count[Ending.REFUSED], lost,
    ]  # fmt: skip
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
