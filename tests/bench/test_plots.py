from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bench.plots import draw
from bench.servers import fastserve
from bench.works import WORKS
from tests.bench.test_compare import cell

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("matplotlib")


def test_a_plot_for_each_figure_and_one_by_frontends(tmp_path: Path) -> None:
    servers = [fastserve(frontends=1), fastserve(frontends=2)]
    cells = [
        replace(cell(), server=server.name, work=work.name) for server in servers for work in WORKS
    ]
    drawn = draw(cells, servers, WORKS, directory=tmp_path)
    assert sorted(path.name for path in drawn) == [
        "cost-step-10ms.png",
        "itl-p50-step-10ms.png",
        "itl-p99-step-10ms.png",
        "throughput-by-frontends.png",
        "ttft-p50-step-10ms.png",
        "ttft-p99-step-10ms.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_one_concurrency_makes_no_line(tmp_path: Path) -> None:
    server = fastserve(frontends=1)
    assert (
        draw([replace(cell(), server=server.name)], [server], WORKS[3:], directory=tmp_path) == []
    )
