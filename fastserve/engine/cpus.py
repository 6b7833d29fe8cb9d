"""How many processors, and how much memory, this process may really use.

A container's quota is not in the affinity mask, and an inference library that starts a thread for
each processor of the host then spends its quota on threads that wait for each other. Nor is its
limit of memory what the machine has: who takes more is killed.
"""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """The affinity mask's count, or the quota of the control group where that is less; at least 1.

    The quota is that of the group seen at `cgroup`, as in a container with a cgroup namespace.
    """
    affinity = len(os.sched_getaffinity(0))
    quota = _quota_v2(cgroup / "cpu.max") or _quota_v1(cgroup / "cpu")
    return max(1, min(affinity, round(quota))) if quota else affinity


def available_memory_bytes(*, cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """What can be had without swapping, or what the control group has left where that is less.

    0 where the system does not tell.
    """
    known = (_memory_v2(cgroup), _memory_v1(cgroup / "memory"), _memory_of_system(meminfo))
    return max(0, min((size for size in known if size is not None), default=0))


def _memory_of_system(meminfo: Path) -> int | None:
    """MemAvailable of proc(5), in kB."""
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, LookupError):
        return None


def _memory_v2(group: Path) -> int | None:
    """memory.max is a number or "max" (Linux cgroup-v2.rst)."""
    try:
        limit = int((group / "memory.max").read_text())
        return limit - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None


def _memory_v1(group: Path) -> int | None:
    """Without a limit the number is about 2^63, which is more than there is of anything."""
    try:
        limit = int((group / "memory.limit_in_bytes").read_text())
        return limit - int((group / "memory.usage_in_bytes").read_text())
    except (OSError, ValueError):
        return None


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
