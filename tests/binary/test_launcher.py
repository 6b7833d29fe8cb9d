"""The launcher and the format of the file, with a small program in place of a server."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fastserve.binary import pack as pack_module
from fastserve.binary.pack import pack

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

PROGRAM = """#!/bin/sh
here=${0%/*}
[ -z "$FASTSERVE_UNPACK_DIRECTORY" ] || exit 1
echo "pid $$; arguments $*; data $(cat "$here/data/deep/file"); link $(cat "$here/link")"
exit 7
"""
SOURCE = Path(pack_module.__file__).parent / "launcher.c"


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("launcher") / "launcher"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fsanitize=undefined"]
    subprocess.run(["cc", *flags, "-o", made, SOURCE], check=True)
    return made


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "data" / "deep").mkdir(parents=True)
    (tree / "data" / "deep" / "file").write_text("here")
    (tree / "data" / "empty").write_bytes(b"")
    (tree / "large").write_bytes(os.urandom(3 << 20))
    (tree / "link").symlink_to("data/deep/file")
    (tree / "fastserve").write_text(PROGRAM)
    (tree / "fastserve").chmod(0o755)
    return tree


@pytest.fixture
def program(tmp_path: Path, launcher: Path, tree: Path) -> Path:
    out = tmp_path / "server"
    pack(launcher, tree, out)
    return out


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    cache = tmp_path / "cache"
    yield cache
    if cache.exists():
        shutil.rmtree(cache)


def start(program: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", **environment},
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, said = process.communicate(timeout=60)
    return process.returncode, out, said


def test_the_program_is_the_same_process_with_the_same_words(program: Path, cache: Path) -> None:
    process = start(program, "--a", "b c", XDG_CACHE_HOME=str(cache))
    code, out, said = finished(process)
    assert (code, said) == (7, "")
    assert out == f"pid {process.pid}; arguments --a b c; data here; link here\n"


def test_what_is_unpacked_is_what_was_packed(program: Path, cache: Path, tree: Path) -> None:
    finished(start(program, XDG_CACHE_HOME=str(cache)))
    [unpacked] = (cache / "fastserve").iterdir()
    assert stat.S_IMODE(unpacked.stat().st_mode) == 0o700
    assert (unpacked / "large").read_bytes() == (tree / "large").read_bytes()
    assert (unpacked / "data" / "empty").read_bytes() == b""
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    assert names == {str(path.relative_to(tree)) for path in tree.rglob("*")}


def test_it_is_unpacked_once_and_starts_that_race_do_no_harm(program: Path, cache: Path) -> None:
    racing = [start(program, XDG_CACHE_HOME=str(cache)) for _ in range(6)]
    assert {finished(process)[0] for process in racing} == {7}
    [unpacked] = (cache / "fastserve").iterdir()
    marked = unpacked / "marked"
    marked.touch()
    assert finished(start(program, XDG_CACHE_HOME=str(cache)))[0] == 7
    assert marked.exists()


def test_another_version_goes_elsewhere(
    program: Path, launcher: Path, tree: Path, cache: Path, tmp_path: Path
) -> None:
    (tree / "data" / "deep" / "file").write_text("there")
    other = tmp_path / "other"
    pack(launcher, tree, other)
    for each, data in ((program, "data here"), (other, "data there"), (program, "data here")):
        assert data in finished(start(each, XDG_CACHE_HOME=str(cache)))[1]
    assert len(list((cache / "fastserve").iterdir())) == 2


def test_where_to_unpack_can_be_said_and_is_no_setting_of_the_server(
    program: Path, tmp_path: Path
) -> None:
    where = str(tmp_path / "where")
    assert finished(start(program, FASTSERVE_UNPACK_DIRECTORY=where))[0] == 7


def test_without_a_cache_it_uses_the_home(program: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    assert finished(start(program, HOME=str(home)))[0] == 7
    assert len(list((home / ".cache" / "fastserve").iterdir())) == 1


def test_a_directory_that_others_can_write_to_is_not_used(program: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    code, _, said = finished(start(program, FASTSERVE_UNPACK_DIRECTORY=str(shared)))
    assert code == 1
    assert f"cannot unpack into {shared}: Operation not permitted" in said
    assert "set FASTSERVE_UNPACK_DIRECTORY" in said


def test_a_link_in_the_place_of_the_directory_is_not_followed(
    program: Path, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    code, _, said = finished(start(program, FASTSERVE_UNPACK_DIRECTORY=str(tmp_path / "link")))
    assert code == 1
    assert "Operation not permitted" in said


def test_a_full_disk_is_said_and_leaves_no_half(program: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "none", full],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("tmpfs can only be mounted by root")
    try:
        code, _, said = finished(start(program, FASTSERVE_UNPACK_DIRECTORY=str(full)))
        assert list(full.iterdir()) == []
    finally:
        subprocess.run(["umount", full], check=True)
    assert code == 1
    assert "No space left on device" in said


@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_half_a_file_is_refused(program: Path, cache: Path, kept: float, tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.write_bytes(program.read_bytes()[: int(program.stat().st_size * kept)])
    half.chmod(0o755)
    code, _, said = finished(start(half, XDG_CACHE_HOME=str(cache)))
    assert code == 1
    assert "not whole" in said
