"""The small application, as a process: the layer under uvloop, from start to drain."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 20.0


@contextmanager
def app() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process and its port."""
    command = [sys.executable, str(Path(__file__).with_name("app.py")), "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def ask(port: int, **request: object) -> Iterator[http.client.HTTPResponse]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as client:
        client.request("POST", "/v1/completions", json.dumps({"model": "m", **request}))
        yield client.getresponse()


def test_a_stream_that_has_begun_outlives_a_sigterm() -> None:
    with app() as (process, port):
        with ask(port, stream=True, max_tokens=30) as stream:
            assert stream.status == 200
            assert stream.readline().startswith(b"data: {")
            process.send_signal(signal.SIGTERM)
            assert stream.read().endswith(b"\n\ndata: [DONE]\n\n")
        assert process.wait(TIMEOUT_S) == 0


def test_ordinary_clients_get_ordinary_answers() -> None:
    with app() as (_, port):
        with ask(port) as answer:
            assert json.load(answer)["choices"][0]["text"] == "word "
        with ask(port, max_tokens="many") as answer:
            assert answer.status == 400
            assert json.load(answer)["error"]["message"] == "invalid fields"
