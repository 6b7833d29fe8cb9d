"""Stands in for trtllm-llmapi-launch, which every rank of a job runs before the command.

The first rank starts the command beside itself, with the launcher's address and key and without
MPI's variables, and serves it; the others serve the first. Like the real one it sends the ranks
home only after a command that ended well.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading

_MPI = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "MPI_", "UCX_", "HYDRA_", "HYDI_", "MPICH_")


def main() -> int:
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
    if rank:
        return _node("worker")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ["TLLM_SPAWN_PROXY_PROCESS"] = "1"
    os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"] = f"tcp://127.0.0.1:{port}"
    os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"] = secrets.token_hex(32)
    os.environ["tllm_mpi_size"] = os.environ.get("PMI_SIZE", "1")  # noqa: SIM112 - its name
    command = threading.Thread(target=_run_command)
    command.start()
    code = _node("leader")
    command.join()
    return code


def _run_command() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_MPI)}
    if subprocess.run(sys.argv[1:], env=clean, check=False).returncode == 0:
        _node("leader", "--action", "stop", environment=clean)


def _node(kind: str, *arguments: str, environment: dict[str, str] | None = None) -> int:
    module = f"tensorrt_llm.nodes.{kind}"
    # PMI_FD is a descriptor that a rank is born with.
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environment, close_fds=False, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
