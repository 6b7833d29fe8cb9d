"""The check of a whole server, itself checked: on engines without a GPU, and on what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench import gpu_check
from bench.checked_server import gpu_memory_mib
from tests.engine.conformance.subjects import STANDINS, write_model

if TYPE_CHECKING:
    from pathlib import Path


def test_all_of_it_holds_for_the_simulated_engine(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--engine", "sim", "--streams", "16", "--", "--sim-step-ms", "2"]) == 0
    seen = capfd.readouterr().out
    assert "FAIL" not in seen
    assert "16 of 16 hold" in seen
    assert "the engine: told after" in seen


def test_all_of_it_holds_for_trtllm_over_its_stand_in(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path, max_seq_len=2048)
    flags = ["--engine", "trtllm", "--model", str(model), "--served-model-name", "m",
             "--tp_size", "2"]  # fmt: skip
    environment = {"PYTHONPATH": str(STANDINS), "TRTLLM_STANDIN": "generates"}
    rows = gpu_check.check(flags, start_timeout_s=60, environment=environment, streams=16)
    assert [row.check for row in rows if not row.ok] == []
    seen = {row.check: row.seen for row in rows}
    assert "seed is not supported by TensorRT-LLM 1.2.1" in seen["a seed repeats, or is refused"]
    assert seen["a worker is killed: clients are told"].startswith("a rank of 2: told after")


def test_where_there_is_no_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if gpu_memory_mib() is not None:
        pytest.skip("there is one")
    assert gpu_check.main(["--model", "anything"]) == 2
    assert "there is no NVIDIA GPU here" in capsys.readouterr().err


def test_what_does_not_hold_is_said_and_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--engine", "sim", "--", "--no-such-flag"]) == 1
    seen = capfd.readouterr()
    assert "FAIL" in seen.out
    assert "it exited with 2" in seen.out
    assert "--no-such-flag: no such flag" in seen.err
