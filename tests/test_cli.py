"""The command: what it prints, where, and its exit codes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tomllib
import types
from typing import TYPE_CHECKING

import pytest

import fastserve
from fastserve.cli import main
from fastserve.config import Config, ServerConfig
from fastserve.errors import ConfigError, StartError

if TYPE_CHECKING:
    from pathlib import Path

# What a refusal must not wait for, nor `--help`.
SLOW = ("zmq", "tokenizers", "numpy", "uvloop", "orjson", "msgspec", "jinja2", "asyncio")


class Launches:
    """Stands where fastserve.launch does: keeps what it is given, and ends as it is told."""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.ending: int | Exception = 0

    def launch(self, config: Config) -> int:
        self.configs.append(config)
        if isinstance(self.ending, Exception):
            raise self.ending
        return self.ending


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    module = types.ModuleType("fastserve.launch")
    module.__dict__["launch"] = launches.launch
    monkeypatch.setitem(sys.modules, "fastserve.launch", module)
    for name in [name for name in os.environ if name.startswith("FASTSERVE_")]:
        monkeypatch.delenv(name)
    return launches


@pytest.mark.parametrize("code", [0, 3, 70])
def test_a_server_is_launched_with_its_settings_and_its_exit_code_passed_on(
    code: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches.ending = code
    monkeypatch.setenv("FASTSERVE_PORT", "0")
    assert main(["--frontends", "3"]) == code
    assert launches.configs == [Config(server=ServerConfig(frontends=3, port=0))]


def test_without_argv_the_arguments_of_the_process_count(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fastserve", "--port", "1"])
    assert main() == 0
    assert launches.configs == [Config(server=ServerConfig(port=1))]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--frontends", "65"], ["server.frontends: 65 is not from 1 to 64 (from --frontends)"]),
        (["--port"], ["--port: expected one argument"]),
        (["--config", "/nowhere/a.toml"], ["/nowhere/a.toml: No such file or directory"]),
        (["--prot", "1", "--port", "x"], ["--prot: no such flag; did you mean --port?",
                                          'server.port: "x" is not a whole number (from --port)']),
        (["--print-config", "--port=x"], ['server.port: "x" is not a whole number (from --port)']),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_said_on_stderr_before_anything_starts(
    argv: list[str], said: list[str], launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", [f"fastserve: {line}" for line in said])
    assert launches.configs == []


@pytest.mark.parametrize(
    ("error", "code"),
    [(StartError("127.0.0.1:80: permission denied"), 1), (ConfigError("server.host: unknown"), 2)],
)
def test_a_start_that_fails_is_said_in_a_line(
    error: Exception, code: int, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    launches.ending = error
    assert main([]) == code
    assert capsys.readouterr().err == f"fastserve: {error}\n"


def test_a_bug_is_not_mistaken_for_a_wrong_setting(launches: Launches) -> None:
    launches.ending = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        main([])


@pytest.mark.parametrize(
    "argv", [["--help"], ["-h"], ["--port", "x", "--help"], ["--zzzz", "--help"]], ids=" ".join
)
def test_help_comes_first(
    argv: list[str], launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: fastserve")
    assert "[http]:" in out
    assert "FASTSERVE_HTTP_BODY_BYTES_MAX" in out
    assert err == ""
    assert launches.configs == []


def test_version(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fastserve {fastserve.__version__}\n"


def test_print_config_shows_what_would_hold(
    launches: Launches,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[sim]\nstep_ms = 5\n")
    monkeypatch.setenv("FASTSERVE_LOG_LEVEL", "debug")
    assert main(["--config", str(path), "--print-config", "--port", "1"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert (printed["sim"]["step_ms"], printed["log"]["level"], printed["server"]["port"]) == (
        5.0,
        "debug",
        1,
    )
    assert launches.configs == []


def python(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if "FASTSERVE_" not in name}
    return subprocess.run(
        [sys.executable, *words],
        env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )


def test_the_package_runs_as_the_command() -> None:
    ended = python("-m", "fastserve", "--port", "x")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == 'fastserve: server.port: "x" is not a whole number (from --port)\n'


def test_help_and_refusals_import_nothing_slow() -> None:
    program = (
        "import sys; from fastserve.cli import main; main(['--help']); main(['--port', 'x']);"
        f"sys.exit(' '.join(name for name in {SLOW} if name in sys.modules))"
    )
    ended = python("-c", program)
    # sys.exit("") is a failure with nothing to say: 1, and the refusal alone on stderr.
    assert ended.stderr.splitlines() == [
        'fastserve: server.port: "x" is not a whole number (from --port)',
        "",
    ]


def test_help_is_there_at_once() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert python("-m", "fastserve", "--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # 0.08 on a machine of 2026, of which half is the interpreter's.
    assert used_s < 0.3


def test_help_into_a_closed_pipe_is_no_failure() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = python("-m", "fastserve", "--help", stdout=writer)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_another_command_gets_its_own_arguments_and_help_lists_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[list[str]] = []
    module = types.ModuleType("fastserve.load.command")

    def command(argv: list[str]) -> int:
        got.append(argv)
        return 7

    module.__dict__["main"] = command
    monkeypatch.setitem(sys.modules, "fastserve.load.command", module)
    assert main(["bench", "--url", "x"]) == 7
    assert got == [["--url", "x"]]
    assert main(["--help"]) == 0
    assert "fastserve bench" in capsys.readouterr().out


def test_a_word_that_is_no_command_is_answered_with_the_one_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bnech"]) == 2
    assert 'fastserve: "bnech": neither a flag nor a command; did you mean bench?' in (
        capsys.readouterr().err
    )
