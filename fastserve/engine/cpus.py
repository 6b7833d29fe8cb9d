"""How many processors this process may really use.

A container's quota is not in the affinity mask, and an inference library that starts a thread for
each processor of the host then spends its quota on threads that wait for each other.
"""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """The affinity mask's count, or the quota of the control group where that is less; at least 1.

    The quota is that of the group seen at `cgroup`, as in a container with a cgroup namespace.
    """
    affinity = len(os.sched_getaffinity(0))
    quota = _quota_v2(cgroup / "cpu.max") or _quota_v1(cgroup / "cpu")
    return max(1, min(affinity, round(quota))) if quota else affinity


def _quota_v2(file: Path) -> float | None:
    """cpu.max is "QUOTA PERIOD" or "max PERIOD" (Linux cgroup-v2.rst)."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(directory: Path) -> float | None:
    """A quota of -1 is none (Linux sched-bwc.rst)."""
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        period = int((directory / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
