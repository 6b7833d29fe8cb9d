"""Which ranks a library has started on this host, where neither it nor MPI can be asked.

Ranks are children of MPI's daemon, so they are looked for among our descendants and in our session,
by the variables that a launcher gives each of them. A helper that a rank starts inherits them, and
is no rank.

Knows nothing of MPI itself, nor of who uses it. Sees no other host.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.engine.mpi_watch import RankIdentity

if TYPE_CHECKING:
    from collections.abc import Iterator

# Open MPI and PRRTE, PMIx, and MPICH with its kin. A namespace tells one job's rank 0 from
# another's.
_RANKS = (b"OMPI_COMM_WORLD_RANK", b"PMIX_RANK", b"PMI_RANK")
_VARIABLES = (*_RANKS, b"PMIX_NAMESPACE")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    pid: int
    parent: int
    session: int


def find_ranks() -> list[RankIdentity]:
    """The ranks that there are now, by pid: whose variables are not simply their parent's."""
    processes = {process.pid: process for process in _processes()}
    found = []
    for process in sorted(processes.values(), key=lambda one: one.pid):
        if not _is_ours(process, processes):
            continue
        variables = _variables(process.pid)
        if variables and variables != _variables(process.parent):
            with contextlib.suppress(ProcessLookupError):
                found.append(RankIdentity.of(process.pid, rank=_rank(variables)))
    return found


def _is_ours(process: _Process, processes: dict[int, _Process]) -> bool:
    if process.pid == os.getpid():
        return False
    # Only the leader's: else it is our supervisor's session, or that of somebody's terminal.
    if process.session == os.getpid():
        return True
    ancestor: _Process | None = process
    while ancestor is not None:
        if ancestor.parent == os.getpid():
            return True
        ancestor = processes.get(ancestor.parent)
    return False


def _processes() -> Iterator[_Process]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            # proc(5): the name, in parentheses, may itself hold parentheses and spaces.
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            yield _Process(pid=int(entry.name), parent=int(fields[1]), session=int(fields[3]))


def _variables(pid: int) -> dict[bytes, bytes]:
    """What a launcher told this process of its rank: nothing for most."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (variable.partition(b"=") for variable in environment.split(b"\0"))
    return {name: value for name, _, value in pairs if name in _VARIABLES}


def _rank(variables: dict[bytes, bytes]) -> int:
    """The number; -1 for what has only a namespace, as a daemon may."""
    numbers = [variables[name] for name in _RANKS if variables.get(name, b"").isdigit()]
    return int(numbers[0]) if numbers else -1
