"""`fastserve top` and a real server: once, as JSON, live in a terminal, and without a server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from fastserve.cli import main
from fastserve.top.figures import figures
from fastserve.top.scrape import NotReached, Server
from fastserve.top.view import screen, spark
from tests.e2e.harness import DEADLINE_S
from tests.e2e.harness import Server as Fastserve

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "a-key-of-top"


@pytest.fixture(scope="module")
def server() -> Iterator[Fastserve]:
    with Fastserve(
        "--frontends", "3", "--engine", "sim", "--sim-step-ms", "5", "--api-key", KEY,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def test_once_as_json_tells_what_was_asked_of_the_server(
    server: Fastserve, capsys: pytest.CaptureFixture[str]
) -> None:
    client = server.client()
    client.api_key = KEY
    client.completions.create(model=client.models.list().data[0].id, prompt="x", max_tokens=5)
    assert main(["top", "--url", server.url, "--once", "--json", "--interval-s", "0.2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "ready"
    assert found["requests_total"] >= 2
    assert [one["lane"] for one in found["acceptors"]] == ["0", "1", "2"]
    assert found["window_s"] >= 0.2


def test_rates_and_percentiles_are_of_the_time_between_two_looks(server: Fastserve) -> None:
    client = server.client()
    client.api_key = KEY
    watched = Server(server.url, api_key=KEY, timeout_s=DEADLINE_S)
    before = watched.scrape()
    model = client.models.list().data[0].id
    for _ in client.completions.create(model=model, prompt="x", max_tokens=40, stream=True):
        pass
    found = figures(before, watched.scrape())
    assert found.generation_tokens_per_s * found.window_s == pytest.approx(40)
    # Steps of 5 ms, on a machine that may be busy.
    assert 2 < found.itl_ms[0.5] < 500
    assert found.ttft_ms[0.5] > 0


def test_once_as_text_is_a_screen(server: Fastserve, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", server.url, "--once", "--interval-s", "0.1"]) == 0
    out = capsys.readouterr().out
    for word in ("ready", "tokens/s", "first token", "acceptor", "KV cache"):
        assert word in out


def test_live_in_a_terminal_until_told_to_stop(server: Fastserve) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fastserve", "top", "--url", server.url, "--interval-s", "0.1"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    seen = b""
    give_up_s = time.monotonic() + DEADLINE_S
    while seen.count(b"tokens/s") < 3 and time.monotonic() < give_up_s:
        if select.select([ours], [], [], 0.1)[0]:
            seen += os.read(ours, 65536)
    assert seen.count(b"tokens/s") >= 3, "it is drawn again and again"
    process.send_signal(signal.SIGINT)
    while select.select([ours], [], [], DEADLINE_S)[0]:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    assert process.wait(DEADLINE_S) == 0
    os.close(ours)
    assert b"\x1b[?1049l" in seen, "the terminal is as it was"
    assert b"Traceback" not in seen


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9", "refused"),
        ("http://fastserve.invalid:1", "fastserve.invalid"),
    ],
)
def test_a_server_that_is_not_there_is_said(
    url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--url", url, "--once"]) == 1
    assert said in capsys.readouterr().err


def test_a_wrong_key_is_said_with_what_to_do(server: Fastserve) -> None:
    with pytest.raises(NotReached, match="401 Unauthorized; give the key in OPENAI_API_KEY"):
        Server(server.url, api_key="wrong", timeout_s=DEADLINE_S).scrape()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://:80"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is wanted"):
        Server(url, api_key=None, timeout_s=1.0)


def test_a_gone_server_leaves_the_last_figures_on_the_screen(server: Fastserve) -> None:
    watched = Server(server.url, api_key=KEY, timeout_s=DEADLINE_S)
    found = figures(watched.scrape(), watched.scrape())
    console = Console(width=110, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(found, url=server.url, history=[1.0, 2.0], problem="it is gone"))
    console.file.close()
    text = console.export_text()
    assert "it is gone" in text
    assert re.search(r"acceptor +connections", text)


def test_bars_show_the_last_values_against_the_highest() -> None:
    assert spark([0.0, 50.0, 100.0], width=2) == "▅█"
    assert spark([], width=5) == ""
    assert spark([0.0, 0.0], width=5) == "▁▁"
