"""Two servers behind HAProxy, by the configuration that the README shows: nobody is lost."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.harness import DEADLINE_S, Server, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

README = Path(__file__).parents[2] / "README.md"
HAPROXY = shutil.which("haproxy") or "/usr/sbin/haproxy"
TOKENS = 20
CLIENTS = 12

if not Path(HAPROXY).exists():
    pytest.skip("haproxy is not on this machine", allow_module_level=True)


def configuration(port: int, servers: list[Server]) -> str:
    """What the README shows, with the addresses of this test."""
    shown = README.read_text().split("```haproxy\n")[1].split("```")[0]
    made = shown.replace("bind :8080", f"bind 127.0.0.1:{port}")
    for example, server in zip(re.findall(r"10\.0\.0\.\d:8000", shown), servers, strict=True):
        made = made.replace(example, f"127.0.0.1:{server.port}")
    return made


@contextlib.contextmanager
def balancer(directory: Path, servers: list[Server]) -> Iterator[str]:
    """HAProxy in front of `servers`; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    file = directory / "haproxy.cfg"
    file.write_text(configuration(port, servers))
    process = subprocess.Popen(
        [HAPROXY, "-db", "-f", str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(f"{url}/ready"))
        yield url
    finally:
        process.terminate()
        process.wait(10)


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def sim() -> Server:
    return Server("--engine", "sim", "--sim-step-ms", "10", "--frontends", "1",
                  "--served-model-name", "m")  # fmt: skip


class Crowd:
    """Clients who ask again and again, until they are told to stop."""

    def __init__(self, url: str) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def more(self, number: int) -> None:
        """Wait for so many more answers."""
        goal = self.answers + number
        wait_until(lambda: self.answers >= goal or self.failures)
        assert self.failures == []

    def _run(self, number: int) -> None:
        while not self.stopped.is_set():
            try:
                text = self._ask(stream=number % 2 == 0)
                assert len(text.split()) == TOKENS, text
            # Whatever it is, the test tells of it.
            except Exception as error:
                self.failures.append(repr(error))
                return
            with self._lock:
                self.answers += 1

    def _ask(self, *, stream: bool) -> str:
        asked: dict[str, Any] = {"model": "m", "prompt": "Speak", "max_tokens": TOKENS}
        if not stream:
            return str(self._client.completions.create(**asked).choices[0].text)
        chunks = self._client.completions.create(**asked, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def num_answered(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=DEADLINE_S) as answer:
        text = answer.read().decode()
    found = re.search(r'request_success_total\{.*"length"\} (\d+)', text)
    assert found is not None
    return int(found[1])


def test_a_server_goes_and_another_comes_and_no_request_is_lost(tmp_path: Path) -> None:
    with (
        sim() as first,
        sim() as second,
        balancer(tmp_path, [first, second]) as url,
        Crowd(url) as crowd,
    ):
        crowd.more(3 * CLIENTS)
        assert min(num_answered(first), num_answered(second)) >= CLIENTS
        first.process.send_signal(signal.SIGTERM)
        crowd.more(CLIENTS)
        assert first.wait_exit() == 0
        crowd.more(3 * CLIENTS)
        crowd.stopped.set()
    assert crowd.failures == []


def test_a_stream_is_not_held_up(tmp_path: Path) -> None:
    with sim() as first, sim() as second, balancer(tmp_path, [first, second]) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            chunks = client.completions.create(
                model="m", prompt="Speak", max_tokens=30, stream=True
            )
            came_s = [time.monotonic() for _ in chunks]
        assert len(came_s) >= 20
        assert came_s[len(came_s) // 2] < came_s[-1] - 0.05


def test_the_gauges_that_balancers_read_are_there() -> None:
    page = README.read_text().split("### N servers")[1].split("### One model")[0]
    named = re.findall(r"\| `(fastserve_\w+)` \|", page)
    assert len(named) == 3
    with sim() as server, urllib.request.urlopen(f"{server.url}/metrics") as answer:
        exposed = answer.read().decode()
    for name in named:
        assert f"# TYPE {name} gauge" in exposed
