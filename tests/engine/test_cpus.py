"""The processors of a container are those of its quota, and its memory what its limit leaves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from fastserve.engine.cpus import available_cpus, available_memory_bytes

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


MEMINFO = "MemTotal:       16000 kB\nMemAvailable:    8000 kB\nHugePages_Total:       0\n"


@pytest.mark.parametrize(
    ("files", "kib"),
    [
        pytest.param({}, 8000, id="no control groups"),
        pytest.param({"memory.max": "max\n", "memory.current": "5\n"}, 8000, id="v2, no limit"),
        pytest.param(
            {"memory.max": f"{6000 << 10}\n", "memory.current": f"{2000 << 10}\n"},
            4000,
            id="v2, a limit",
        ),
        pytest.param(
            {"memory.max": f"{6000 << 10}", "memory.current": f"{7000 << 10}"}, 0, id="v2, over it"
        ),
        pytest.param(
            {
                "memory/memory.limit_in_bytes": f"{6000 << 10}",
                "memory/memory.usage_in_bytes": f"{1000 << 10}",
            },
            5000,
            id="v1, a limit",
        ),
        pytest.param(
            {"memory/memory.limit_in_bytes": str(2**63), "memory/memory.usage_in_bytes": "1"},
            8000,
            id="v1, no limit",
        ),
        pytest.param({"meminfo": "MemTotal: 1 kB\n"}, 0, id="nothing is known"),
    ],
)
def test_the_memory_is_what_both_the_machine_and_the_group_have_left(
    files: dict[str, str], kib: int, tmp_path: Path
) -> None:
    for name, content in {"meminfo": MEMINFO, **files}.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    assert available_memory_bytes(cgroup=tmp_path, meminfo=tmp_path / "meminfo") == kib << 10
