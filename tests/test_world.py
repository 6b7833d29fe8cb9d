"""What a process makes of the variables that an MPI launcher gives its ranks."""

from __future__ import annotations

import pytest

from fastserve.errors import ConfigError
from fastserve.world import is_launched, refuse_copies, refuse_respawn

LAUNCH = {"TLLM_SPAWN_PROXY_PROCESS": "1"}


@pytest.mark.parametrize(
    ("environ", "launched"),
    [
        pytest.param({}, False, id="by hand"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, True, id="MPICH"),
        pytest.param({"OMPI_COMM_WORLD_RANK": "0"}, True, id="Open MPI"),
        pytest.param({"SLURM_PROCID": "0"}, True, id="Slurm"),
        pytest.param(LAUNCH, True, id="TensorRT-LLM's launcher"),
        pytest.param({"TLLM_LOG_LEVEL": "info"}, False, id="a variable of the library"),
    ],
)
def test_who_is_launched(environ: dict[str, str], *, launched: bool) -> None:
    assert is_launched(environ) is launched


@pytest.mark.parametrize(
    ("environ", "refused"),
    [
        pytest.param({}, False, id="by hand"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, False, id="alone"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "2"}, True, id="the first of two"),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "2"}, True, id="the second of two"),
        pytest.param({"OMPI_COMM_WORLD_RANK": "3"}, True, id="one of some"),
        pytest.param({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, False, id="a batch script"),
        pytest.param({"SLURM_PROCID": "7", "SLURM_NTASKS": "8"}, True, id="a task of a step"),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "2"} | LAUNCH, False, id="by the launcher"),
        pytest.param({"PMI_RANK": ""}, False, id="a variable that says nothing"),
    ],
)
def test_a_server_for_each_rank_is_refused(environ: dict[str, str], *, refused: bool) -> None:
    if refused:
        with pytest.raises(ConfigError, match="trtllm-llmapi-launch"):
            refuse_copies(environ)
    else:
        refuse_copies(environ)


def test_only_the_launchers_ranks_keep_an_engine_from_coming_back() -> None:
    refuse_respawn({"PMI_RANK": "0"})
    with pytest.raises(ConfigError, match=r"engine\.respawn"):
        refuse_respawn(LAUNCH)
