"""Draws what was measured, as PNG files. The sole owner of matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.compare import median_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from bench.compare import Cell
    from bench.servers import Server
    from bench.works import Work

_Points = list[tuple[float, float]]


def draw(
    cells: Sequence[Cell], servers: Sequence[Server], works: Sequence[Work], *, directory: Path
) -> list[Path]:
    """Draw every plot that there are points for; return the files. Raises ImportError."""
    drawn = []
    by_step: dict[float, list[Work]] = {}
    for work in works:
        if work.stream:
            by_step.setdefault(work.step_ms, []).append(work)
    for step_ms, streamed in by_step.items():
        # A line needs two points: a step with one concurrency stands in the tables alone.
        if len(streamed) < 2:
            continue
        for name, title, value in _BY_CONCURRENCY:
            lines = {server.name: _line(cells, server, streamed, value) for server in servers}
            path = directory / f"{name}-step-{step_ms:g}ms.png"
            _plot(path, lines, title=f"{title}, step {step_ms:g} ms", x="clients", log_x=True)
            drawn.append(path)
    lines = _by_frontends(cells, servers, works)
    if any(len(points) > 1 for points in lines.values()):
        path = directory / "throughput-by-frontends.png"
        _plot(path, lines, title="Chunks or requests per second", x="acceptors (K)", log_x=False)
        drawn.append(path)
    return drawn


_BY_CONCURRENCY: tuple[tuple[str, str, Callable[[Cell], float | None]], ...] = (
    ("cost", "CPU microseconds per chunk", lambda cell: cell.cpu_us),
    ("ttft-p50", "TTFT p50, ms", lambda cell: cell.ttft_ms["p50"]),
    ("ttft-p99", "TTFT p99, ms", lambda cell: cell.ttft_ms["p99"]),
    ("itl-p50", "Inter-token latency p50, ms", lambda cell: cell.itl_ms["p50"]),
    ("itl-p99", "Inter-token latency p99, ms", lambda cell: cell.itl_ms["p99"]),
)


def _line(
    cells: Sequence[Cell],
    server: Server,
    works: Iterable[Work],
    value: Callable[[Cell], float | None],
) -> _Points:
    points = []
    for work in works:
        found = [cell for cell in cells if (cell.server, cell.work) == (server.name, work.name)]
        median = median_of(found, value)
        if median is not None:
            points.append((float(work.concurrency), median))
    return sorted(points)


def _by_frontends(
    cells: Sequence[Cell], servers: Sequence[Server], works: Sequence[Work]
) -> dict[str, _Points]:
    """Throughput of each work by K, of the servers that were measured with several."""
    lines: dict[str, _Points] = {work.name: [] for work in works}
    for server in servers:
        if not server.name.startswith("fastserve"):
            continue
        for work in works:
            found = [cell for cell in cells if (cell.server, cell.work) == (server.name, work.name)]
            median = median_of(found, lambda cell: cell.per_s)
            if median is not None:
                lines[work.name].append((float(server.frontends), median))
    return {name: sorted(points) for name, points in lines.items()}


def _plot(path: Path, lines: dict[str, _Points], *, title: str, x: str, log_x: bool) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 (it takes a second, and is an extra)

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in lines.items():
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    if log_x:
        axes.set_xscale("log", base=2)
    ticks = sorted({at for points in lines.values() for at, _ in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
