"""A child's states, and what its environment must not carry."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing.util
import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fastserve.errors import StartError
from fastserve.supervisor.child import NEXT, Child, ChildSpec, ChildState

if TYPE_CHECKING:
    from fastserve.control import ControlSocket

TARGETS = Path(__file__).stem
DEADLINE_S = 30.0


def tell_environment(_control: ControlSocket, path: str) -> None:
    """A child's entry point: write down what it sees."""
    title = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode()
    seen = {"environment": dict(os.environ), "title": title, "sid": os.getsid(0)}
    Path(path).write_text(json.dumps(seen))


def spec(path: Path, **changes: object) -> ChildSpec:
    fields: dict[str, object] = {
        "name": "child-1",
        "title": "fastserve: child 1",
        "target": f"{TARGETS}:tell_environment",
        "arguments": lambda _: str(path),
    }
    return ChildSpec(**(fields | changes))  # type: ignore[arg-type]  # a table of changes


def run(child: Child) -> int:
    child.spawn()
    assert select.select([child.pidfd], [], [], DEADLINE_S)[0], "it did not exit"
    return child.reap(now_s=time.monotonic())


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, paths)))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_a_child_has_its_name_and_no_mpi_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "UCX_TLS"):
        monkeypatch.setenv(name, "1")
    told = tmp_path / "told"
    child = Child(spec(told, environment={"A": "b"}), log_level="info", log_format="text")
    assert run(child) == 0
    seen = json.loads(told.read_text())
    assert seen["title"] == "fastserve: child 1"
    assert seen["environment"]["A"] == "b"
    assert not [
        name for name in seen["environment"] if name.startswith(("OMPI_", "PMI_", "SLURM_"))
    ]
    assert os.environ["PMI_RANK"] == "1", "ours is as it was"
    assert "A" not in os.environ


def test_a_child_that_may_keep_its_mpi_identity_leads_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    told = tmp_path / "told"
    child = Child(spec(told, keep_mpi=True, own_session=True), log_level="info", log_format="text")
    child.spawn()
    pid = child.pid
    assert select.select([child.pidfd], [], [], DEADLINE_S)[0]
    child.reap(now_s=0.0)
    seen = json.loads(told.read_text())
    assert seen["environment"]["PMI_RANK"] == "1"
    assert seen["sid"] == pid != os.getsid(0)


def test_incarnations_count_and_exits_are_remembered(tmp_path: Path) -> None:
    child = Child(spec(tmp_path / "told"), log_level="info", log_format="text")
    run(child)
    run(child)
    assert child.incarnation == 1
    assert len(child.exited_s) == 2
    assert child.state is ChildState.EXITED


def test_a_child_that_exited_may_be_signalled_until_it_is_reaped(tmp_path: Path) -> None:
    """Starting another makes multiprocessing collect it; its pidfd then has nobody to signal."""
    child, another = (
        Child(spec(tmp_path / name), log_level="info", log_format="text") for name in ("a", "b")
    )
    child.spawn()
    assert select.select([child.pidfd], [], [], DEADLINE_S)[0]
    run(another)
    child.terminate()
    child.kill()
    assert child.reap(now_s=0.0) == 0


def test_an_entry_point_that_is_not_there_is_a_failed_child(tmp_path: Path) -> None:
    child = Child(
        spec(tmp_path / "told", target="fastserve.nothing:main"),
        log_level="error",
        log_format="text",
    )
    assert run(child) == 1


@pytest.mark.parametrize(
    ("state", "following"),
    [
        (state, following)
        for state, following in itertools.product(ChildState, ChildState)
        if following not in NEXT[state]
    ],
)
def test_there_are_no_other_ways(state: ChildState, following: ChildState, tmp_path: Path) -> None:
    child = Child(spec(tmp_path), log_level="info", log_format="text")
    child.state = state
    with pytest.raises(AssertionError, match=f"{state.name} -> {following.name}"):
        child.enter(following)


def test_a_process_that_cannot_be_had_is_said_and_leaves_nothing_to_reap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    child = Child(spec(tmp_path / "seen"), log_level="info", log_format="text")
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", none_left)
    with pytest.raises(StartError, match=r"child-1: Resource temporarily .* --pids-limit"):
        child.spawn()
    assert not child.alive
    assert child.control.closed
