"""The machine against what a server wants of it, on machines that are made up."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import stat
from collections import namedtuple
from typing import TYPE_CHECKING

import pytest

from fastserve.check import machine
from fastserve.check.findings import Verdict
from fastserve.config import Config, ServerConfig
from fastserve.config_http import HTTPConfig

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")
TRTLLM = Config(server=ServerConfig(engine="trtllm", model="/model"))
RANKS = Config(server=ServerConfig(dp_size=8))


def test_this_kernel_has_what_is_needed() -> None:
    assert machine.check_kernel().verdict is Verdict.OK


def test_an_old_kernel_is_said_to_be_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    finding = machine.check_kernel()
    assert finding.verdict is Verdict.FAIL
    assert "5.3" in finding.advice


@pytest.mark.parametrize(
    ("frontends", "ranks", "verdict"),
    [(4, 1, Verdict.OK), (5, 1, Verdict.WARN), (2, 4, Verdict.OK), (2, 5, Verdict.WARN)],
)
def test_acceptors_and_ranks_want_processors(
    frontends: int, ranks: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_cpus", lambda: 4)
    config = Config(server=ServerConfig(frontends=frontends, dp_size=ranks))
    assert machine.check_processors(config).verdict is verdict


@pytest.mark.parametrize(("limit", "verdict"), [(1064, Verdict.OK), (1063, Verdict.WARN)])
def test_every_connection_wants_a_descriptor(
    limit: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, limit))
    finding = machine.check_descriptors(Config(http=HTTPConfig(connections_max=1000)))
    assert finding.verdict is verdict
    assert ("ulimit -n 1064" in finding.advice) == (verdict is Verdict.WARN)


@pytest.mark.parametrize(("model_gib", "verdict"), [(1, Verdict.OK), (4, Verdict.WARN)])
def test_a_model_wants_memory(
    model_gib: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 4 * GIB)
    config = Config(server=ServerConfig(frontends=2))
    assert machine.check_memory(config, model_bytes=model_gib * GIB).verdict is verdict


@pytest.mark.parametrize(
    ("config", "free_mib", "advice"),
    [
        pytest.param(Config(), 0, "", id="one process shares nothing"),
        pytest.param(RANKS, 64, "", id="messages of eight ranks fit into what Docker gives"),
        pytest.param(RANKS, 47, "--shm-size=48m", id="and into no less"),
        pytest.param(TRTLLM, 64, "--shm-size=1024m", id="tensors do not"),
    ],
)
def test_shared_memory_matters_where_the_engine_has_ranks(
    config: Config, free_mib: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free_mib << 20))
    finding = machine.check_shared_memory(config)
    assert finding.verdict is (Verdict.WARN if advice else Verdict.OK)
    assert advice in finding.advice
    assert f"{free_mib} MiB free" in finding.detail


def nvidia_smi(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


def test_gpus_are_listed_where_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, "echo 'NVIDIA H200, 143771 MiB, 4 MiB, 580.1'", monkeypatch)
    finding = machine.check_gpus(TRTLLM)
    assert finding.verdict is Verdict.OK
    assert finding.detail == "NVIDIA H200, 143771 MiB, 4 MiB, 580.1"
    assert machine.check_gpus(Config()).detail == "1; not needed by llamacpp"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Failed to initialize NVML' >&2; exit 9", "Failed to initialize NVML"),
        ("true", "nvidia-smi lists none"),
    ],
)
def test_no_gpu_is_a_failure_with_its_reason_where_one_is_needed(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, script, monkeypatch)
    finding = machine.check_gpus(TRTLLM)
    assert finding.verdict is Verdict.FAIL
    assert why in finding.detail


@pytest.mark.parametrize("config", [TRTLLM, RANKS], ids=["trtllm", "ranks"])
def test_mpi_is_a_failure_only_where_it_is_needed(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert machine.check_mpi(Config()).verdict is Verdict.OK
    finding = machine.check_mpi(config)
    assert (finding.verdict, finding.advice) == (Verdict.FAIL, "pip install 'fastserve[mpi]'")


def test_an_mpi_is_asked_what_it_is_and_one_without_its_library_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What mpi4py of PyPI reads (its documentation, "Configuration").
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    finding = machine.check_mpi(RANKS)
    assert finding.verdict is Verdict.FAIL
    assert "/nowhere/libmpi.so" in finding.detail
    assert "\n" not in finding.detail
