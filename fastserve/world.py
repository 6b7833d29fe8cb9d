"""What an MPI launcher has made of this process, by the variables it gives each of its ranks.

A server is one supervisor, whatever number of ranks its engine has. Under trtllm-llmapi-launch the
launcher's first rank starts us, and the others serve the library; the one process that attaches to
them is the engine, so no other child may see the launcher's address and key.

Reads variables and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

# What trtllm-llmapi-launch sets for the command that it starts, once in a job.
TRTLLM_LAUNCH = "TLLM_SPAWN_PROXY_PROCESS"

# Open MPI, MPICH and its kin, PMIx, Slurm. Slurm sets its own in batch scripts as well, where they
# say nothing of how many of us there are.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started us, for the engine to be a rank or to attach to ranks."""
    return TRTLLM_LAUNCH in environ or any(name in environ for name in _RANKS)


def refuse_copies(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a launcher starts as many servers as there are ranks."""
    rank = max((_number(environ, name) for name in _RANKS), default=0)
    size = max((_number(environ, name) for name in _SIZES), default=0)
    if TRTLLM_LAUNCH not in environ and (rank > 0 or size > 1):
        raise ConfigError(
            f"started as rank {rank} of an MPI job, which would be a server for each rank: put "
            "trtllm-llmapi-launch before fastserve, and its first rank starts one server for all"
        )


def refuse_respawn(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where an engine that died cannot be started again by itself."""
    if TRTLLM_LAUNCH in environ:
        raise ConfigError(
            "engine.respawn: under trtllm-llmapi-launch the ranks serve one engine, and end with "
            "it; have the job started again instead"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else 0
