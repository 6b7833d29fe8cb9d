"""Completion: the shells' own opinion of the scripts, and what bash completes with one."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from fastserve.cli import main

if TYPE_CHECKING:
    from pathlib import Path

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", "bash"]) == 0
    path = tmp_path / "fastserve.bash"
    path.write_text(capsys.readouterr().out)
    return path


@needs_bash
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["ben"], ["bench"]),
        (["--front"], ["--frontends"]),
        (["--accept", ""], ["shared", "reuseport"]),
        (["bench", "--ra"], ["--rate", "--ramp-s"]),
        (["check", "--js"], ["--json"]),
        (["check", "--engi"], ["--engine-"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes(words: list[str], completed: list[str], script: Path) -> None:
    listed = " ".join(f"'{word}'" for word in ["fastserve", *words])
    asked = (
        f"source {script}; COMP_WORDS=({listed}); COMP_CWORD={len(words)};"
        " function=$(complete -p fastserve); function=${function#*-F }; function=${function%% *};"
        f" $function fastserve '{words[-1]}' x; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    got = done.stdout.split()
    assert [word for word in got if any(word.startswith(want) for want in completed)], got
    assert all(word.startswith(words[-1]) for word in got)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_theirs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "--frontends" in out or "frontends" in out
    assert "bench" in out
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=out, text=True, check=True)
