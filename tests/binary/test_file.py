"""The whole server as one file: built, and started with nothing around it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from typing import TYPE_CHECKING

import pytest

from fastserve.binary.build import build
from tests.e2e.harness import Server, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("PyInstaller") is None or shutil.which("cc") is None,
        reason="the extra binary and a C compiler are needed",
    ),
]

FRONTENDS = 4


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("file") / "server"
    build(out, model=True)
    yield out
    digest = out.read_bytes()[-32:-16].hex()
    # Where it unpacks if nothing says where.
    shutil.rmtree(f"/var/tmp/fastserve-{os.getuid()}/unpacked-{digest}")
    out.unlink()


@pytest.fixture
def server(program: Path) -> Iterator[Server]:
    """With an empty environment."""
    with Server(
        "--frontends", str(FRONTENDS),
        program=(str(program),),
        bare=True,
    ) as server:  # fmt: skip
        yield server


def test_it_serves_the_model_that_is_in_it(server: Server) -> None:
    processes = server.remember_processes()
    assert {f"fastserve: acceptor {lane}" for lane in range(FRONTENDS)} <= processes.keys()
    assert all("python" not in os.path.basename(one.exe()) for one in processes.values())
    assert server.find("supervisor").pid == server.process.pid
    client = server.client()
    model = client.models.list().data[0].id
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Count to ten."}],
        max_tokens=30,
        temperature=0,
        stream=True,
    )
    answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert len(answer.split()) > 5


def test_it_respawns_and_reaps_as_the_installed_one_does(server: Server) -> None:
    before = server.find("acceptor 2")
    before.kill()
    wait_until(lambda: server.find("acceptor 2").pid != before.pid)
    wait_until(lambda: not before.is_running())
    server.find("engine").kill()
    assert server.wait_exit() == 70


def test_it_ends_when_told_to(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0


def test_nothing_outlives_a_supervisor_that_is_killed(
    server: Server,
) -> None:
    server.remember_processes()
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not server._alive(), deadline_s=10.0)
    # The run directory is swept by the next start.
    shutil.rmtree(server.run_parent)
    server.run_parent.mkdir()
    server.port_file.unlink()
