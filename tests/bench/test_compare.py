from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from bench import report, run_command
from bench.compare import Cell, Options, compare, median_of, plan_of, rotated
from bench.servers import BUNDLED, BY_CHOICE, Running, Server, fastserve
from bench.works import WORKS, Work
from fastserve.load.build import LoadError
from fastserve.load.chats import chat_bodies
from fastserve.load.cpu import parse_cores
from tests.load.answers import needs_cc

if TYPE_CHECKING:
    from pathlib import Path

RAW = next(server for server in BUNDLED if server.name == "raw-uvloop")
STREAMED = Work(stream=True, tokens=4, step_ms=5, concurrency=4)
WHOLE = Work(stream=False, tokens=4, step_ms=5, concurrency=4)
QUANTILES = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "p999": 4.0}
NONE = dict.fromkeys(QUANTILES)


def options(**changes: object) -> Options:
    cores = frozenset(os.sched_getaffinity(0))
    defaults: dict[str, object] = {
        "rounds": 1,
        "window_s": 0.4,
        "drain_s": 5.0,
        "attempts_max": 1,
        "server_cores": cores,
        "load_cores": frozenset({min(cores)}),
        "model": None,
        "start_timeout_s": 60.0,
    }
    return Options(**(defaults | changes))  # type: ignore[arg-type]  # each is of its field's type


def cell(
    *,
    cpu_us: float | None = 10.0,
    others_share: float = 0.0,
    merged_share: float = 0.0,
    failures: dict[str, int] | None = None,
    load_share: float = 0.1,
) -> Cell:
    return Cell(
        server=RAW.name,
        work=STREAMED.name,
        round=1,
        cpu_us=cpu_us,
        per_s=1000.0,
        merged_share=merged_share,
        ttft_ms=dict(QUANTILES),
        itl_ms=dict(QUANTILES),
        latency_ms=dict(QUANTILES),
        others_share=others_share,
        load_share=load_share,
        load_us=2.0,
        failures=failures or {},
        unfinished=0,
        notes=[],
    )


def test_disturbed_cells_do_not_count_where_there_are_quiet_ones() -> None:
    cells = [cell(cpu_us=10), cell(cpu_us=99, others_share=0.5), cell(cpu_us=12)]
    assert median_of(cells, lambda each: each.cpu_us) == 11
    assert median_of(cells[1:2], lambda each: each.cpu_us) == 99
    assert median_of([cell(cpu_us=None)], lambda each: each.cpu_us) is None
    assert median_of([], lambda each: each.cpu_us) is None


def test_another_server_is_first_in_each_round() -> None:
    servers = [*BUNDLED[:3]]
    firsts = [rotated(servers, by)[0] for by in range(3)]
    assert firsts == servers
    assert all(sorted(rotated(servers, by), key=servers.index) == servers for by in range(7))


def test_the_plan_of_a_work_spreads_its_clients_over_an_answer() -> None:
    work = Work(stream=True, tokens=64, step_ms=50, concurrency=1024)
    live = Running(pid=1, port=8000, model="m")
    plan = plan_of(work, live, options(window_s=2.0), check=True)
    assert plan.ramp_s == work.answer_s == 3.2
    assert plan.warm_s > plan.ramp_s
    assert plan.connections == 1024
    assert {request.expected_chunks for request in plan.requests} == {64}


def test_bodies_are_chats_that_differ_and_never_change() -> None:
    bodies = chat_bodies(model="m", tokens=64, stream=True, number=500)
    assert len(set(bodies)) == 500
    assert bodies == chat_bodies(model="m", tokens=64, stream=True, number=500)
    body = json.loads(bodies[0])
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (64, 0.7, True)


def test_no_two_works_have_a_name_in_common() -> None:
    assert len({work.name for work in WORKS}) == len(WORKS)


@needs_cc
def test_a_server_is_measured_and_reported(tmp_path: Path) -> None:
    said: list[str] = []
    works = [STREAMED, WHOLE]
    cells = list(compare([RAW], works, options(), say=said.append))
    assert [each.work for each in cells] == [work.name for work in works]
    streamed, gathered = cells
    assert not streamed.failures
    assert not gathered.failures
    assert streamed.cpu_us
    assert streamed.cpu_us > 1
    # Four clients, and a token for each of them every 5 ms.
    assert 200 < streamed.per_s <= 840
    assert streamed.ttft_ms["p50"]
    assert streamed.ttft_ms["p50"] >= 4.9
    assert gathered.ttft_ms == NONE
    assert gathered.latency_ms["p50"]
    assert gathered.latency_ms["p50"] >= 19.9
    assert all(RAW.name in line for line in said)
    document = json.loads(report.as_json(cells, [RAW], works, options()))
    assert [each["work"] for each in document["cells"]] == [work.name for work in works]


@needs_cc
def test_a_server_that_does_not_start_is_left_out_with_its_reason() -> None:
    broken = Server(name="broken", command="{python} -c 'raise SystemExit(\"no GPU\")'")
    said: list[str] = []
    cells = list(compare([broken, RAW], [STREAMED], options(rounds=2), say=said.append))
    assert [each.server for each in cells] == [RAW.name] * 2
    told = [line for line in said if "left out" in line]
    assert len(told) == 1
    assert "exited with 1" in told[0]
    assert "no GPU" in told[0]


@pytest.mark.parametrize(
    ("cells", "shown"),
    [
        pytest.param([cell()], "10.0", id="plain"),
        pytest.param([cell(merged_share=0.5)], "10.0*", id="merged"),
        pytest.param([cell(others_share=0.5)], "10.0?", id="disturbed"),
        pytest.param([cell(failures={"cut": 1})], "10.0!", id="failed"),
        pytest.param([cell(load_share=0.95)], "10.0^", id="limited by the load"),
        pytest.param([], "", id="not measured"),
    ],
)
def test_a_figure_is_marked_with_what_is_wrong_with_it(cells: list[Cell], shown: str) -> None:
    table = report.as_markdown(cells, [RAW], [STREAMED], options()).splitlines()
    rows = [line for line in table if line.startswith(f"| {STREAMED.name} |")]
    assert rows[0] == f"| {STREAMED.name} | {shown} |"


def test_a_command_is_filled_in() -> None:
    arguments = fastserve(frontends=4).arguments(port=9, step_ms=0.5, model=None)
    assert arguments[1:3] == ["-m", "fastserve"]
    assert " ".join(arguments).count("--sim-step-ms 0.5 --port 9 --frontends 4") == 1


def test_a_path_with_a_space_stays_one_argument() -> None:
    llama = next(server for server in BY_CHOICE if server.name == "llama-server")
    assert "/a b.gguf" in llama.arguments(port=1, step_ms=0, model="/a b.gguf")
    with pytest.raises(LoadError, match="--model"):
        llama.arguments(port=1, step_ms=0, model=None)


def test_what_is_not_installed_is_missing() -> None:
    server = Server(name="x", command="", needs=("json", "sh", "no_such_thing"))
    assert server.missing() == ["no_such_thing"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer", "nginx"], "no such peer: nginx"),
        (["--work", "nothing"], "no work is called 'nothing'"),
        (["--server", "nameless"], "NAME=COMMAND"),
    ],
)
def test_an_impossible_comparison_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        run_command.main(flags)


def test_cores_are_written_as_taskset_writes_them() -> None:
    assert parse_cores("0,2-4,7") == {0, 2, 3, 4, 7}
