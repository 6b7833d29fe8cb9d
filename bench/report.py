"""What was measured, as JSON (everything) and as Markdown (the tables one looks at)."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

from bench.compare import LOAD_SHARE_MAX, OTHERS_SHARE_MAX, median_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.compare import Cell, Options
    from bench.servers import Server
    from bench.works import Work

_PACKAGES = (
    "fastserve", "uvloop", "fastapi", "pydantic", "uvicorn", "starlette", "granian", "aiohttp",
)  # fmt: skip
# Above this share of chunks that came merged, a cost per chunk flatters.
_MERGED_SHARE_MAX = 0.3

_LEGEND = f"""\
`*` over {_MERGED_SHARE_MAX:.0%} of the chunks came merged in one read, which flatters the cost;
`?` others used over {OTHERS_SHARE_MAX:.0%} of the server's cores in each attempt;
`!` some answers failed;
`^` the load generator used over {LOAD_SHARE_MAX:.0%} of its cores and may be what limited.
"""


def environment() -> dict[str, Any]:
    """The machine and the versions that figures are of."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def as_json(
    cells: Sequence[Cell], servers: Sequence[Server], works: Sequence[Work], options: Options
) -> str:
    """Everything, disturbed cells included."""
    settings = dataclasses.asdict(options)
    settings |= {name: sorted(settings[name]) for name in ("server_cores", "load_cores")}
    document = {
        "environment": environment(),
        "options": settings,
        "servers": [{"name": each.name, "frontends": each.frontends} for each in servers],
        "works": [dataclasses.asdict(work) | {"name": work.name} for work in works],
        "cells": [dataclasses.asdict(cell) | {"quiet": cell.quiet} for cell in cells],
    }
    return json.dumps(document, indent=1)


def as_markdown(
    cells: Sequence[Cell], servers: Sequence[Server], works: Sequence[Work], options: Options
) -> str:
    """Three tables, a row for each work and a column for each server: medians over the rounds."""
    about = environment()
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    grid = _Grid(cells, servers, works)
    return "\n".join(
        [
            "# Servers side by side",
            "",
            f"{about['cpu']}, Linux {about['kernel']}, Python {about['python']}; {versions}.",
            f"{_cores(options)}; {options.rounds} rounds of {options.window_s:g} s.",
            "",
            "## CPU microseconds of the whole server per streamed chunk (s) or request (n)",
            "",
            *grid.table(lambda cell: cell.cpu_us, marks=_marks),
            "",
            _LEGEND,
            "## Chunks (s) or requests (n) per second",
            "",
            *grid.table(lambda cell: cell.per_s, digits=0),
            "",
            "## TTFT p50, ms",
            "",
            *grid.table(lambda cell: cell.ttft_ms["p50"]),
            "",
            "## Inter-token latency p99, ms",
            "",
            *grid.table(lambda cell: cell.itl_ms["p99"]),
            "",
            "## Share of chunks that came merged, percent",
            "",
            *grid.table(lambda cell: 100 * cell.merged_share if _is_streamed(cell) else None),
            "",
            *_remarks(cells, servers),
        ]
    )


class _Grid:
    """Cells by work and server."""

    def __init__(
        self, cells: Sequence[Cell], servers: Sequence[Server], works: Sequence[Work]
    ) -> None:
        self._cells = cells
        self._servers = [server.name for server in servers]
        self._works = [work.name for work in works]

    def table(
        self,
        value: Callable[[Cell], float | None],
        *,
        digits: int = 1,
        marks: Callable[[Sequence[Cell]], str] = lambda _: "",
    ) -> list[str]:
        lines = ["| work | " + " | ".join(self._servers) + " |", "|---" * (len(self._servers) + 1)]
        lines[1] += "|"
        for work in self._works:
            row = [work]
            for server in self._servers:
                found = [c for c in self._cells if (c.work, c.server) == (work, server)]
                median = median_of(found, value)
                row.append("" if median is None else f"{median:.{digits}f}{marks(found)}")
            lines.append("| " + " | ".join(row) + " |")
        return lines


def _marks(cells: Sequence[Cell]) -> str:
    marks = ""
    if (median_of(cells, lambda cell: cell.merged_share) or 0) > _MERGED_SHARE_MAX:
        marks += "*"
    if not any(cell.quiet for cell in cells):
        marks += "?"
    if any(cell.failures or cell.unfinished for cell in cells):
        marks += "!"
    if (median_of(cells, lambda cell: cell.load_share) or 0) > LOAD_SHARE_MAX:
        marks += "^"
    return marks


def _is_streamed(cell: Cell) -> bool:
    return cell.itl_ms["p50"] is not None


def _remarks(cells: Sequence[Cell], servers: Sequence[Server]) -> list[str]:
    own_pace = [server.name for server in servers if not server.paced]
    remarks = [f"- {name} has a pace of its own, whatever the work says." for name in own_pace]
    for cell in cells:
        remarks += [f"- {cell.server}, {cell.work}, round {cell.round}: {n}" for n in cell.notes]
    return [*remarks, ""] if remarks else []


def _cores(options: Options) -> str:
    server, load = (
        ", ".join(map(str, sorted(cores))) for cores in (options.server_cores, options.load_cores)
    )
    return f"Server on cores {server}, load on cores {load}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
