"""A run directory is private, and only the dead leave one behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import pytest

from fastserve.errors import ConfigError
from fastserve.supervisor.run_directory import RunDirectory, sweep

if TYPE_CHECKING:
    from pathlib import Path


def test_it_is_private_and_gone_after_close(tmp_path: Path) -> None:
    made = RunDirectory.make(str(tmp_path))
    assert made.path.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(made.path / "ingress"))
        made.close()
    assert list(tmp_path.iterdir()) == []


def test_the_living_are_not_swept(tmp_path: Path) -> None:
    made = RunDirectory.make(str(tmp_path))
    another = RunDirectory.make(str(tmp_path))
    assert made.path.exists()
    made.close()
    another.close()


def test_what_the_dead_left_is_swept(tmp_path: Path) -> None:
    program = (
        "import os, sys; from fastserve.supervisor.run_directory import RunDirectory;"
        "RunDirectory.make(sys.argv[1]); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=30)
    [left] = tmp_path.iterdir()
    sweep(tmp_path)
    assert not left.exists()


def test_nothing_of_others_is_ever_removed(tmp_path: Path) -> None:
    lookalike = tmp_path / "fastserve-run-notes"
    lookalike.mkdir()
    (lookalike / "lock").touch()
    (lookalike / "precious.txt").write_text("keep me")
    unlocked = tmp_path / "fastserve-run-other"
    unlocked.mkdir()
    (unlocked / "data").write_text("keep me too")
    os.utime(unlocked, (time.time() - 3600,) * 2)
    sweep(tmp_path)
    assert (lookalike / "precious.txt").exists()
    assert (unlocked / "data").exists()


@pytest.mark.parametrize(
    ("parent", "message"),
    [
        ("/nonexistent/place", "No such file"),
        ("/proc", "cannot make a directory"),
    ],
)
def test_a_place_that_cannot_be_used_is_named(parent: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.run_directory") as caught:
        RunDirectory.make(parent)
    assert parent in str(caught.value)
    assert message in str(caught.value)


def test_a_path_too_long_for_sockets_is_refused_at_once(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="too long for sockets"):
        RunDirectory.make(str(deep))
    assert list(deep.iterdir()) == []


def test_without_any_directory_for_it_the_refusal_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(ConfigError, match=r"server.run_directory: .* --run-directory"):
        RunDirectory.make(None)
    with pytest.raises(ConfigError, match=r"/proc: No such file.* --run-directory"):
        RunDirectory.make("/proc")
