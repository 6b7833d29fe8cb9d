"""The library of MPI: how it is found, imported and left. The one file that imports mpi4py.

Knows nothing of ranks or sessions.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.errors import StartError

if TYPE_CHECKING:
    from types import ModuleType


def finalize(*, timeout_s: float) -> bool:
    """Call MPI_Finalize, which waits for the other ranks; return whether it ended in time.

    For a process in which MPI is in use, whoever has begun that: launchers count one that exits
    without it as crashed. Does nothing in others.
    """
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is None or loaded.Is_finalized():
        return True
    thread = threading.Thread(target=loaded.Finalize, name="mpi-finalize", daemon=True)
    thread.start()
    thread.join(max(timeout_s, 0.0))
    return not thread.is_alive()


def import_mpi() -> ModuleType:
    """Import mpi4py.MPI, which is MPI_Init. Raises StartError if there is no MPI to use.

    Unless somebody else has imported it before, the end of the interpreter is not MPI_Finalize:
    that would wait for dead ranks, or crash. See finalize().
    """
    _import("mpi4py").rc.finalize = False
    return _import("mpi4py.MPI")


def version() -> str:
    """What the library calls itself, in a line; MPI is not initialised. Raises StartError."""
    _import("mpi4py").rc.initialize = False
    text: str = import_mpi().Get_library_version()
    return " ".join(text.splitlines()[0].split())


def import_futures() -> ModuleType:
    """Import mpi4py.futures. Raises StartError as import_mpi does."""
    import_mpi()
    return _import("mpi4py.futures")


def abort(code: int) -> None:
    """Call MPI_Abort: the end of every rank, this one first. For a process in which MPI is used."""
    import_mpi().COMM_WORLD.Abort(code)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    # Where the library of MPI is missing or unusable this is a RuntimeError, or worse.
    except Exception as error:
        raise StartError(
            f"MPI cannot be used ({type(error).__name__}: {error}); "
            "pip install 'fastserve[mpi]' brings one"
        ) from error


def find_launcher() -> None:
    """Put this environment's programs on PATH: an MPI from a wheel starts its mpiexec by name."""
    programs = str(Path(sys.prefix) / "bin")
    path = os.environ.get("PATH", os.defpath)
    if programs not in path.split(os.pathsep) and (Path(programs) / "mpiexec").exists():
        os.environ["PATH"] = f"{programs}{os.pathsep}{path}"
