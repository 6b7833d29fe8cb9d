"""What is refused before the first process, in words that say what to do."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fastserve.errors import ConfigError
from fastserve.launch import check_model, check_tracing, raise_descriptor_limit

ENDPOINT = "http://127.0.0.1:4318/v1/traces"


@pytest.mark.parametrize("missing", [None, ModuleNotFoundError("opentelemetry")])
def test_spans_need_the_extra(
    monkeypatch: pytest.MonkeyPatch, missing: ModuleNotFoundError | None
) -> None:
    def find_spec(name: str) -> None:
        if missing is not None:
            raise missing  # as for a module whose package is not there

    check_tracing(ENDPOINT)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError, match=r"pip install 'fastserve\[otel\]'"):
        check_tracing(ENDPOINT)
    check_tracing(None)


def test_a_model_that_is_not_there_is_not_downloaded() -> None:
    with pytest.raises(ConfigError, match=r"meta-llama/Llama-3: no such .* nothing is downloaded"):
        check_model("meta-llama/Llama-3")
    check_model(None)


def test_a_model_may_be_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.gguf").touch()
    check_model("~/model.gguf")
    with pytest.raises(ConfigError, match="~nobody-of-this-name"):
        check_model("~nobody-of-this-name/m.gguf")


def test_a_model_that_may_not_be_read_is_said_to_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    path = tmp_path / "model.gguf"
    path.touch()
    # Root may read everything, so the system is spoken for.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=f"user {os.geteuid()} may not read it"):
        check_model(str(path))
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ConfigError, match=r"model.gguf: Permission denied"):
        check_model(str(path))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((1024, 4096), (4096, 4096), id="what may be had is taken"),
        pytest.param((1024, 1 << 30), (1 << 20, 1 << 30), id="within reason"),
        pytest.param((1 << 21, 1 << 30), (1 << 21, 1 << 30), id="and never less than before"),
        pytest.param((72, 72), (72, 72), id="the least"),
    ],
)
def test_the_limit_of_open_files_is_raised(
    before: tuple[int, int], after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    raise_descriptor_limit(frontends=2)
    assert limits == [after]


def test_too_few_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (71, 71))
    with pytest.raises(ConfigError, match=r"71 open files are too few.* ulimit -n"):
        raise_descriptor_limit(frontends=2)


@pytest.mark.parametrize("package", ["llguidance", "numpy"])
def test_a_package_of_the_engine_that_is_not_installed_is_named_with_its_extra(
    package: str,
) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None;"
        "from fastserve.cli import main; sys.exit(main(['check', '--port', '0']))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert told.returncode == 2, told.stderr
    assert f"{package} is not installed: pip install 'fastserve[cpu]'" in told.stdout
