"""The dashboard shows what a server tells, and a server tells what the dashboard shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench import dashboard
from fastserve.config import Config
from fastserve.launch import _info
from fastserve.metrics.board import Board
from fastserve.metrics.catalog import METRICS, PREFIX
from fastserve.metrics.exposition import expose

PATH = Path(dashboard.__file__).with_name("grafana.json")
DASHBOARD: dict[str, Any] = json.loads(PATH.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
NAME = re.compile(r"\bfastserve_\w+")
GROUPED = re.compile(r"by \(([^)]*)\) ?\(")
# Labels that are not the server's: Prometheus adds the one, and the other is a bucket's.
ALSO_LABELS = {"instance", "le"}


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The names of samples, and the labels that each has."""
    numbers = Board.make(2).all_numbers()
    text = expose(numbers, info=_info(Config()), model="m", now_s=1.0).decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def queries(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def test_the_file_is_what_the_table_makes() -> None:
    assert dashboard.dashboard() == DASHBOARD


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_shows_metrics_that_there_are(
    panel: dict[str, Any], exported: dict[str, set[str]]
) -> None:
    assert panel["targets"]
    assert panel["description"].endswith(".")
    for query in queries(panel):
        names = NAME.findall(query)
        assert names
        labels = {label.strip() for group in GROUPED.findall(query) for label in group.split(",")}
        for name in names:
            assert name in exported
            assert not labels - exported[name] - ALSO_LABELS, name


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_legend_has_the_labels_that_its_query_keeps(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        kept = {
            label.strip() for group in GROUPED.findall(target["expr"]) for label in group.split(",")
        }
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept


def test_every_metric_is_shown_somewhere() -> None:
    shown = " ".join(query for panel in PANELS for query in queries(panel))
    assert not [metric.name for metric in METRICS if f"{PREFIX}{metric.name}" not in shown]


def test_no_two_panels_share_a_place() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
