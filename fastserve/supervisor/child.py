"""One child process: its states, and the verbs that move it between them.

    STARTING -> RUNNING -> DRAINING -> STOPPING -> EXITED

A verb does one thing: spawn starts it, drain asks it to finish, terminate tells it to stop (TERM),
kill ends it and its process group (KILL), reap collects its exit code. Knows no policy: when to use
which verb is supervisor.py's.
"""

from __future__ import annotations

import contextlib
import enum
import multiprocessing
import os
import signal
import sys
import time
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from fastserve.control import ControlSocket, Drain
from fastserve.errors import StartError
from fastserve.process import Identity, enter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.context import SpawnProcess

# What a launcher sets to tell a process which MPI rank it is. A child that is no rank and still
# carries it would join, or break, somebody else's MPI world.
_MPI_PREFIXES = (
    "OMPI_", "PMIX_", "PMI_", "SLURM_", "UCX_", "I_MPI_", "HYDRA_", "HYDI_", "MPICH_",
    "MPI_LOCAL", "MV2_", "CRAY_", "KMP_", "TLLM_SPAWN_PROXY_PROCESS", "tllm_mpi_size",
)  # fmt: skip


class ChildState(enum.Enum):
    STARTING = enum.auto()  # spawned; has not said Ready
    RUNNING = enum.auto()
    DRAINING = enum.auto()  # told to finish what it has and take no more
    STOPPING = enum.auto()  # sent TERM or KILL
    EXITED = enum.auto()  # reaped; its exit code is known


NEXT = {
    ChildState.STARTING: {
        ChildState.RUNNING, ChildState.DRAINING, ChildState.STOPPING, ChildState.EXITED,
    },
    ChildState.RUNNING: {ChildState.DRAINING, ChildState.STOPPING, ChildState.EXITED},
    ChildState.DRAINING: {ChildState.STOPPING, ChildState.EXITED},
    ChildState.STOPPING: {ChildState.STOPPING, ChildState.EXITED},
    ChildState.EXITED: {ChildState.STARTING},  # by respawn, as a new incarnation
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What a child is. `arguments` are made anew for each incarnation, which counts from 0.

    `essential`: its exit stops the server. `own_session`: it leads a session of its own, so that
    what it starts is killed with it. `keep_mpi`: it may see the MPI launcher's variables.
    """

    name: str
    title: str
    target: str
    arguments: Callable[[int], object]
    essential: bool = False
    own_session: bool = False
    keep_mpi: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A ChildSpec come alive. `entered_s`: since when it is in its state; `exited_s`: when its
    incarnations exited (monotonic). `failure`: why it says that it cannot become ready; `crash`:
    the exception that it says escaped it."""

    def __init__(self, spec: ChildSpec, *, log_level: str, log_format: str) -> None:
        self.spec = spec
        self.state = ChildState.EXITED
        self.entered_s = 0.0
        self.incarnation = -1
        self.exit_code: int | None = None
        self.exited_s: list[float] = []
        self.failure = ""
        self.crash = ""
        self.last_words = ""
        self._log_level = log_level
        self._log_format = log_format

    def __repr__(self) -> str:
        return f"<{self.spec.name} {self.state.name} incarnation={self.incarnation}>"

    @property
    def alive(self) -> bool:
        return self.state is not ChildState.EXITED

    @property
    def untold(self) -> bool:
        """Whether it is alive and has not been told to end."""
        return self.state in (ChildState.STARTING, ChildState.RUNNING)

    def spawn(self) -> None:
        """Start the next incarnation. Raises StartError where the system has no process for it."""
        self.enter(ChildState.STARTING)
        self.incarnation += 1
        self.exit_code = None
        self.failure = self.crash = self.last_words = ""
        self.control, theirs = ControlSocket.pair()
        identity = Identity(
            name=self.spec.name,
            title=self.spec.title,
            target=self.spec.target,
            supervisor_pid=os.getpid(),
            own_session=self.spec.own_session,
            log_level=self._log_level,
            log_format=self._log_format,
        )
        self._process: SpawnProcess = multiprocessing.get_context("spawn").Process(
            target=enter,
            name=self.spec.name,
            args=(identity, theirs, self.spec.arguments(self.incarnation)),
        )
        try:
            with _environment(self.spec), _without_main():
                self._process.start()
        except OSError as error:
            self.enter(ChildState.EXITED)
            self.control.close()
            raise StartError(
                f"cannot start the process {self.spec.name}: {error.strerror}; too low a limit "
                "of processes (ulimit -u, --pids-limit), open files or memory?"
            ) from error
        finally:
            theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.pidfd: int = os.pidfd_open(self.pid)

    def drain(self, *, timeout_s: float, whole_server: bool) -> None:
        """Ask it to finish what it has within `timeout_s`, and exit."""
        if self.state in (ChildState.STARTING, ChildState.RUNNING):
            self.enter(ChildState.DRAINING)
            self.control.send(Drain(timeout_s, whole_server))

    def terminate(self) -> None:
        """Tell it to stop now, cleanly."""
        self.enter(ChildState.STOPPING)
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and everybody in its session: a dead leader may leave ranks behind."""
        self.enter(ChildState.STOPPING)
        self._kill_group()
        self._signal(signal.SIGKILL)

    def reap(self, *, now_s: float) -> int:
        """Collect the exit code of a process that has exited (its pidfd is readable)."""
        # Before the leader is reaped: afterwards its number may belong to another group.
        self._kill_group()
        self._process.join()
        code = self._process.exitcode
        assert code is not None, "reap() is for a process that has exited"
        self.enter(ChildState.EXITED)
        self.exit_code = code
        self.exited_s.append(now_s)
        self._process.close()
        self.control.close()
        os.close(self.pidfd)
        return code

    def enter(self, state: ChildState) -> None:
        """Move to `state`, which must be next to the present one."""
        assert state in NEXT[self.state], f"{self.spec.name}: {self.state.name} -> {state.name}"
        self.state = state
        self.entered_s = time.monotonic()

    def _signal(self, number: int) -> None:
        # Starting any child makes multiprocessing reap those that have exited: reap() is yet to
        # come then, and there is nobody to signal.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def _kill_group(self) -> None:
        """Kill whoever is in its session: MPI's daemons put ranks into process groups of their own.

        Its pid is not given anew while it is not reaped, and so the session's number is its own.
        """
        if not self.spec.own_session:
            return
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(pid) == self.pid and pid != self.pid:
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _environment(spec: ChildSpec) -> Iterator[None]:
    """Give the process about to be spawned its environment. The supervisor has one thread."""
    before = dict(os.environ)
    if not spec.keep_mpi:
        for name in before:
            if name.startswith(_MPI_PREFIXES):
                del os.environ[name]
    os.environ.update(spec.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide __main__: multiprocessing would run it again in the child, which has no use for it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def reap_orphans(*, ours: set[int]) -> None:
    """As PID 1 we inherit orphans. Collect whoever has exited, up to the first of `ours`: that one
    is reaped by its pidfd, and the next SIGCHLD brings us back."""
    while os.getpid() == 1:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid in ours:
            return
        os.waitpid(info.si_pid, os.WNOHANG)
