"""The process tree: who is who, how it ends, and that nothing is ever left."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import openai
import psutil
import pytest

from tests.e2e.harness import DEADLINE_S, Server, failing, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SIM = ("--engine", "sim", "--sim-step-ms", "5", "--lane-heartbeat-interval-s", "0.05",
       "--served-model-name", "m")  # fmt: skip
ENDLESS = 100_000
# A process's title is written over its environment, unless this is set.
READABLE = {"SPT_NOENV": "1"}


class Stream:
    """A streamed completion that is read in a thread; `outcome` says how it ended."""

    def __init__(self, server: Server, *, max_tokens: int = ENDLESS) -> None:
        self._client = server.client()
        self.started = threading.Event()
        self.num_chunks = 0
        self.outcome: str | Exception = "unfinished"
        self._max_tokens = max_tokens
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            answer: Any = self._client.completions.create(
                model="m", prompt="go on", max_tokens=self._max_tokens, stream=True
            )
            for chunk in answer:
                self.num_chunks += 1
                self.started.set()
                if chunk.choices and chunk.choices[0].finish_reason:
                    self.outcome = chunk.choices[0].finish_reason
        except Exception as error:
            self.outcome = error
        finally:
            self.started.set()

    def wait_started(self) -> None:
        assert self.started.wait(DEADLINE_S)

    def wait(self, *, deadline_s: float = DEADLINE_S) -> str | Exception:
        self._thread.join(deadline_s)
        assert not self._thread.is_alive(), "the client still waits"
        return self.outcome


def started(server: Server, number: int) -> list[Stream]:
    streams = [Stream(server, max_tokens=2000) for _ in range(number)]
    for stream in streams:
        stream.wait_started()
    return streams


def error_of(outcome: str | Exception) -> str | None:
    """The type of the error object that the client was given."""
    assert isinstance(outcome, openai.APIError), repr(outcome)
    return outcome.type


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(*SIM, "--frontends", "3", "--engine-max-seq-len", "8192") as server:
        yield server


def test_every_process_has_its_name(server: Server) -> None:
    titles = server.remember_processes()
    for title in ("supervisor", "engine", "acceptor 0", "acceptor 1", "acceptor 2"):
        assert f"fastserve: {title}" in titles


def test_secrets_are_not_to_be_seen() -> None:
    """The lanes' key is in no argv, no environment and no file; the run directory is ours alone."""
    with Server(*SIM, environment=READABLE) as server:
        [run_directory] = server.run_parent.iterdir()
        assert run_directory.stat().st_mode & 0o777 == 0o700
        assert not [
            path for path in run_directory.iterdir() if path.is_file() and path.stat().st_size
        ]
        environments = [
            process.environ()
            for title, process in server.remember_processes().items()
            if title.startswith("fastserve:")
        ]
        assert len(environments) == 4
        known = set(os.environ) | set(READABLE) | {"OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"}
        for environment in environments:
            assert "PATH" in environment, "it can be read"
            assert environment.keys() <= known


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish_and_exits_0(number: int) -> None:
    with Server(*SIM, "--frontends", "2") as server:
        stream = Stream(server, max_tokens=200)
        stream.wait_started()
        server.process.send_signal(number)
        assert stream.wait() == "length"
        assert stream.num_chunks >= 200
        assert server.wait_exit() == 0


def test_who_comes_while_the_server_drains_is_told_so(server: Server) -> None:
    [stream] = started(server, 1)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.get("/ready")[0] == 503)
    assert server.get("/health") == (200, server.get("/health")[1])
    assert error_of(Stream(server, max_tokens=5).wait()) == "shutting_down"
    assert stream.wait() == "length"
    assert server.wait_exit() == 0


def test_idle_connections_do_not_hold_a_stop(server: Server) -> None:
    idle = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(20)]
    for connection in idle:
        connection.request("GET", "/health")
        connection.getresponse().read()
    began_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert time.monotonic() - began_s < 10
    for connection in idle:
        connection.close()


def test_what_does_not_finish_in_time_hears_an_error() -> None:
    with Server(*SIM, "--drain-timeout-s", "0.5", "--engine-max-seq-len", "8192") as server:
        stream = Stream(server, max_tokens=8000)
        stream.wait_started()
        server.process.send_signal(signal.SIGTERM)
        assert error_of(stream.wait()) == "shutting_down"
        assert server.wait_exit() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_at_once(server: Server, number: int, code: int) -> None:
    [stream] = started(server, 1)
    server.process.send_signal(number)
    wait_until(lambda: "stopping" in server.log)
    server.process.send_signal(number)
    assert server.wait_exit(deadline_s=20) == code
    stream.wait()


def test_a_dead_acceptor_is_replaced_and_others_do_not_notice(server: Server) -> None:
    streams = started(server, 6)
    victim = server.find("acceptor 1")
    victim.kill()
    successor = wait_until(
        lambda: (
            (new := server.remember_processes().get("fastserve: acceptor 1"))
            and new.pid != victim.pid
            and new
        )
    )
    assert successor.is_running()
    outcomes = [stream.wait() for stream in streams]
    survived = [outcome for outcome in outcomes if outcome == "length"]
    assert len(survived) == 4, outcomes  # six streams over three acceptors, two of them gone
    # The engine dropped what the dead one had, and the successor serves.
    wait_until(lambda: server.num_in_engine() == 0)
    assert all(Stream(server, max_tokens=5).wait() == "length" for _ in range(6))
    assert "respawning" in server.log


def test_an_acceptor_that_is_told_to_terminate_drains() -> None:
    flags = ("--frontends", "1", "--engine-max-seq-len", "8192", "--respawn-restarts-max", "0")
    with Server(*SIM, *flags) as server:
        long = Stream(server, max_tokens=8000)
        long.wait_started()
        short = Stream(server, max_tokens=100)
        short.wait_started()
        victim = server.find("acceptor 0")
        victim.terminate()
        assert short.wait() == "length"
        assert error_of(long.wait()) == "shutting_down"
        wait_until(lambda: server.find("acceptor 0").pid != victim.pid)
        # It was asked to, so it has not crashed.
        assert Stream(server, max_tokens=5).wait() == "length"


def test_a_successor_that_starts_slowly_is_not_taken_for_silent() -> None:
    with Server(*SIM, "--frontends", "1", "--respawn-silent-timeout-s", "1") as server:
        victim = server.find("acceptor 0")
        victim.kill()
        successor = wait_until(lambda: (now := server.find("acceptor 0")).pid != victim.pid and now)
        successor.suspend()
        time.sleep(1.5)
        successor.resume()
        assert Stream(server, max_tokens=5).wait() == "length"
        assert "acceptor silent" not in server.log


def test_a_successor_takes_no_request_before_it_can_serve_it(server: Server) -> None:
    victim = server.find("acceptor 1")
    victim.kill()
    # The others have all of it until then; nobody hears that the model is loading.
    while server.remember_processes().get("fastserve: acceptor 1", victim).pid == victim.pid:
        assert server.get("/ready")[0] == 200
    for _ in range(100):
        assert server.get("/ready")[0] == 200


def test_a_stopped_acceptor_is_noticed_and_replaced() -> None:
    with Server(*SIM, "--frontends", "2", "--respawn-silent-timeout-s", "1") as server:
        victim = server.find("acceptor 0")
        victim.suspend()
        wait_until(lambda: server.find("acceptor 0").pid != victim.pid)
        assert "acceptor silent" in server.log
        assert all(Stream(server, max_tokens=5).wait() == "length" for _ in range(4))


def test_an_acceptor_that_does_not_read_its_lane_is_replaced() -> None:
    """Its streams are lost in the engine, so it must not go on as if nothing had happened."""
    flags = ("--lane-in-flight-frames-max", "50", "--lane-full-timeout-s", "0.3")
    with Server(*SIM, *flags, "--frontends", "2", "--sim-step-ms", "1",
                "--engine-max-seq-len", "8192") as server:  # fmt: skip
        streams = [Stream(server, max_tokens=8000) for _ in range(4)]
        for stream in streams:
            stream.wait_started()
        victim = server.find("acceptor 0")
        victim.suspend()
        wait_until(lambda: server.find("acceptor 0").pid != victim.pid)
        assert "does not read its lane" in server.log
        for stream in streams:
            stream.wait()
        assert all(Stream(server, max_tokens=5).wait() == "length" for _ in range(4))


def test_a_crash_loop_ends_the_server_with_the_reason() -> None:
    with Server(*SIM, "--frontends", "2", "--respawn-restarts-max", "1") as server:
        first = server.find("acceptor 0")
        first.kill()
        second = wait_until(lambda: (now := server.find("acceptor 0")).pid != first.pid and now)
        second.kill()
        assert server.wait_exit() == 3
        assert "crash loop" in server.log


def test_acceptors_that_cannot_even_be_imported_end_the_start(tmp_path: Path) -> None:
    (tmp_path / "httptools.py").write_text("raise RuntimeError('a broken wheel')")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with failing(*SIM, "--frontends", "2", environment={"PYTHONPATH": paths}) as server:
        assert server.wait_exit() == 3
        assert "a broken wheel" in server.log
        assert "crashes again and again" in server.log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_dead_engine_is_told_to_every_client(server: Server, number: int) -> None:
    streams = started(server, 9)
    began_s = time.monotonic()
    server.find("engine").send_signal(number)
    outcomes = [error_of(stream.wait(deadline_s=20)) for stream in streams]
    assert outcomes == ["engine_dead"] * 9
    assert server.wait_exit() == 70
    assert time.monotonic() - began_s < 20
    assert "engine died" in server.log


def test_a_dead_engine_may_be_respawned_behind_open_connections() -> None:
    with Server(*SIM, "--frontends", "2", "--engine-respawn", "1") as server:
        streams = started(server, 4)
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)

        def status() -> int:
            kept.request("GET", "/ready")
            answer = kept.getresponse()
            answer.read()
            return answer.status

        assert status() == 200
        connected = kept.sock
        server.find("engine").kill()
        assert [error_of(stream.wait(deadline_s=20)) for stream in streams] == ["engine_dead"] * 4
        wait_until(lambda: status() == 503)
        wait_until(lambda: status() == 200)
        assert kept.sock is connected, "the connection was kept"
        assert all(Stream(server, max_tokens=5).wait() == "length" for _ in range(4))
        kept.close()
        # That was the one that it had.
        server.find("engine").kill()
        assert server.wait_exit() == 70


def test_a_stopped_engine_does_not_hold_a_stop() -> None:
    flags = ("--terminate-timeout-s", "4", "--drain-timeout-s", "0.5")
    with Server(*SIM, *flags) as server:
        server.find("engine").suspend()
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(deadline_s=20) == 0
        # Not twice: being told to stop, and then a signal that it cannot obey either.
        assert time.monotonic() - began_s < 0.5 + 2 * 4


def test_an_engine_that_stands_still_does_not_hold_a_drain() -> None:
    """Requests wait for it only as long as they would if nobody had told the server to end."""
    flags = (
        "--drain-timeout-s", "60", "--engine-stall-unhealthy-s", "0.5", "--engine-stall-kill-s", "1"
    )  # fmt: skip
    with Server(*SIM, *flags, "--engine-max-seq-len", "8192") as server:
        [stream] = started(server, 1)
        server.find("engine").suspend()
        server.process.send_signal(signal.SIGTERM)
        assert error_of(stream.wait(deadline_s=30)) == "engine_dead"
        assert server.wait_exit(deadline_s=30) == 70


def test_nothing_outlives_a_killed_supervisor(server: Server) -> None:
    [stream] = started(server, 1)
    processes = [
        process
        for title, process in server.remember_processes().items()
        if title.startswith("fastserve:")
    ]
    port = server.port
    server.process.kill()
    server.process.wait()

    def gone() -> bool:
        return not any(
            process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            for process in processes
        )

    wait_until(gone, deadline_s=10)
    stream.wait()
    # The run directory is the one thing a killed process cannot remove: the next start does.
    [leftover] = server.run_parent.iterdir()
    server.port_file.unlink()
    with Server(*SIM, "--run-directory", str(server.run_parent), "--port", str(port)):
        assert not leftover.exists()


def test_acceptors_are_replaced_on_sighup_without_losing_a_request(server: Server) -> None:
    before = {server.find(f"acceptor {lane}").pid for lane in range(3)}
    streams = started(server, 3)
    server.process.send_signal(signal.SIGHUP)

    def replaced() -> bool:
        tree = server.remember_processes()
        now = {tree[f"fastserve: acceptor {lane}"].pid for lane in range(3)
               if f"fastserve: acceptor {lane}" in tree}  # fmt: skip
        assert server.get("/health")[0] == 200
        return len(now) == 3 and not now & before

    wait_until(replaced)
    assert [stream.wait() for stream in streams] == ["length"] * 3


def test_one_that_dies_before_its_turn_is_not_replaced_again(server: Server) -> None:
    def respawns(reason: str) -> int:
        with urlopen(server.url + "/metrics", timeout=DEADLINE_S) as answer:
            text = answer.read().decode()
        labels = f'process="acceptor",reason="{reason}"'
        return round(float(re.findall(rf"respawns_total{{{labels}}} (\S+)", text)[0]))

    last = server.find("acceptor 2")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "replacing the acceptors" in server.log)
    last.kill()
    wait_until(lambda: (respawns("replaced"), respawns("died")) == (2, 1))
    wait_until(lambda: len(server.remember_processes()) >= 5 and server.get("/ready")[0] == 200)
    # Were they still being replaced, this would ask for nothing new.
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: respawns("replaced") == 5)
    assert respawns("died") == 1


def test_a_signal_during_the_start_ends_it() -> None:
    server = Server(*SIM, "--frontends", "4")
    try:
        wait_until(server.port_file.exists)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        server.assert_nothing_left()
        assert "Traceback" not in server.log
    finally:
        server.kill_everything()


def test_a_launchers_variables_reach_the_engine_alone(tmp_path: Path) -> None:
    """Under mpiexec the engine may be a rank; who else carries that identity breaks its world."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("no MPI is installed in this environment")
    port_file, stdout = tmp_path / "port", (tmp_path / "stdout").open("w+")
    process = subprocess.Popen(
        [str(mpiexec), "-n", "1", sys.executable, "-m", "fastserve", *SIM, "--frontends", "2",
         "--port", "0", "--port-file", str(port_file), "--run-directory", str(tmp_path)],
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | READABLE,
    )  # fmt: skip
    try:
        wait_until(lambda: "ready" in (tmp_path / "stdout").read_text())
        tree = {
            " ".join(child.cmdline()).strip(): child
            for child in psutil.Process(process.pid).children(recursive=True)
        }
        seen = {
            title: [name for name in child.environ() if name.startswith("PMI_")]
            for title, child in tree.items()
            if title.startswith("fastserve: ") and "supervisor" not in title
        }
        assert len(seen) == 3
        assert "PMI_RANK" in seen.pop("fastserve: engine")
        assert seen == {"fastserve: acceptor 0": [], "fastserve: acceptor 1": []}
        tree["fastserve: supervisor"].send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        stdout.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
