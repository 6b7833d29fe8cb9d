"""A real server under test: started as users start it, watched, and checked to leave nothing.

Nothing here knows the server's insides: it has the command, the port, signals, and /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import openai
import orjson
import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

# A generous bound for anything that a healthy server does, on a slow and busy machine.
DEADLINE_S = 60.0


def wait_until(condition: Callable[[], Any], *, deadline_s: float = DEADLINE_S) -> Any:
    """Return the first true value of `condition`; fail when none comes in time."""
    give_up_s = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < give_up_s, f"not within {deadline_s} s: {condition}"
        time.sleep(0.005)


class Server:
    """`fastserve` with some flags, in a directory of its own. Use as a context.

    `program`: what is started, if not the installed package; with `bare`, `environment` is all of
    its environment.
    """

    def __init__(
        self,
        *flags: str,
        environment: dict[str, str] | None = None,
        program: tuple[str, ...] = (sys.executable, "-m", "fastserve"),
        bare: bool = False,
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="fs-test-")
        self.directory = Path(self._scratch.name)
        self.run_parent = self.directory / "run"
        self.run_parent.mkdir()
        self.port_file = self.directory / "port"
        self._log = (self.directory / "log").open("w+")
        self._stdout = (self.directory / "stdout").open("w+")
        self.command = [
            *program, "--port", "0", "--port-file", str(self.port_file),
            "--run-directory", str(self.run_parent), *flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            self.command,
            stdout=self._stdout,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            env=({} if bare else dict(os.environ)) | (environment or {}),
        )
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self.process.poll() is None:
                self.remember_processes()
                self.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(DEADLINE_S)
            if error is None:
                self.assert_nothing_left()
            else:
                print(self.log)
        finally:
            self.kill_everything()

    # ---- what a user sees

    @property
    def port(self) -> int:
        def read() -> int:
            assert self.process.poll() is None, f"exited {self.process.returncode}: {self.log}"
            return int(self.port_file.read_text()) if self.port_file.exists() else 0

        return int(wait_until(read))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    @property
    def stdout(self) -> str:
        return Path(self._stdout.name).read_text()

    def wait_ready(self, *, deadline_s: float = DEADLINE_S) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"exited {self.process.returncode}: {self.log}"
            return "fastserve is ready" in self.stdout

        wait_until(ready, deadline_s=deadline_s)
        self.remember_processes()

    def client(self, **options: Any) -> openai.OpenAI:
        given: dict[str, Any] = {"max_retries": 0, "timeout": DEADLINE_S} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **given)

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """GET a path; return status and JSON."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=DEADLINE_S) as answer:
                return answer.status, orjson.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, orjson.loads(error.read())

    def num_in_engine(self) -> int:
        """How many requests the engine has, running or waiting, by its last heartbeat."""
        _, body = self.get("/health")
        return int(body["num_running"] + body["num_waiting"])

    # ---- what ps sees

    def remember_processes(self) -> dict[str, psutil.Process]:
        """Return the process tree by title, and remember it for the end."""
        tree: dict[str, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    self._seen[process.pid] = process
                    tree[" ".join(process.cmdline()).strip()] = process
        return tree

    def find(self, title: str) -> psutil.Process:
        """Return the process titled `fastserve: {title}`."""
        found: psutil.Process = wait_until(
            lambda: self.remember_processes().get(f"fastserve: {title}")
        )
        return found

    def wait_exit(self, *, deadline_s: float = DEADLINE_S) -> int:
        self.remember_processes()
        return self.process.wait(deadline_s)

    def assert_nothing_left(self) -> None:
        """No process, port, run directory, port file or named shared memory outlives a server."""
        wait_until(lambda: not self._alive(), deadline_s=10.0)
        assert list(self.run_parent.iterdir()) == []
        assert not self.port_file.exists()
        assert not [name for name in os.listdir("/dev/shm") if "fastserve" in name]

    def kill_everything(self) -> None:
        for process in self._alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()
        self._stdout.close()
        self._scratch.cleanup()

    def _alive(self) -> list[psutil.Process]:
        # psutil compares start times too, so a number that was given anew is not taken for ours.
        return [
            process
            for process in self._seen.values()
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]


@contextlib.contextmanager
def failing(*flags: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A server that is not expected to become ready."""
    server = Server(*flags, environment=environment)
    try:
        yield server
        server.assert_nothing_left()
    finally:
        server.kill_everything()
