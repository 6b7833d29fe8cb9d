"""Who is measured: fastserve and its peers, and how each is started, found ready, and ended.

The bundled ones simulate an engine that takes `step_ms` for a token of every running request. Those
by choice are what is installed of other projects; `--server NAME=COMMAND` adds any other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
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

from fastserve.load.ask import ask_model
from fastserve.load.build import LoadError
from fastserve.load.cpu import pinned
from fastserve.load.plan import target_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping


_ROOT = Path(__file__).parents[1]
_POLL_S = 0.05
_TERMINATE_TIMEOUT_S = 10.0
_LOG_TAIL_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A command, in which {python}, {port}, {step_ms} and {model} are filled in.

    `needs`: modules and programs without which it is skipped. `paced`: whether its engine takes
    `step_ms`, or has a pace of its own. `frontends` is K, where a server has such a thing.
    """

    name: str
    command: str
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    paced: bool = True
    frontends: int = 1

    def missing(self) -> list[str]:
        """What it needs and is not installed."""
        return [
            name
            for name in self.needs
            if shutil.which(name) is None and importlib.util.find_spec(name) is None
        ]

    def arguments(self, *, port: int, step_ms: float, model: str | None) -> list[str]:
        """The command line. Raises LoadError if it needs a model and there is none."""
        if "{model}" in self.command and model is None:
            raise LoadError(f"{self.name} needs --model")
        values = {"python": sys.executable, "port": port, "step_ms": f"{step_ms:g}", "model": model}
        return [word.format_map(values) for word in shlex.split(self.command)]


def fastserve(*, frontends: int) -> Server:
    """fastserve with so many acceptors and the sim engine.

    Warnings alone are logged, as none of the peers writes a line for each request.
    """
    return Server(
        name=f"fastserve K={frontends}",
        command="{python} -m fastserve --engine sim --sim-step-ms {step_ms} --port {port} "
        f"--frontends {frontends} --sim-max-batch-size 4096 --log-level warning",
        frontends=frontends,
    )


def _peer(name: str, *needs: str) -> Server:
    module = name.replace("-", "_")
    command = f"{{python}} -m bench.peers.{module} --port {{port}} --step-ms {{step_ms}}"
    return Server(name=name, command=command, needs=needs)


BUNDLED = (
    _peer("fastapi-uvicorn", "fastapi", "pydantic", "uvicorn"),
    _peer("starlette-granian", "starlette", "granian"),
    _peer("aiohttp-server", "aiohttp"),
    _peer("raw-uvloop", "uvloop"),
)

BY_CHOICE = (
    Server(
        name="vllm",
        command="vllm serve {model} --host 127.0.0.1 --port {port} --api-server-count 1",
        needs=("vllm",),
        paced=False,
    ),
    Server(
        name="vllm-rust",
        command="vllm serve {model} --host 127.0.0.1 --port {port}",
        needs=("vllm",),
        environment={"VLLM_USE_RUST_FRONTEND": "1"},
        paced=False,
    ),
    Server(
        name="dynamo",
        command='sh -c \'"$0" -m dynamo.mocker --model-path "$1" & '
        'exec "$0" -m dynamo.frontend --http-port "$2"\' {python} {model} {port}',
        needs=("dynamo",),
        # Without etcd: workers find each other through files.
        environment={"DYN_DISCOVERY_BACKEND": "file"},
        paced=False,
    ),
    Server(
        name="llama-server",
        command="llama-server --model {model} --host 127.0.0.1 --port {port} --parallel 64",
        needs=("llama-server",),
        paced=False,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that answers."""

    pid: int
    port: int
    model: str


@contextlib.contextmanager
def running(
    server: Server,
    *,
    step_ms: float,
    model: str | None,
    cores: Collection[int] | None,
    start_timeout_s: float,
    until_models: bool = True,
) -> Iterator[Running]:
    """Start a server on `cores`, wait until it has a model, and end it and all its processes.

    Not `until_models`: do not wait, and know no model. Raises LoadError, with the end of its log,
    if it exits or does not become ready.
    """
    port = _free_port()
    with tempfile.TemporaryFile("w+") as log:
        with pinned(cores):
            process = subprocess.Popen(
                server.arguments(port=port, step_ms=step_ms, model=model),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=_ROOT,
                env=os.environ | dict(server.environment),
                start_new_session=True,
            )
        try:
            served = ""
            if until_models:
                served = _wait_ready(process, port=port, timeout_s=start_timeout_s)
            yield Running(pid=process.pid, port=port, model=served)
        except LoadError as error:
            log.seek(0)
            raise LoadError(f"{server.name}: {error}\n{log.read()[-_LOG_TAIL_CHARS:]}") from error
        finally:
            _end(process)


def _wait_ready(process: subprocess.Popen[bytes], *, port: int, timeout_s: float) -> str:
    target = target_of(f"http://127.0.0.1:{port}")
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            raise LoadError(f"exited with {process.returncode}")
        model = ask_model(target)
        if model is not None:
            return model
        time.sleep(_POLL_S)
    raise LoadError(f"not ready within {timeout_s:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    # Some children make sessions of their own: they are remembered before their parent is gone.
    tree = []
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_TERMINATE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(tree, timeout=_TERMINATE_TIMEOUT_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
