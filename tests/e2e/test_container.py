"""What the README says of containers, in namespaces that are as those of one (container.py).

Its Dockerfile and its YAML are read as they stand there.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from fastserve.config import Config, load_config
from tests.e2e.container import NOFILE, UID, container, why_not
from tests.e2e.harness import Server, wait_until
from tests.e2e.wire import DONE, Wire

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = README.partition("### In a container\n")[2].partition("\n### ")[0]
# What a signal may take beside what the settings allow it, on a machine that is busy.
MARGIN_S = 5.0
SIM = (
    "--engine", "sim", "--frontends", "1", "--sim-step-ms", "4",
    "--engine-max-seq-len", "8192", "--lane-heartbeat-interval-s", "0.05",
)  # fmt: skip

in_a_container = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be")


def block(language: str) -> str:
    """The code of that language in the section."""
    text: str
    [text] = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    return text.replace("\\\n", " ")


def dockerfile() -> dict[str, str]:
    """Its instructions; of several of one name, the last."""
    lines = [line for line in block("dockerfile").splitlines() if line and line[0] != "#"]
    return dict(line.split(maxsplit=1) for line in lines)


def docker_run() -> list[str]:
    [command] = [line for line in block("sh").splitlines() if line.startswith("docker run")]
    return shlex.split(command)


def pod() -> Any:
    return msgspec.yaml.decode(block("yaml"))["spec"]


def probes(server: Server) -> tuple[Any, ...]:
    """What liveness, readiness and the word for both are."""
    health, body = server.get("/health")
    return health, server.get("/ready")[0], body["status"]


def is_healthy(server: Server) -> bool:
    """Whether the image's own probe says so."""
    _, _, words = dockerfile()["HEALTHCHECK"].partition(" CMD ")
    port = str(server.port)
    command = [word.replace(":8000/", f":{port}/") for word in json.loads(words)]
    assert command[0] == "python"
    tried = subprocess.run([sys.executable, *command[1:]], capture_output=True, check=False)
    return tried.returncode == 0


def stop_s_max(config: Config) -> float:
    """The longest that SIGTERM can take, as the README has it."""
    return config.server.drain_timeout_s + 3 * config.server.terminate_timeout_s + 5.0


# ---- the claims


@in_a_container
def test_a_stranger_serves_from_a_read_only_image_and_probes_tell_how_it_is() -> None:
    with container("--frontends", "2") as server:
        engine = server.find("engine")
        # It loads nothing while it is stopped.
        engine.suspend()
        wait_until(lambda: server.get("/health")[0])
        assert probes(server) == (503, 503, "starting")
        assert not is_healthy(server)
        engine.resume()
        server.wait_ready()
        assert probes(server) == (200, 200, "ready")
        assert is_healthy(server)

        answer = server.client().completions.create(
            model=server.client().models.list().data[0].id, prompt="One, two,", max_tokens=4
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        for process in server.remember_processes().values():
            if process == psutil.Process(server.process.pid):
                continue
            assert set(process.uids()) == {UID}
            limits = Path(f"/proc/{process.pid}/limits").read_text()
            assert re.search(rf"Max open files +{NOFILE} +{NOFILE} ", limits)
            assert not {"HOME", "PATH"} & process.environ().keys()
        status = Path(f"/proc/{server.supervisor.pid}/status").read_text()
        assert re.search(r"^NSpid:.*\t1$", status, re.MULTILINE), "it is process 1"
        assert re.search(r"^CapBnd:\t0+$", status, re.MULTILINE), "and may do nothing special"
        assert server.inside("touch", "/new").returncode != 0
        assert server.inside("ls", "/dev/shm").stdout == ""
        # The tokenizer is there too, since there is no home for a cache.
        files = server.inside("sh", "-c", "ls /tmp/fastserve-run-*").stdout
        assert re.search(r"^[0-9a-f]{64}\.json$", files, re.MULTILINE)
        server.inside("kill", "-TERM", "1")
        assert server.process.wait(MARGIN_S) == 0


@in_a_container
def test_a_drain_ends_what_has_no_end_in_its_time_and_exits_with_0() -> None:
    flags = ("--drain-timeout-s", "2", "--terminate-timeout-s", "0.5")
    with container(*SIM, *flags) as server:
        server.wait_ready()
        with Wire(server.port) as endless, Wire(server.port) as short:
            long = {"prompt": "x", "stream": True, "ignore_eos": True}
            for wire, num_tokens in ((endless, 8000), (short, 300)):
                wire.post("/v1/completions", **long, max_tokens=num_tokens)
            wait_until(lambda: server.num_in_engine() == 2)
            began_s = time.monotonic()
            server.inside("kill", "-TERM", "1")
            wait_until(lambda: server.get("/ready")[0] == 503)
            assert probes(server) == (200, 503, "draining")
            assert is_healthy(server)
            with Wire(server.port) as late:
                late.post("/v1/completions", prompt="x")
                assert late.read_head() == 503
                assert "retry-after" in late.headers
                assert late.headers["connection"] == "close"
            assert list(short.events())[-1] == DONE
            assert "shutting_down" in list(endless.events())[-1]
        assert server.process.wait(MARGIN_S) == 0
        assert 1.9 < time.monotonic() - began_s < 2 + MARGIN_S


@in_a_container
def test_the_grace_period_is_enough_where_nobody_obeys() -> None:
    flags = ("--drain-timeout-s", "0.5", "--terminate-timeout-s", "0.3")
    with container(*SIM, *flags) as server:
        server.wait_ready()
        for title in ("engine", "acceptor 0"):
            server.find(title).suspend()
        began_s = time.monotonic()
        server.inside("kill", "-TERM", "1")
        assert server.process.wait(stop_s_max(load_config(flags, {}))) == 0
        # Each rung of the ladder was climbed, and none twice.
        assert 0.5 < time.monotonic() - began_s < 0.5 + 3 * 0.3 + MARGIN_S


@in_a_container
def test_a_dead_engine_is_told_to_probes_and_ends_the_container_with_70() -> None:
    with container(*SIM) as server:
        server.wait_ready()
        with Wire(server.port) as open_stream:
            fields = {"prompt": "x", "stream": True, "ignore_eos": True}
            open_stream.post("/v1/completions", **fields, max_tokens=8000)
            wait_until(lambda: server.num_in_engine() == 1)
            server.find("engine").kill()
            assert "engine_dead" in list(open_stream.events())[-1]
        assert server.process.wait(MARGIN_S + 5.0) == 70


@in_a_container
def test_without_a_place_to_write_it_says_what_to_mount() -> None:
    with container(*SIM, writable=False) as server:
        assert server.process.wait(MARGIN_S) == 2
        assert server.log.count("\n") == 1
        assert "server.run_directory" in server.log
        assert "tmpfs" in server.log


# ---- the recipe


def test_the_image_is_started_and_stopped_as_the_server_wants() -> None:
    image = dockerfile()
    assert json.loads(image["ENTRYPOINT"]) == ["fastserve"], "the exec form: it is process 1"
    assert image["STOPSIGNAL"] == "SIGTERM"
    assert int(image["USER"]) > 0
    environment = dict(word.split("=") for word in shlex.split(image["ENV"]))
    config = load_config([], environment)
    assert config.server.host == "0.0.0.0"
    assert image["EXPOSE"] == str(config.server.port) == "8000"
    times = dict(re.findall(r"--([a-z-]+)=([0-9]+)", image["HEALTHCHECK"]))
    assert int(times["start-period"]) >= config.server.start_timeout_s
    assert_probe_fits(period_s=int(times["interval"]), failures=int(times["retries"]))


def test_docker_lets_it_drain_and_gives_it_what_it_writes_to() -> None:
    words = docker_run()
    flags = dict(itertools.pairwise(words))
    assert int(flags["--stop-timeout"]) >= stop_s_max(Config())
    assert flags["--tmpfs"].startswith("/tmp:size=")
    assert "--read-only" in flags
    nofile = int(flags["--ulimit"].removeprefix("nofile="))
    assert nofile >= Config().http.connections_max
    # Flags of the server, and files that are mounted.
    ours = words[words.index("fastserve") + 1 :]
    config = load_config(ours, {})
    assert config.server.model is not None
    assert_room_suffices(flags["--tmpfs"].removesuffix("m").partition("size=")[2], config)
    assert flags["-v"].split(":")[1] in config.server.model
    assert flags["-p"].partition(":")[2] == str(config.server.port)


def test_kubernetes_restarts_it_when_that_helps_and_lets_it_drain() -> None:
    spec = pod()
    [server] = spec["containers"]
    config = load_config(
        server["args"], {one["name"]: one.get("value", "a-key") for one in server["env"]}
    )
    assert config.server.api_key == ("a-key",)
    assert spec["terminationGracePeriodSeconds"] >= stop_s_max(config)
    [port] = [one["containerPort"] for one in server["ports"]]
    assert port == config.server.port
    asked = {name: server[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    for probe in asked.values():
        assert probe["httpGet"]["port"] == port
    assert {name: probe["httpGet"]["path"] for name, probe in asked.items()} == {
        "startup": "/health",
        "readiness": "/ready",
        "liveness": "/health",
    }
    # A start that takes too long ends with our own words.
    starting = asked["startup"]
    assert starting["periodSeconds"] * starting["failureThreshold"] > config.server.start_timeout_s
    alive = asked["liveness"]
    assert_probe_fits(period_s=alive["periodSeconds"], failures=alive["failureThreshold"])
    assert server["securityContext"]["readOnlyRootFilesystem"]
    [written] = [each["name"] for each in server["volumeMounts"] if each["mountPath"] == "/tmp"]
    [volume] = [each["emptyDir"] for each in spec["volumes"] if each["name"] == written]
    assert_room_suffices(volume["sizeLimit"].removesuffix("Mi"), config)


def assert_probe_fits(*, period_s: float, failures: int) -> None:
    """A stalled engine is restarted before it is killed from within, and not by one slow answer."""
    engine = Config().engine
    assert failures > 1
    assert engine.stall_unhealthy_s + period_s * failures < engine.stall_kill_s


def assert_room_suffices(size_mib: str, config: Config) -> None:
    """For what is stored, and for a large vocabulary's tokenizer."""
    stored_mib = config.server.frontends * config.responses.bytes_max >> 20
    assert int(size_mib) >= stored_mib + 16


def test_the_grace_period_of_the_readme_is_that_of_the_defaults() -> None:
    assert "`drain_timeout_s` + 3 `terminate_timeout_s` + 5 s" in SECTION
    assert f"{stop_s_max(Config()):g} s" in SECTION
