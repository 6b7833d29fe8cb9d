"""The trtllm engine in a real server, over the package that stands in for the library.

Its flags under the names they have in trtllm-serve, every way its library can fail, and the two
launchers of multi-node jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import psutil
import pytest

from tests.e2e.harness import DEADLINE_S, Server, failing, wait_until
from tests.engine.conformance.subjects import STANDINS, write_model

if TYPE_CHECKING:
    from collections.abc import Iterator

EXIT_ENGINE_DEAD = 70
# The stand-in takes so long for a token; the longest answer is not over while a test looks on.
STEP_S = 0.002
LONG = 6900


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_seq_len=8000)


def flags(model: Path, *more: str) -> tuple[str, ...]:
    return (
        "--engine", "trtllm", "--model", str(model), "--served_model_name", "m",
        "--num_serve_frontends", "1", "--lane-heartbeat-interval-s", "0.1", *more,
    )  # fmt: skip


def standin(behaviour: str = "generates", **more: str) -> dict[str, str]:
    return {"PYTHONPATH": str(STANDINS), "TRTLLM_STANDIN": behaviour, **more}


def stream(client: openai.OpenAI, *, max_tokens: int = 80) -> Any:
    return client.completions.create(
        model="m", prompt="Speak", max_tokens=max_tokens, stream=True, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


# --- it serves ---


@pytest.fixture(scope="module")
def arguments_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seen") / "arguments.json"


@pytest.fixture(scope="module")
def server(model: Path, arguments_path: Path) -> Iterator[Server]:
    extra = model / "extra.yaml"
    extra.write_text("stream_interval: 2\nkv_cache_config: {enable_block_reuse: false}\n")
    given = (
        "--tp_size", "2", "--pp_size=1", "--ep-size", "1", "--max_batch_size", "4",
        "--max_num_tokens", "512", "--max_seq_len", "7000", "--kv_cache_dtype", "fp8",
        "--kv_cache_free_gpu_memory_fraction", "0.5", "--trust_remote_code",
        "--enable_chunked_prefill", "--extra_llm_api_options", str(extra),
    )  # fmt: skip
    environment = standin(TRTLLM_STANDIN_ARGUMENTS=str(arguments_path))
    with Server(*flags(model, *given), environment=environment) as running:
        yield running


def test_flags_mean_what_they_mean_in_trtllm_serve(
    server: Server, model: Path, arguments_path: Path
) -> None:
    assert json.loads(arguments_path.read_text()) == {
        "model": str(model),
        "skip_tokenizer_init": True,
        "trust_remote_code": True,
        "dtype": "auto",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "moe_expert_parallel_size": 1,
        "max_batch_size": 4,
        "max_num_tokens": 512,
        "max_seq_len": 7000,
        "max_beam_width": 1,
        "enable_chunked_prefill": True,
        "kv_cache_config": {
            "free_gpu_memory_fraction": 0.5,
            "dtype": "fp8",
            "enable_block_reuse": False,
        },
        "stream_interval": 2,
    }


def test_what_is_streamed_is_what_is_answered_whole(server: Server) -> None:
    with server.client() as client:
        streamed = "".join(chunk.choices[0].text for chunk in stream(client) if chunk.choices)
        whole = client.completions.create(
            model="m", prompt="Speak", max_tokens=80, temperature=0, n=2,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    assert streamed
    assert [choice.text for choice in whole.choices] == [streamed] * 2
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2 * 80


def test_what_the_library_would_ignore_is_a_400_that_names_it(server: Server) -> None:
    with server.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="m", prompt="Speak", seed=7)
    assert refused.value.param == "seed"


def test_who_leaves_is_aborted_in_the_library(server: Server) -> None:
    with server.client() as client:
        chunks = stream(client, max_tokens=LONG)
        next(chunks)
        wait_until(lambda: server.num_in_engine() == 1)
        chunks.close()
    wait_until(lambda: server.num_in_engine() == 0, deadline_s=LONG * STEP_S / 2)


# --- it cannot start ---


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("orchestrator_type: ray", "orchestrator_type ray is not supported"),
        ("orchestrator_type: rpc", "orchestrator_type rpc is not supported"),
        ("num_serve_frontends: 4", "num_serve_frontends is fastserve's to set: --frontends"),
        ("no_such_argument: 1", "unknown arguments: {'no_such_argument'}"),
    ],
)
def test_a_file_that_asks_for_what_is_not_there_is_refused(
    model: Path, tmp_path: Path, text: str, complaint: str
) -> None:
    extra = tmp_path / "extra.yaml"
    extra.write_text(text)
    with failing(*flags(model, "--config-yaml", str(extra)), environment=standin()) as server:
        assert server.wait_exit() == 2
        assert complaint in server.log


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"TLLM_DISABLE_MPI": "1"}, "TLLM_DISABLE_MPI is set"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "trtllm-llmapi-launch"),
        ({"PMI_RANK": "1"}, "trtllm-llmapi-launch"),
        ({"SLURM_PROCID": "3"}, "trtllm-llmapi-launch"),
    ],
)
def test_a_start_as_something_else_than_one_server_is_refused(
    model: Path, environment: dict[str, str], complaint: str
) -> None:
    with failing(*flags(model), environment=standin() | environment) as server:
        assert server.wait_exit() == 2
        assert complaint in server.log


def test_a_library_that_raises_as_it_starts_is_a_start_that_failed(model: Path) -> None:
    with failing(*flags(model), environment=standin("raises")) as server:
        assert server.wait_exit() == 2
        assert "only 1 GPU, but 8 are required" in server.log


def test_a_library_that_exits_as_it_starts_is_a_dead_engine(model: Path) -> None:
    with failing(*flags(model), environment=standin("exits")) as server:
        assert server.wait_exit() == EXIT_ENGINE_DEAD


def test_a_library_that_hangs_as_it_starts_has_a_deadline(model: Path) -> None:
    given = flags(model, "--start-timeout-s", "2")
    with failing(*given, environment=standin("hangs")) as server:
        assert server.wait_exit() == EXIT_ENGINE_DEAD
        assert "not ready" in server.log


def test_a_library_that_hangs_as_it_starts_does_not_hold_up_a_stop(model: Path) -> None:
    with failing(*flags(model), environment=standin("hangs")) as server:
        wait_until(lambda: server.port_file.exists() and server.get("/health")[0] == 503)
        server.process.send_signal(signal.SIGTERM)
        started_s = time.monotonic()
        assert server.wait_exit() == 0
        assert time.monotonic() - started_s < 3


# --- it dies ---


@pytest.mark.parametrize(
    ("behaviour", "word"),
    [
        ("fatal@20", "illegal memory access"),
        ("exit@20", "exit code 1"),
        ("silent@20", "engine stalled, killing it"),
        ("rank", "exited"),
    ],
)
def test_however_it_dies_clients_are_told_and_nothing_is_left(
    model: Path, behaviour: str, word: str
) -> None:
    given = flags(
        model, "--tp_size", "2", "--engine-stall-unhealthy-s", "1", "--engine-stall-kill-s", "2"
    )
    with failing(*given, environment=standin(f"generates {behaviour}")) as server:
        server.wait_ready()
        with server.client() as client:
            chunks = stream(client, max_tokens=LONG)
            next(chunks)
            if behaviour == "rank":
                ranks_of(server)[1].kill()
            died_s = time.monotonic()
            with pytest.raises(openai.APIError) as told:
                list(chunks)
        assert told.value.code == "engine_dead"
        assert server.wait_exit() == EXIT_ENGINE_DEAD
        assert time.monotonic() - died_s < 15
        assert word in server.log
        wait_until(lambda: not ranks_of(server))


def test_the_failure_of_one_request_is_its_own(model: Path) -> None:
    with (
        Server(*flags(model), environment=standin("generates request@5")) as server,
        server.client() as client,
    ):
        with pytest.raises(openai.APIError) as told:
            list(stream(client))
        assert told.value.code == "generation_failed"
        assert list(stream(client))


def test_a_library_that_does_not_shut_down_is_left_behind(model: Path) -> None:
    given = flags(model, "--tp_size", "2", "--terminate-timeout-s", "3")
    with Server(*given, environment=standin("generates shutdown-hangs")) as server:
        ranks = ranks_of(server)
        assert len(ranks) == 2
        started_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert time.monotonic() - started_s < 10
        # Whoever inherits them may let them lie.
        assert all(not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE for rank in ranks)


def ranks_of(server: Server) -> list[psutil.Process]:
    """The processes that look like ranks, by their number."""
    found = {}
    for process in server.remember_processes().values():
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            for child in process.children(recursive=True):
                if child.name() == "sleep":
                    found[child.environ()["OMPI_COMM_WORLD_RANK"]] = child
    return [found[number] for number in sorted(found)]


# --- many nodes ---


def test_under_the_launcher_one_process_attaches_and_no_other_could(
    model: Path, tmp_path: Path
) -> None:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("no MPI is installed in this environment")
    port_file, stdout, attached = tmp_path / "port", tmp_path / "stdout", tmp_path / "attached"
    # Titles otherwise stand where /proc shows the environment.
    environment = standin(TRTLLM_STANDIN_ATTACHED=str(attached), SPT_NOENV="1")
    with stdout.open("w") as out:
        process = subprocess.Popen(
            [str(mpiexec), "-n", "2", sys.executable, str(STANDINS / "trtllm_llmapi_launch.py"),
             sys.executable, "-m", "fastserve", *flags(model), "--frontends", "2", "--port", "0",
             "--port-file", str(port_file), "--run-directory", str(tmp_path)],
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | environment,
        )  # fmt: skip
    try:
        wait_until(lambda: "fastserve is ready" in stdout.read_text() or process.poll() is not None)
        assert process.poll() is None, stdout.read_text()
        tree = {}
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                tree[" ".join(child.cmdline()).strip()] = child
        supervisors = [title for title in tree if title == "fastserve: supervisor"]
        assert len(supervisors) == 1, stdout.read_text()
        engine = tree["fastserve: engine"]
        assert attached.read_text().split() == [str(engine.pid)]
        told = {
            title: sorted(name for name in child.environ() if "TLLM_SPAWN" in name.upper())
            for title, child in tree.items()
            if title.startswith("fastserve: ") and "supervisor" not in title
        }
        assert len(told.pop("fastserve: engine")) == 3
        assert told == {"fastserve: acceptor 0": [], "fastserve: acceptor 1": []}
        url = f"http://127.0.0.1:{int(port_file.read_text())}/v1"
        with openai.OpenAI(base_url=url, api_key="none", timeout=DEADLINE_S) as client:
            assert list(stream(client))
        tree["fastserve: supervisor"].send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
