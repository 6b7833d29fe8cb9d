from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from bench import aims
from bench.aims_parts import (
    Figure,
    departure_percent,
)
from tests.load.answers import needs_cc

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("shares", "percent"), [([8, 8, 8, 8], 0.0), ([9, 7, 8, 8], 12.5), ([32, 0, 0, 0], 300.0)]
)
def test_a_spread_is_as_good_as_its_worst_share(shares: list[int], percent: float) -> None:
    assert departure_percent(shares) == pytest.approx(percent)


@pytest.mark.parametrize(
    ("figure", "shown"),
    [
        (Figure(name="a", value=1.0, unit="us"), "| part | a | 1 us |  |  |"),
        (Figure(name="a", value=1.0, unit="us", aim=1.0), "| part | a | 1 us | <= 1 | met |"),
        (Figure(name="a", value=2.0, unit="s", aim=1.0), "| part | a | 2 s | <= 1 | **missed** |"),
        (Figure(name="a", value=1.0, unit="s", quiet=False), "| part | a | 1 s ? |  |  |"),
    ],
)
def test_a_row_says_what_was_found_and_whether_it_is_enough(figure: Figure, shown: str) -> None:
    assert aims.Row("part", figure).as_markdown() == shown


@needs_cc
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_a_server_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "aims.json"
    small = ["--frontends", "1", "--starts", "1", "--window-s", "0.5", "--json", str(path)]
    assert aims.main([*small, "--part", "startup", "--part", "latency"]) in (0, 1)
    by_name = {each["name"]: each for each in json.loads(path.read_text())["figures"]}
    assert 0.1 < by_name["K=1: an acceptor answers"]["value"] < 30
    assert by_name["closed loop: the engine's own TTFT"]["value"] == 20
    assert -10 < by_name["Poisson: TTFT p50 over the engine's"]["value"] < 1000
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(by_name)
