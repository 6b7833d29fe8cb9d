"""The shared memory of MPI's ranks, which outlives them if they do not end in order.

An MPI library names a segment in /dev/shm (3 MB and more), and takes the name away when it is
finalised. A job that dies leaves it there for good; a server that respawns its engine would fill
the memory in the end. So a name goes as soon as every rank has opened it: then the memory goes with
the last of them, however they end. What is left of jobs that died sooner is swept.

Knows nothing of MPI but the names.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

FOLDER = Path("/dev/shm")  # noqa: S108 - it is where they are

# All ranks open MPICH's before MPI_Init returns. Open MPI's are opened when first needed.
MPICH = ("mpich_shm_",)
ALL = (*MPICH, "sm_segment.", "vader_segment.")

# A job that is just starting may not have opened its segment yet.
SWEEP_AGE_S = 60.0


def mapped(pids: Iterable[int], *, prefixes: tuple[str, ...] = ALL) -> set[Path]:
    """Return the segments that the processes `pids` have open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            # proc(5): the sixth field is the path.
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == FOLDER and path.name.startswith(prefixes):
                    found.add(path)
    return found


def unlink(segments: Iterable[Path]) -> None:
    """Take their names away. Whoever has one open keeps it."""
    for segment in segments:
        with contextlib.suppress(OSError):
            segment.unlink()


def sweep(*, age_s: float = SWEEP_AGE_S) -> set[Path]:
    """Remove our user's segments that nobody has open and that are older than `age_s`; return them.

    A container that shares /dev/shm but hides its processes loses no more than a name.
    """
    before_s = time.time() - age_s
    left = {path for path in FOLDER.iterdir() if path.name.startswith(ALL)}
    stale = {path for path in left if _is_older(path, than_s=before_s)}
    if stale:
        stale -= mapped(int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal())
    unlink(stale)
    return stale


def _is_older(path: Path, *, than_s: float) -> bool:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_uid == os.getuid() and status.st_mtime <= than_s
    return False
