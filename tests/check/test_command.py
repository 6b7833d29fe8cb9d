"""`fastserve check`, as it is run: what it finds, and its exit codes."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest

from fastserve.check.findings import Verdict, as_table, fail, ok
from fastserve.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTSERVE_RUN_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("FASTSERVE_PORT", "0")
    return tmp_path


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    return {found["subject"]: found for found in json.loads(capsys.readouterr().out)}


def test_what_would_start_is_well_and_leaves_nothing_behind(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--json"]) == 0
    found = findings(capsys)
    assert Verdict.FAIL not in {one["verdict"] for one in found.values()}
    assert "49152 tokens" in found["model"]["detail"]
    assert "xllamacpp" in found["engine"]["detail"]
    assert list(directory.iterdir()) == []


def test_where_spans_go_is_told_if_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = "http://127.0.0.1:4318/v1/traces"
    assert main(["check", "--json", "--tracing-otlp-endpoint", endpoint]) == 0
    assert endpoint in findings(capsys)["tracing"]["detail"]


def test_a_busy_port_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["check", "--json", "--port", port]) == 2
    found = findings(capsys)
    assert found["port"]["verdict"] == "fail"
    assert port in found["port"]["detail"]
    assert found["model"]["verdict"] == "ok", "the rest is told all the same"


@pytest.mark.parametrize(
    ("flags", "subject", "said"),
    [
        (["--model", "/nowhere.gguf"], "model", "no such file"),
        (["--frontends", "99"], "configuration", "not from 1 to 64"),
        (["--tls-certificate", "/nowhere.pem", "--tls-key", "/k"], "credentials", "/nowhere.pem"),
        (["--run-directory", "/proc"], "run directory", "/proc"),
        (["--engine", "trtllm"], "GPUs", "nvidia-smi"),
    ],
)
def test_what_would_not_start_is_found_and_named(
    flags: list[str],
    subject: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["check", "--json", *flags]) == 2
    found = findings(capsys)[subject]
    assert found["verdict"] == "fail"
    assert said in found["detail"]


def test_a_file_that_is_no_model_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF, but no more")
    assert main(["check", "--json", "--model", str(bad)]) == 2
    assert findings(capsys)["model"]["verdict"] == "fail"


def template(directory: Path, text: str) -> list[str]:
    file = directory / "template.jinja"
    file.write_text(text)
    return ["--chat-template", str(file), "--tool-parser", "hermes"]


@pytest.mark.parametrize(
    ("text", "verdict", "said"),
    [
        ("{{ messages[0].content }}", "warn", "no place for tools"),
        ("{{ messages[0].content }}{{ tools[0].function.name }}", "ok", "template.jinja"),
        ("{{ messages[0].content }}{{ tools[0].nothing.name }}", "fail", "nothing"),
        ("{{ messages[0].content", "fail", "chat template is faulty"),
    ],
)
def test_a_chat_template_is_tried_with_tools_if_there_may_be_some(
    text: str,
    verdict: str,
    said: str,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["check", "--json", *template(directory, text)])
    assert code == (2 if verdict == "fail" else 0)
    found = findings(capsys)["model"]
    assert found["verdict"] == verdict
    assert said in found["detail"]


def test_an_open_address_without_keys_is_worth_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", "--host", "0.0.0.0"]) == 0
    assert findings(capsys)["credentials"]["verdict"] == "warn"


def test_the_table_puts_advice_under_what_it_is_about() -> None:
    assert as_table([ok("port", "free"), fail("model", "none", "--model FILE")]) == (
        "ok    port   free\nfail  model  none\n             -> --model FILE"
    )


def test_help_names_the_flags_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    out = capsys.readouterr().out
    assert "fastserve check" in out
    assert "--json" in out
    assert "--frontends" in out
