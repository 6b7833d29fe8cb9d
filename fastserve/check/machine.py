"""What this machine has, beside what a server with these settings wants."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.check.findings import fail, ok, warn
from fastserve.engine.cpus import available_cpus

if TYPE_CHECKING:
    from fastserve.check.findings import Finding
    from fastserve.config import Config

_GIB = 1 << 30
_MIB = 1 << 20
# Beside its connections: its share of listeners, lanes, logs and the board.
_OWN_DESCRIPTORS = 64
# What an acceptor holds before its first connection.
_ACCEPTOR_BYTES = 64 * _MIB
# The ranks of an engine pass tensors and messages through it; containers get 64 MiB by default.
_SHARED_MEMORY_BYTES_MIN = _GIB
_NVIDIA_SMI_TIMEOUT_S = 10.0
_CGROUP = Path("/sys/fs/cgroup")


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
    detail = f"{processors} for {frontends} acceptors and the engine"
    if frontends > processors:
        return warn("processors", detail, "more acceptors than processors only take turns")
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
    available = memory_available()
    needed = model_bytes + config.server.frontends * _ACCEPTOR_BYTES
    detail = f"{available / _GIB:.1f} GiB for about {needed / _GIB:.1f} GiB before any request"
    if needed > available:
        return warn("memory", detail, "a smaller model, fewer acceptors, or more memory")
    return ok("memory", detail)


def memory_available(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be had: the machine's, or the control group's where that is less."""
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(rows["MemAvailable"].split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        return available if limit == "max" else min(available, int(limit) - used)
    except (OSError, ValueError):
        return available


def check_shared_memory(config: Config, *, path: str = "/dev/shm") -> Finding:  # noqa: S108
    """The memory that MPI and NCCL share between the ranks of an engine."""
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return warn("shared memory", f"{path}: {error.strerror}", f"mount a tmpfs at {path}")
    detail = f"{free / _MIB:,.0f} MiB free in {path}"
    if uses_mpi(config) and free < _SHARED_MEMORY_BYTES_MIN:
        return warn("shared memory", detail, "docker run --ipc=host, or --shm-size=1g")
    return ok("shared memory", detail)


def check_mpi(config: Config) -> Finding:
    """Whether mpi4py is there; nothing is initialised, which can only be done once."""
    found = importlib.util.find_spec("mpi4py") is not None
    detail = f"mpi4py {importlib.metadata.version('mpi4py')}" if found else "mpi4py is not there"
    if uses_mpi(config) and not found:
        return fail("MPI", f"{detail}, and the engine needs it", "pip install 'fastserve[mpi]'")
    return ok("MPI", detail if uses_mpi(config) else f"{detail}; not needed by this engine")


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
    return config.server.engine == "trtllm"


def _gpus() -> tuple[list[str], str]:
    """Each GPU in a line, or why there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi is not there"
    query = ["--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(  # noqa: S603 - a fixed command
            [program, *query],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {error}"
    if told.returncode:
        return [], f"nvidia-smi: {(told.stdout + told.stderr).strip()}"
    return told.stdout.strip().splitlines(), "nvidia-smi lists none"
