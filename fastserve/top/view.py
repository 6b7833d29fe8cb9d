"""The screen of `fastserve top`: figures in, what rich draws out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fastserve.top.figures import QUANTILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from fastserve.top.figures import Figures

_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {"ready": "bold green", "draining": "yellow", "starting": "yellow"}


def screen(
    figures: Figures, *, url: str, history: Sequence[float], problem: str = ""
) -> RenderableType:
    """Everything about a server. `history`: tokens per second, the latest last."""
    head = Text.assemble(
        ("fastserve ", "bold"),
        f"{figures.version} at {url}  ",
        (figures.state, _STATE_STYLES.get(figures.state, "bold red")),
        f"  {figures.model}",
    )
    parts: list[RenderableType] = [
        head,
        Columns([_engine(figures), _rates(figures, history), _latencies(figures)]),
        _acceptors(figures),
    ]
    if problem:
        parts.append(Text(problem, style="red"))
    return Group(*parts)


def waiting(problem: str) -> RenderableType:
    """What is shown before a server was reached."""
    return Text(f"{problem}\ntrying again; Ctrl-C ends", style="red")


def spark(values: Sequence[float], *, width: int) -> str:
    """The last `width` values as bars, the highest of them full."""
    shown = list(values)[-width:]
    most = max(shown, default=0.0)
    if most <= 0:
        return _BARS[0] * len(shown)
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in shown)


def _engine(figures: Figures) -> RenderableType:
    table = _plain()
    table.add_row("running", f"{figures.num_running:,}")
    table.add_row("waiting", f"{figures.num_waiting:,}")
    table.add_row("KV cache", f"{figures.kv_cache_usage:.0%}")
    table.add_row("", ProgressBar(total=1.0, completed=figures.kv_cache_usage, width=14))
    return Panel(table, title="engine", title_align="left")


def _rates(figures: Figures, history: Sequence[float]) -> RenderableType:
    table = _plain()
    table.add_row("tokens/s", f"{figures.generation_tokens_per_s:,.0f}")
    table.add_row("prompt tokens/s", f"{figures.prompt_tokens_per_s:,.0f}")
    table.add_row("requests/s", f"{figures.requests_per_s:,.1f}")
    errors = Text(f"{figures.errors_per_s:,.1f}", style="red" if figures.errors_per_s else "")
    table.add_row("5xx/s", errors)
    return Panel(
        Group(table, Text(spark(history, width=24), style="cyan")),
        title="rates",
        title_align="left",
    )


def _latencies(figures: Figures) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("ms")
    for share in QUANTILES:
        table.add_column(f"p{100 * share:g}", justify="right")
    rows = (
        ("first token", figures.ttft_ms),
        ("between tokens", figures.itl_ms),
        ("whole answer", figures.e2e_ms),
    )
    for name, quantiles in rows:
        cells = (f"{quantiles[share]:,.1f}" if quantiles else "-" for share in QUANTILES)
        table.add_row(name, *cells)
    return Panel(table, title=f"latencies of the last {figures.window_s:.0f} s", title_align="left")


def _acceptors(figures: Figures) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("acceptor", "connections", "requests", "loop lag"):
        table.add_column(name, justify="right")
    for one in figures.acceptors:
        late = "red" if one.loop_lag_ms > 50 else ""
        table.add_row(
            one.lane,
            f"{one.connections:,}",
            f"{one.requests_in_flight:,}",
            Text(f"{one.loop_lag_ms:.1f} ms", style=late),
        )
    totals = (
        f"since the start: {figures.requests_total:,} requests, {figures.aborts_total:,} aborts, "
        f"{figures.refusals_total:,} refusals, {figures.respawns_total:,} respawns"
    )
    return Group(table, Text(totals, style="dim"))


def _plain() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column()
    table.add_column(justify="right")
    return table
