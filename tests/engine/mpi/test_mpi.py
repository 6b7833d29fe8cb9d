"""Real ranks that are killed, aborted, stopped or raise, at any time: nobody waits for them.

Each test runs an engine in small, in a process of its own, and takes the time from the blow to the
exit of everything. Whether anything is left is seen by a variable that all of it inherits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from fastserve.engine import mpi_library, mpi_shm
from fastserve.engine.mpi import NEXT, MpiSession, SessionState
from fastserve.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PROGRAMS = Path(sys.prefix) / "bin"

RANKS = 3
EXIT_CANNOT_START = 2
EXIT_NOT_IN_ORDER = 3
EXIT_DEAD = 70

# From the blow to the end of everything. A stopped rank is only known by the step it does not
# finish, 1.5 s here, or by the end of the time to start, 3 s.
EXIT_TIMEOUT_S = 8.0
# The kernel tells in milliseconds; the rest is for a busy machine.
DETECTION_TIMEOUT_S = 1.0
DEADLINE_S = 40.0
GONE_TIMEOUT_S = 3.0


@dataclass
class Run:
    """A program that is running or has run, and what its processes have announced."""

    process: subprocess.Popen[bytes]
    ears: socket.socket
    events: list[str] = field(default_factory=list)
    ended_s: float = 0.0

    def listen(self, *, until: Callable[[Run], bool] = lambda _: False) -> None:
        """Take announcements until `until` says so, or the program has ended."""
        give_up_s = time.monotonic() + DEADLINE_S
        with contextlib.closing(select.epoll()) as poll:
            pidfd = os.pidfd_open(self.process.pid)
            poll.register(pidfd, select.EPOLLIN)
            poll.register(self.ears, select.EPOLLIN)
            try:
                while not until(self):
                    assert time.monotonic() < give_up_s, f"hangs; {self.events}"
                    ready = [fd for fd, _ in poll.poll(0.1)]
                    self._take()
                    if pidfd in ready:
                        self.ended_s = time.monotonic()
                        return
            finally:
                os.close(pidfd)

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.events.append(self.ears.recv(4096).decode())

    def heard(self, start: str) -> list[list[str]]:
        """The words after `start` of each announcement that begins so."""
        return [one.split()[len(start.split()) :] for one in self.events if one.startswith(start)]

    def pids(self, phase: str) -> dict[int, int]:
        """Each rank's pid, of those that have come to `phase`."""
        return {int(rank): int(pid) for rank, pid in self.heard(f"phase {phase}")}

    @property
    def code(self) -> int:
        return self.process.wait(timeout=0)

    @property
    def blow_s(self) -> float:
        [[blow_s]] = self.heard("blow")
        return float(blow_s)

    @property
    def detected(self) -> tuple[float, str]:
        """Seconds from the blow to its detection, and what the engine said."""
        [[detected_s, *words]] = self.heard("detected")
        return float(detected_s) - self.blow_s, " ".join(words)


@contextlib.contextmanager
def running(
    *arguments: str, launcher: tuple[str, ...] = (), path: str | None = None
) -> Iterator[Run]:
    """Run a program of this folder in a session of its own. It must leave no process behind."""
    pytest.importorskip("mpi4py", reason="MPI comes with the extra mpi")
    with (
        tempfile.TemporaryDirectory(prefix="fs-mpi-") as folder,
        contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as ears,
    ):
        mark = f"{folder}/ears"
        ears.bind(mark)
        ears.setblocking(False)
        environment = os.environ | {
            "FASTSERVE_TEST_EARS": mark,
            "PYTHONPATH": str(ROOT),
            "PATH": path or f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
        }
        with (Path(folder) / "output").open("wb") as output:
            process = subprocess.Popen(
                [*launcher, sys.executable, str(HERE / arguments[0]), *arguments[1:]],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            run = Run(process, ears)
            yield run
            assert not left(mark), "processes outlive the engine"
            # What nobody had the time to know of, the next job removes.
            memory = mpi_shm.sweep(age_s=0.0)
            known = run.heard("phase load") and not run.heard("a library's")
            assert not memory or not known, "memory outlives its ranks"
        except BaseException:
            print((Path(folder) / "output").read_text(errors="replace")[-4000:])
            raise
        finally:
            for one in bearers(mark):
                one.kill()
            process.kill()
            process.wait()


def bearers(mark: str) -> list[psutil.Process]:
    """The processes that have inherited `mark`, zombies left out: they have no environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FASTSERVE_TEST_EARS") == mark:
                found.append(process)
    return found


def left(mark: str) -> list[psutil.Process]:
    """Those that are still there after a moment: a launcher needs one to see its ranks die."""
    give_up_s = time.monotonic() + GONE_TIMEOUT_S
    while (found := bearers(mark)) and time.monotonic() < give_up_s:
        time.sleep(0.02)
    return found


def launcher(kind: str) -> tuple[str, ...]:
    """A pool is spawned by the program itself; a world is there before. Rank 0 is the engine."""
    return ("mpiexec", "-n", str(RANKS + 1)) if kind == "world" else ()


KINDS = ("pool", "world")
BLOWS = ("killed", "aborted", "stopped", "raises")
PHASES = ("start", "load", "prefill", "decode")

# One of each sort; the others are slow only for being so many.
QUICK = {
    ("killed", "start"), ("killed", "decode"), ("aborted", "load"), ("stopped", "start"),
    ("stopped", "decode"), ("raises", "start"), ("raises", "prefill"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("blow", "phase"),
    [
        pytest.param(
            blow, phase, id=f"{blow}-{phase}",
            marks=() if (blow, phase) in QUICK else pytest.mark.slow,
        )
        for blow in BLOWS
        for phase in PHASES
    ],
)  # fmt: skip
def test_a_struck_rank_takes_the_whole_job_with_it_at_once(
    kind: str, blow: str, phase: str
) -> None:
    with running("engine_program.py", kind, "struck", blow, phase, launcher=launcher(kind)) as run:
        run.listen()

        exit_s = run.ended_s - run.blow_s
        print(f"\n{kind} {blow} {phase}: {exit_s:.3f} s from the blow to the exit")
        assert exit_s < EXIT_TIMEOUT_S
        assert run.code in possible_codes(kind, blow, phase)
        assert_detected(run, kind, blow, phase)


def possible_codes(kind: str, blow: str, phase: str) -> set[int]:
    """MPICH's launcher kills whoever has spawned a rank that dies; mpiexec mixes its ranks' codes.

    A rank of a world that raises before it has joined in exits, and is as dead as a killed one.
    """
    if kind == "world":
        return set(range(1, 256))
    ours = {EXIT_CANNOT_START if phase == "start" else EXIT_DEAD}
    return ours | {-signal.SIGKILL} if blow in ("killed", "aborted") else ours


def assert_detected(run: Run, kind: str, blow: str, phase: str) -> None:
    """What the engine could say, if it was left the time: a launcher may have been quicker."""
    if blow in ("killed", "aborted") or (kind, blow, phase) == ("world", "raises", "start"):
        return
    detected_s, message = run.detected
    match blow, phase:
        case "raises", "start":
            assert "initializer failed" in message
        case "raises", _:
            assert "raised ArithmeticError: the model is not what it was" in message
            assert detected_s < DETECTION_TIMEOUT_S
        case "stopped", "start":
            assert "do not answer" in message
        case "stopped", _:
            rank = 1 if kind == "pool" else 2
            assert f"stopped: MPI rank {rank} (pid {run.pids(phase)[1]} on" in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_nothing_befalls_ends_in_order(kind: str) -> None:
    with running("engine_program.py", kind, "struck", "", "", launcher=launcher(kind)) as run:
        run.listen()

        assert run.code == 0
        assert set(run.pids("decode")) == set(range(RANKS)), "each rank has had its part"


@pytest.mark.parametrize("kind", KINDS)
def test_an_orderly_shutdown_waits_for_every_rank(kind: str, tmp_path: Path) -> None:
    with running(
        "engine_program.py", kind, "late", str(tmp_path), "1.0", "30.0", launcher=launcher(kind)
    ) as run:
        run.listen()

        assert run.code == 0
        assert {one.name for one in tmp_path.iterdir()} == {f"rank-{n}" for n in range(RANKS)}


@pytest.mark.parametrize("kind", KINDS)
def test_an_orderly_shutdown_has_a_deadline(kind: str, tmp_path: Path) -> None:
    with running(
        "engine_program.py", kind, "late", str(tmp_path), "60.0", "0.5", launcher=launcher(kind)
    ) as run:
        run.listen(until=lambda run: len(run.pids("late")) == RANKS)
        at_work_s = time.monotonic()
        run.listen()

        assert run.ended_s - at_work_s < EXIT_TIMEOUT_S
        assert run.code == EXIT_NOT_IN_ORDER or kind == "world"
        assert run.code != 0


def test_a_rank_that_is_killed_ends_an_orderly_shutdown(tmp_path: Path) -> None:
    with running("engine_program.py", "pool", "late", str(tmp_path), "60.0", "60.0") as run:
        run.listen(until=lambda run: len(run.pids("late")) == RANKS)
        killed_s = time.monotonic()
        os.kill(run.pids("late")[1], signal.SIGKILL)
        run.listen()

        assert run.ended_s - killed_s < EXIT_TIMEOUT_S
        assert run.code in (EXIT_NOT_IN_ORDER, -signal.SIGKILL)


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["alone", "with its process group"])
@pytest.mark.parametrize("stopped", [False, True], ids=["ranks at work", "a rank stopped"])
def test_ranks_do_not_outlive_an_engine_that_is_killed(
    kill: Callable[[int, int], None], tmp_path: Path, *, stopped: bool
) -> None:
    with running("engine_program.py", "pool", "late", str(tmp_path), "60.0", "60.0") as run:
        run.listen(until=lambda run: len(run.pids("late")) == RANKS)
        if stopped:
            os.kill(run.pids("late")[1], signal.SIGSTOP)
        kill(run.process.pid, signal.SIGKILL)
        run.listen()

        assert run.code == -signal.SIGKILL


# --- starting ---


def test_the_launcher_beside_the_interpreter_is_found_without_a_path() -> None:
    with running("engine_program.py", "pool", "struck", "", "", path="/usr/bin:/bin") as run:
        run.listen()

        assert run.code == 0


def test_ranks_that_cannot_be_spawned_are_an_error_and_no_wait(tmp_path: Path) -> None:
    """mpi4py's own wait for the pool would have no end."""
    (tmp_path / "mpiexec").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "mpiexec").chmod(0o755)
    path = os.pathsep.join((str(tmp_path), str(PROGRAMS), os.environ["PATH"]))
    with running("engine_program.py", "pool", "struck", "", "start", path=path) as run:
        run.listen()

        assert run.code == EXIT_CANNOT_START
        [[_, *words]] = run.heard("detected")
        assert "MPI" in words


def test_a_world_of_one_is_refused() -> None:
    with running(
        "engine_program.py", "world", "struck", "", "", launcher=("mpiexec", "-n", "1")
    ) as run:
        run.listen()

        assert run.code == EXIT_CANNOT_START
        [[_, *words]] = run.heard("detected")
        assert "mpiexec" in " ".join(words)


def test_a_job_is_not_started_in_a_process_group_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpgrp", lambda: os.getpid() + 1)
    session = MpiSession(2)

    with pytest.raises(StartError, match="a session of its own"):
        session.start()

    assert session.state is SessionState.CLOSED


def test_without_mpi_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)

    with pytest.raises(StartError, match=r"pip install 'fastserve\[mpi\]'"):
        mpi_library.import_mpi()


# --- half-built sessions, and states ---


def never_initialised() -> MpiSession:
    return MpiSession.__new__(MpiSession)


def never_started() -> MpiSession:
    return MpiSession(2)


@pytest.mark.parametrize("build", [never_initialised, never_started])
def test_a_session_that_was_never_started_goes_quietly(build: Callable[[], MpiSession]) -> None:
    session = build()

    assert session.release("somebody thinks that it is dead")
    assert session.shutdown()
    session.abandon("and again")
    assert session.shutdown()
    assert session.state is SessionState.CLOSED
    assert "CLOSED" in repr(session)


def test_every_state_but_the_last_leads_to_the_last() -> None:
    reached = {SessionState.CLOSED}
    while more := {state for state in SessionState if NEXT[state] & reached} - reached:
        reached |= more

    assert reached == set(SessionState) == set(NEXT)
    assert not NEXT[SessionState.CLOSED]


# --- other people's sessions ---


@pytest.mark.parametrize("what", ["session", "all"])
def test_a_released_session_of_a_library_is_never_waited_for(what: str) -> None:
    with running("library_program.py", what) as run:
        run.listen(until=lambda run: bool(run.heard("a library's job has started")))
        started_s = time.monotonic()
        run.listen()

        assert run.code == 0
        assert run.heard("leaving")
        assert run.ended_s - started_s < EXIT_TIMEOUT_S


@pytest.mark.slow
def test_a_session_that_is_not_released_holds_the_interpreter() -> None:
    """What all of this is for: if it no longer holds, the tests above show nothing."""
    with running("library_program.py", "nothing") as run:
        run.listen(until=lambda run: bool(run.heard("leaving")))
        left_s = time.monotonic()
        run.listen(until=lambda _: time.monotonic() - left_s > 3.0)

        assert run.process.poll() is None
        os.killpg(run.process.pid, signal.SIGKILL)
