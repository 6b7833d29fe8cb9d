"""Segments that nobody has open are removed; the others are not, and only names like MPI's."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import pytest

from fastserve.engine import mpi_shm

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mpi_shm, "FOLDER", tmp_path)
    return tmp_path


def make(path: Path, *, age_s: float = 0.0) -> Path:
    path.write_bytes(bytes(4096))
    status = path.stat()
    os.utime(path, (status.st_atime, status.st_mtime - age_s))
    return path


def test_old_segments_that_nobody_has_open_are_swept(folder: Path) -> None:
    stale = make(folder / "mpich_shm_1_0", age_s=120.0)
    young = make(folder / "mpich_shm_2_0")
    strange = make(folder / "psm_1", age_s=120.0)
    mapped = make(folder / "sm_segment.host.1", age_s=120.0)
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert mpi_shm.sweep() == {stale}

    assert set(folder.iterdir()) == {young, strange, mapped}


def test_the_segments_of_a_process_are_found_by_name(folder: Path) -> None:
    ours = make(folder / "mpich_shm_1_0")
    other = make(folder / "sm_segment.host.1")
    with (
        ours.open("r+b") as one,
        other.open("r+b") as two,
        mmap.mmap(one.fileno(), 4096),
        mmap.mmap(two.fileno(), 4096),
    ):
        assert mpi_shm.mapped([os.getpid()]) == {ours, other}
        assert mpi_shm.mapped([os.getpid()], prefixes=mpi_shm.MPICH) == {ours}
    assert mpi_shm.mapped([os.getpid()]) == set()


def test_a_name_that_is_gone_already_is_no_error(folder: Path) -> None:
    there = make(folder / "mpich_shm_1_0")
    mpi_shm.unlink([folder / "mpich_shm_0_0", there])

    assert not there.exists()
