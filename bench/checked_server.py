"""A server under examination: its processes, its port, its end, and what it leaves on the GPU."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

EXIT_ENGINE_DEAD = 70
_POLL_S = 0.05
_LEFT_S = 15.0
_ASK_TIMEOUT_S = 120.0
# What a driver gives back late, or another process takes meanwhile.
_MEMORY_SLACK_MIB = 256
_LOG_TAIL_CHARS = 4000


class CheckFailed(Exception):
    """What was seen instead of what should have been."""


class CheckedServer:
    """fastserve with `flags`, on a port of its own. As a context it kills what is left of it."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        environment: Mapping[str, str] | None,
        start_timeout_s: float,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="fastserve-check-")
        self._port_file = Path(self._directory.name) / "port"
        self._log = (Path(self._directory.name) / "log").open("w+")
        self._start_timeout_s = start_timeout_s
        self._seen: dict[int, psutil.Process] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fastserve", "--port", "0", "--port-file", str(self._port_file),
             "--start-timeout-s", f"{start_timeout_s:g}", "--run-directory", self._directory.name,
             "--lane-heartbeat-interval-s", "0.1", *flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | dict(environment or {}),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._remember()
        for process in self._alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()
        self._directory.cleanup()

    # --- as a client sees it ---

    def await_ready(self) -> str:
        """Wait until it serves; say what that took of the GPU. Raises CheckFailed."""
        began_s = time.monotonic()
        before_mib = gpu_memory_mib()
        while not (self._port_file.exists() and self._get("/ready")[0] == 200):
            if self.process.poll() is not None:
                raise CheckFailed(f"it exited with {self.process.returncode}")
            if time.monotonic() - began_s > self._start_timeout_s:
                raise CheckFailed(f"not within {self._start_timeout_s:g} s")
            time.sleep(_POLL_S)
        self._remember()
        memory = (
            "" if before_mib is None else f", {(gpu_memory_mib() or 0) - before_mib} MiB of GPU"
        )
        return f"{len(self._seen)} processes{memory}"

    def client(self) -> Any:  # noqa: ANN401 - only this page and its tests have the client
        import openai  # noqa: PLC0415

        url = f"http://127.0.0.1:{self._port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=_ASK_TIMEOUT_S)

    def stream(self, *, prompt: str, max_tokens: int) -> Iterator[Any]:
        """A completion under way; raises what the client raises."""
        return iter(
            self.client().completions.create(
                model="m",
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0.0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )

    @staticmethod
    def error_of(stream: Iterator[Any]) -> str:
        """Read a stream to its end, which should be an error; return that."""
        import openai  # noqa: PLC0415

        try:
            chunks = sum(1 for _ in stream)
        except (openai.OpenAIError, http.client.HTTPException, OSError) as error:
            return f"{getattr(error, 'code', None)} {error}"
        return f"{chunks} more chunks, and a good end"

    def await_in_engine(self, number: int, *, timeout_s: float) -> None:
        """Wait until the engine has so many requests, by its heartbeats. Raises CheckFailed."""
        began_s = time.monotonic()
        while True:
            health = self._get("/health")[1]
            found = health["num_running"] + health["num_waiting"]
            if found == number:
                return
            if time.monotonic() - began_s > timeout_s:
                raise CheckFailed(f"it has {found} requests after {timeout_s:g} s, not {number}")
            time.sleep(_POLL_S)

    @property
    def _port(self) -> int:
        return int(self._port_file.read_text())

    def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ASK_TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    # --- as the system sees it ---

    def terminate(self) -> None:
        self._remember()
        self.process.send_signal(signal.SIGTERM)

    def kill_worker(self) -> str:
        """Kill one rank, or the engine if it has none here. Returns which it was."""
        self._remember()
        engine = next(one for one in self._seen.values() if "fastserve: engine" in _title(one))
        ranks = [one for one in engine.children(recursive=True) if _is_rank(one)]
        victim = ranks[-1] if ranks else engine
        victim.kill()
        return f"a rank of {len(ranks)}" if ranks else "the engine"

    def await_exit(self, *, timeout_s: float) -> int:
        """Raises CheckFailed if it does not exit in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"it still runs after {timeout_s:g} s") from None

    def nothing_left(self, *, memory_mib: int | None) -> str:
        """No process, no file, no GPU memory but `memory_mib`, which was used before."""
        began_s = time.monotonic()
        while left := self._left(memory_mib):
            if time.monotonic() - began_s > _LEFT_S:
                raise CheckFailed(f"left after {_LEFT_S:g} s: {left}")
            time.sleep(_POLL_S)
        freed = "no GPU to look at" if memory_mib is None else "its GPU memory is free"
        return f"{len(self._seen)} processes are gone, {freed}"

    def log_tail(self) -> str:
        return Path(self._log.name).read_text()[-_LOG_TAIL_CHARS:]

    def _left(self, memory_mib: int | None) -> str:
        left = [f"{one.pid} {_title(one)}" for one in self._alive()]
        left += [one.name for one in Path(self._directory.name).iterdir() if one.name != "log"]
        now_mib = gpu_memory_mib()
        if memory_mib is not None and now_mib is not None:
            extra_mib = now_mib - memory_mib
            left += [f"{extra_mib} MiB of GPU"] if extra_mib > _MEMORY_SLACK_MIB else []
        return ", ".join(left)

    def _remember(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for one in [root, *root.children(recursive=True)]:
                self._seen.setdefault(one.pid, one)

    def _alive(self) -> list[psutil.Process]:
        found = []
        for one in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found


def gpu_memory_mib() -> int | None:
    """What is in use on all GPUs together, or None where there are none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    numbers = [int(line) for line in done.stdout.split() if line.isdecimal()]
    return sum(numbers) if done.returncode == 0 and numbers else None


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()).strip()
    return ""


def _is_rank(process: psutil.Process) -> bool:
    """Whether MPI's launcher has told it a rank: only what computes has one."""
    names = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
    with contextlib.suppress(psutil.Error):
        return any(name in process.environ() for name in names)
    return False
