"""Compiles the load generator, once for each version of its source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).parent
_FILES = ("loadgen.c", "answer.h", "histogram.h")
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wshadow")
_COMPILE_TIMEOUT_S = 120.0


class LoadError(Exception):
    """No load could be generated. The message says why, and what to do about it."""


def build() -> Path:
    """The program, compiled with $CC or `cc` if the user's cache has it not. Raises LoadError."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    sources = b"".join((_SOURCE / name).read_bytes() for name in _FILES)
    digest = hashlib.sha256(sources + " ".join(_FLAGS).encode()).hexdigest()[:16]
    program = _cache() / f"loadgen-{digest}"
    if program.exists():
        return program
    if compiler is None:
        raise LoadError(
            "the load generator is C, and there is no C compiler: install cc, or set CC"
        )
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
        made = Path(scratch) / program.name
        command = [compiler, *_FLAGS, "-o", str(made), str(_SOURCE / "loadgen.c")]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
        if result.returncode:
            raise LoadError(f"{' '.join(command)} failed:\n{result.stderr}")
        # Renamed, so that nobody ever runs half a program.
        made.rename(program)
    return program


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fastserve"
