"""What this machine has, beside what a server with these settings wants."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from fastserve.check.findings import fail, ok, warn
from fastserve.engine.cpus import available_cpus, available_memory_bytes

if TYPE_CHECKING:
    from fastserve.check.findings import Finding
    from fastserve.config import Config

_GIB = 1 << 30
_MIB = 1 << 20
# Beside its connections: its share of listeners, lanes, logs and the board.
_OWN_DESCRIPTORS = 64
# What an acceptor holds before its first connection.
_ACCEPTOR_BYTES = 64 * _MIB
# What NCCL and MPI want of it for tensors; containers get 64 MiB by default.
_TENSORS_SHARED_BYTES = _GIB
# What MPI takes of it for messages, for each rank: 5.3 MiB with MPICH 5.
_RANK_SHARED_BYTES = 6 * _MIB
_PROGRAM_TIMEOUT_S = 10.0


def check_kernel() -> Finding:
    """pidfd_open came with Linux 5.3, memfd_create with 3.17."""
    subject, detail = "kernel", f"{platform.system()} {platform.release()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("fastserve-check"))
    except (AttributeError, OSError) as error:
        return fail(subject, f"{detail}: {error}", "Linux 5.3 or newer, with pidfd and memfd")
    return ok(subject, detail)


def check_processors(config: Config) -> Finding:
    """Acceptors beside an engine that has processors of its own."""
    processors, frontends = available_cpus(), config.server.frontends
    ranks = config.server.dp_size
    engine = f"{ranks} ranks" if ranks > 1 else "the engine"
    detail = f"{processors} for {frontends} acceptors and {engine}"
    if frontends > processors:
        return warn("processors", detail, "more acceptors than processors only take turns")
    if ranks > processors:
        return warn("processors", detail, "more ranks than processors only take turns")
    return ok("processors", detail)


def check_descriptors(config: Config) -> Finding:
    """The hard limit: the soft one is raised to it at the start."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.http.connections_max + _OWN_DESCRIPTORS
    detail = f"at most {hard} open files for http.connections_max = {config.http.connections_max}"
    if hard < needed:
        return warn(
            "descriptors", detail, f"ulimit -n {needed} (or LimitNOFILE=, or --ulimit nofile=)"
        )
    return ok("descriptors", detail)


def check_memory(config: Config, *, model_bytes: int) -> Finding:
    """The model's file, which is mapped, and every acceptor's own."""
    available = available_memory_bytes()
    needed = model_bytes + config.server.frontends * _ACCEPTOR_BYTES
    detail = f"{available / _GIB:.1f} GiB for about {needed / _GIB:.1f} GiB before any request"
    if needed > available:
        return warn("memory", detail, "a smaller model, fewer acceptors, or more memory")
    return ok("memory", detail)


def check_shared_memory(config: Config, *, path: str = "/dev/shm") -> Finding:  # noqa: S108
    """The memory that MPI and NCCL share between the ranks of an engine."""
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return warn("shared memory", f"{path}: {error.strerror}", f"mount a tmpfs at {path}")
    detail = f"{free / _MIB:,.0f} MiB free in {path}"
    needed = _shared_bytes(config)
    if free < needed:
        advice = f"docker run --ipc=host, or --shm-size={needed // _MIB}m"
        return warn("shared memory", f"{detail}, for {needed // _MIB} MiB", advice)
    return ok("shared memory", detail)


def check_mpi(config: Config) -> Finding:
    """Whether there is an MPI, and a library behind it: asked in a process of its own, since it
    can be initialised only once, and may end the process that tries."""
    found = importlib.util.find_spec("mpi4py") is not None
    detail = f"mpi4py {importlib.metadata.version('mpi4py')}" if found else "mpi4py is not there"
    if not uses_mpi(config):
        return ok("MPI", f"{detail}; not needed by this engine")
    advice = "pip install 'fastserve[mpi]'"
    if not found:
        return fail("MPI", f"{detail}, and the engine needs it", advice)
    library, why_not = told_by(
        [sys.executable, "-c", "from fastserve.engine.mpi_library import version; print(version())"]
    )
    return ok("MPI", f"{detail}, {library}") if library else fail("MPI", why_not, advice)


def check_gpus(config: Config) -> Finding:
    """What nvidia-smi tells, where the engine runs on GPUs."""
    gpus, why_not = _gpus()
    if config.server.engine != "trtllm":
        return ok("GPUs", f"{len(gpus)}; not needed by {config.server.engine}")
    if not gpus:
        return fail("GPUs", why_not, "trtllm needs NVIDIA GPUs: docker run --gpus all")
    return ok("GPUs", "; ".join(gpus))


def uses_mpi(config: Config) -> bool:
    """Whether the engine has ranks that speak over MPI."""
    return config.server.engine == "trtllm" or config.server.dp_size > 1


def _shared_bytes(config: Config) -> int:
    if config.server.engine == "trtllm":
        return _TENSORS_SHARED_BYTES
    return _RANK_SHARED_BYTES * config.server.dp_size if config.server.dp_size > 1 else 0


def _gpus() -> tuple[list[str], str]:
    """Each GPU in a line, or why there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi is not there"
    query = ["--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    told, why_not = told_by([program, *query])
    return told.splitlines(), f"nvidia-smi: {why_not}" if why_not else "nvidia-smi lists none"


def told_by(command: list[str]) -> tuple[str, str]:
    """What a program says on stdout, or why it says nothing."""
    try:
        told = subprocess.run(  # noqa: S603 - a fixed command
            command, capture_output=True, text=True, timeout=_PROGRAM_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if told.returncode:
        said = (told.stdout + told.stderr).strip() or f"exit code {told.returncode}"
        return "", said.splitlines()[-1]
    return told.stdout.strip(), ""
