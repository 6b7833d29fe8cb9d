"""What a start refuses, at once and in plain words, and what it shows."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
import time
from typing import TYPE_CHECKING

import gguf
import pytest

from fastserve.engine.model_files import resolve_model
from tests.e2e.harness import Server, failing, wait_until

if TYPE_CHECKING:
    from pathlib import Path

SIM = ("--engine", "sim")
BAR = r"loading the model \[#*\.*\] +(?P<percent>[0-9]+)% (?P<elapsed>[0-9.]+) s"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--frontends", "65"], "server.frontends"),
        (["--frontends", "0"], "server.frontends"),
        (["--frontend", "2"], "--frontends"),
        (["--model", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["--host", "no.such.invalid"], "server.host"),
        (["--config", "/no/such/file.toml"], "/no/such/file.toml"),
        (["--run-directory", "/no/such/place"], "server.run_directory"),
        (["--engine", "gpt"], "llamacpp"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(flags: list[str], words: str) -> None:
    began_s = time.monotonic()
    with failing(*flags) as server:
        assert server.wait_exit() == 2
        assert words in server.log
        assert server.log.count("\n") == 1, server.log
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"not a model at all", "begins with b'not '"), (b"", "is empty"), (b"GGUF, and", "anew")],
)
def test_a_file_that_is_no_model_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with failing("--model", str(path)) as server:
        assert server.wait_exit() == 2
        assert str(path) in server.log
        assert said in server.log
        assert "Traceback" not in server.log


def test_memory_that_does_not_suffice_is_refused_with_what_takes_less() -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is not installed")
    limited = ("prlimit", f"--as={1200 << 20}", sys.executable, "-m", "fastserve")
    server = Server("--frontends", "1", program=limited)
    try:
        assert server.wait_exit() == 2
        assert "insufficient memory" in server.log
        assert "--engine-max-num-seqs" in server.log
        assert "Traceback" not in server.log
        server.assert_nothing_left()
    finally:
        server.kill_everything()


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with failing("--model", str(tmp_path)) as server:
        assert server.wait_exit() == 2
        assert str(tmp_path) in server.log


@pytest.mark.parametrize("accept", ["shared", "reuseport"])
def test_a_busy_port_is_refused_at_once(accept: str) -> None:
    with Server(*SIM, "--accept", accept) as first:
        began_s = time.monotonic()
        with failing(*SIM, "--accept", accept, "--port", str(first.port)) as second:
            assert second.wait_exit() == 2
            assert f"{first.port} is in use" in second.log
            assert "--port" in second.log
        assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("accept", ["shared", "reuseport"])
@pytest.mark.parametrize("frontends", [1, 5])
def test_any_number_of_acceptors_shares_one_port(frontends: int, accept: str) -> None:
    with Server(*SIM, "--frontends", str(frontends), "--accept", accept) as server:
        assert f"http://127.0.0.1:{server.port}/v1" in server.stdout
        assert server.stdout.count("\n") == 1
        titles = server.remember_processes()
        assert sum("fastserve: acceptor" in title for title in titles) == frontends
        assert {"fastserve: supervisor", "fastserve: engine"} <= titles.keys()
        for _ in range(2 * frontends):
            assert server.get("/ready")[0] == 200


def test_a_full_disk_for_the_run_directory_is_said(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may mount a file system that is full")
    full = tmp_path / "full"
    full.mkdir()
    assert os.system(f"mount -t tmpfs -o size=4k,nr_inodes=1 none {full}") == 0
    try:
        with failing(*SIM, "--run-directory", str(full)) as server:
            assert server.wait_exit() == 2
            assert "server.run_directory" in server.log
            assert "No space left" in server.log
    finally:
        os.system(f"umount {full}")


def test_the_port_answers_while_the_model_loads() -> None:
    """Liveness probes need an answer before the model is there, and it must be honest."""
    server = Server("--frontends", "1")
    try:
        port = server.port

        def asked() -> bool:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"GET /ready HTTP/1.0\r\nHost: x\r\n\r\n")
                status = client.makefile("rb").readline()
            assert status.split()[1] in (b"200", b"503"), status
            return status.split()[1] == b"200"

        wait_until(asked)
        with server:
            pass
    finally:
        server.kill_everything()


def test_a_model_whose_chat_template_is_faulty_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "faulty.gguf"
    rewrite_template(path, "{% for message in messages %}{{ message.content")
    with failing(*SIM, "--model", str(path)) as server:
        assert server.wait_exit() == 2
        assert "chat template is faulty" in server.log
        assert "Traceback" not in server.log


def test_progress_is_drawn_over_itself_on_a_terminal_and_taken_away() -> None:
    terminal, theirs = os.openpty()
    # A shell is given the terminal for its stderr, and becomes the server.
    onto = ("sh", "-c", f'exec "$@" 2>{os.ttyname(theirs)}', "sh")
    program = (*onto, sys.executable, "-m", "fastserve")
    try:
        with Server("--frontends", "1", "--log-level", "warning", program=program) as server:
            assert "\x1b" not in server.stdout
            seen = read_all(terminal)
    finally:
        os.close(terminal)
        os.close(theirs)
    before, *drawn, after = seen.split("\r\x1b[K")
    assert (before, after) == ("", ""), "it stands alone in its line, and is gone at the end"
    matches = [re.fullmatch(BAR, line) for line in drawn]
    shown = [(int(found["percent"]), float(found["elapsed"])) for found in matches if found]
    assert len(shown) == len(drawn)
    assert shown == sorted(shown)
    # A start is seen to move also while no weights are read.
    assert len({elapsed_s for _, elapsed_s in shown}) > 3


def read_all(terminal: int) -> str:
    """What has been written to a terminal so far."""
    os.set_blocking(terminal, False)
    text = b""
    with contextlib.suppress(BlockingIOError):
        while more := os.read(terminal, 65_536):
            text += more
    return text.decode()


def test_progress_is_not_shown_where_nobody_looks_unless_that_is_asked_for() -> None:
    with Server(*SIM, "--progress", "on") as server:
        assert "loading the model" in server.log
    with Server(*SIM) as server:
        assert "loading the model" not in server.log
        assert "\x1b" not in server.log


def rewrite_template(path: Path, template: str) -> None:
    """Write the embedded model's vocabulary, without its weights, under another template."""
    source = gguf.GGUFReader(str(resolve_model(None)))
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, field in source.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        value = template if key == "tokenizer.chat_template" else field.contents()
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=sub_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
