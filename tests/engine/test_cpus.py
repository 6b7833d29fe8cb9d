"""The processors of a container are those of its quota."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from fastserve.engine.cpus import available_cpus

if TYPE_CHECKING:
    from pathlib import Path

EIGHT = set(range(8))


@pytest.mark.parametrize(
    ("files", "count"),
    [
        pytest.param({}, 8, id="no control groups"),
        pytest.param({"cpu.max": "max 100000\n"}, 8, id="v2, no quota"),
        pytest.param({"cpu.max": "200000 100000\n"}, 2, id="v2, two"),
        pytest.param({"cpu.max": "150000 100000\n"}, 2, id="v2, one and a half"),
        pytest.param({"cpu.max": "10000 100000\n"}, 1, id="v2, a tenth"),
        pytest.param({"cpu.max": "3200000 100000\n"}, 8, id="v2, more than there are"),
        pytest.param({"cpu.max": "broken"}, 8, id="v2, broken"),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3, id="v1, three"
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8, id="v1, no quota"
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "0"}, 8, id="v1, broken"
        ),
    ],
)
def test_the_quota_counts_where_it_is_less_than_the_affinity(
    files: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: EIGHT)
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    assert available_cpus(tmp_path) == count
