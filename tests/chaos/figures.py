"""What blows cost, as tables: by kind, over all configurations, and by configuration."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from tests.chaos.asking import Ending
from tests.chaos.driver import LOST
from tests.chaos.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.chaos.records import Record

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
    "number | answered s, median | worst | bound | gone or whole s, median | worst | bound | "
    "requests | " + " | ".join(_COUNTED) + " | violated |"
)


def table(records: Sequence[Record]) -> str:
    """Markdown, one row for each kind and one for all.

    Lost are those whose end nothing excuses; stale, those on a kept connection that was closed
    before they could be seen; refused, those to a server that has ended.
    """
    kinds = [kind for kind in KINDS if any(record.kind == kind for record in records)]
    return _table("blow", records, kinds, lambda record: record.kind)


def by_configuration(records: Sequence[Record]) -> str:
    """The same for each configuration, in the order of their first blows."""
    names = list(dict.fromkeys(record.configuration for record in records))
    return _table("configuration", records, names, lambda record: record.configuration)


def _table(
    what: str, records: Sequence[Record], names: Sequence[str], name_of: Callable[[Record], str]
) -> str:
    head = f"| {what} | {_HEAD}"
    rows = [_row(name, [each for each in records if name_of(each) == name]) for name in names]
    return "\n".join([head, "|---" * head.count(" |") + "|", *rows, _row("all", records)])


def _row(name: str, records: Sequence[Record]) -> str:
    answered = [record.answered_s for record in records]
    over = [record.over_s for record in records]
    counts = [sum(r.endings.get(ending, 0) for r in records) for ending in _COUNTED.values()]
    cells = [
        name, len(records),
        f"{statistics.median(answered):.2f}", f"{max(answered):.2f}",
        f"{KINDS[name].answered_within_s:.0f}" if name in KINDS else "",
        f"{statistics.median(over):.2f}", f"{max(over):.2f}",
        f"{KINDS[name].over_within_s:.0f}" if name in KINDS else "",
        sum(counts), *counts, sum(bool(record.violations) for record in records),
    ]  # fmt: skip
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
