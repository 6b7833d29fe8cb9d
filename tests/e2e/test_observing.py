"""What a server tells of its requests and of its crashes: log lines and spans."""

from __future__ import annotations

import json
import signal
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.collector import Collector, attributes, collecting
from tests.e2e.harness import Server, failing, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = "a secret of some length"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[Server]:
    with Server(
        "--engine", "sim", "--sim-step-ms", "1", "--log-format", "json",
        "--tracing-otlp-endpoint", collector.url, "--tracing-export-interval-s", "0.1",
        "--metrics-names", "fastserve,vllm,trtllm",
    ) as server:  # fmt: skip
        yield server


def lines(server: Server, event: str) -> list[dict[str, Any]]:
    """The log's lines of that event; every line must be one object, and of one process."""
    told = [json.loads(line) for line in server.log.splitlines()]
    assert all(each["process"] in ("supervisor", "engine") or each["process"][:9] == "acceptor-"
               for each in told)  # fmt: skip
    return [each for each in told if each["event"] == event]


def complete(server: Server, *, request_id: str, **options: Any) -> Any:
    client = server.client(default_headers={"X-Request-Id": request_id, **options.pop("more", {})})
    model = client.models.list().data[0].id
    return client.completions.create(model=model, prompt=PROMPT, max_tokens=3, **options)


def sample(server: Server, name: str) -> float:
    """One number of /metrics, by its name and labels as they are written there."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name} ")]
    return float(line.removeprefix(name))


def test_a_number_has_every_name_that_was_asked_for(server: Server) -> None:
    complete(server, request_id="mine-0")
    model = server.client().models.list().data[0].id
    tokens = sample(server, "fastserve_generation_tokens_total")
    assert tokens > 0
    for name in (
        f'vllm:generation_tokens_total{{engine="0",model_name="{model}"}}',
        f'trtllm_generation_tokens_total{{engine_type="sim",model_name="{model}"}}',
    ):
        assert sample(server, name) == tokens


def test_a_request_is_one_line_and_one_span(server: Server, collector: Collector) -> None:
    traceparent = f"00-{TRACE}-{PARENT}-01"
    complete(server, request_id="mine-1", more={"traceparent": traceparent})
    [line] = [each for each in lines(server, "request finished") if each["id"] == "mine-1"]
    assert (line["status"], line["finish"], line["tokens"]) == (200, "length", 3)
    assert 0 < line["ttft_s"] <= line["total_s"]
    assert line["trace_id"] == TRACE
    assert line["level"] == "info"
    [span] = wait_until(lambda: [each for each in collector.spans if each.trace_id.hex() == TRACE])
    assert span.parent_span_id.hex() == PARENT
    assert attributes(span.attributes)["gen_ai.request.id"] == "mine-1"


def test_no_line_has_what_a_client_wrote(server: Server) -> None:
    complete(server, request_id="mine-2")
    with pytest.raises(Exception, match="temperature"):
        complete(server, request_id="mine-3", temperature=9)
    assert [each["status"] for each in lines(server, "request refused")] == [400]
    assert PROMPT not in server.log


def test_refusals_that_cost_nobody_anything_are_not_a_flood(server: Server) -> None:
    for _ in range(50):
        assert server.get("/nowhere")[0] == 404
    written = lines(server, "requests refused by their heads")
    assert 1 <= len(written) < 25
    assert (written[0]["path"], written[0]["status"]) == ("/nowhere", 404)


def test_a_killed_acceptor_is_told_of_with_what_comes_next(server: Server) -> None:
    victim = server.find("acceptor 0")
    victim.send_signal(signal.SIGKILL)
    [line] = wait_until(lambda: lines(server, "acceptor died, respawning it"))
    assert (line["process"], line["acceptor"], line["pid"]) == (
        "supervisor",
        "acceptor-0",
        victim.pid,
    )
    assert line["how"] == "killed by SIGKILL"
    assert "aborted" in line["next"]
    wait_until(lambda: server.find("acceptor 0").pid != victim.pid)


def test_acceptors_that_are_replaced_are_told_from_those_that_died(server: Server) -> None:
    def respawns(reason: str) -> float:
        labels = f'{{process="acceptor",reason="{reason}"}}'
        return sample(server, f"fastserve_process_respawns_total{labels}")

    died = respawns("died")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: respawns("replaced") == 2)
    assert respawns("died") == died


def test_an_engine_that_crashes_says_by_which_exception_and_what_comes_next() -> None:
    with failing(
        "--engine", "sim", "--frontends", "1", "--log-format", "json", "--log-prompts"
    ) as server:
        server.wait_ready()
        engine = server.find("engine")
        with pytest.raises(Exception, match="engine"):
            complete(
                server, request_id="mine", extra_body={"sim": {"die_at": 1, "die_by": "exception"}}
            )
        assert server.wait_exit() == 70
        [crash] = lines(server, "crashed")
        [death] = lines(server, "engine died")
        [prompt] = lines(server, "request prompt")
    how = "RuntimeError: scripted to die by an exception"
    assert (crash["process"], crash["pid"], crash["error"]) == ("engine", engine.pid, how)
    assert "traceback" in crash
    assert (death["process"], death["pid"], death["how"]) == ("supervisor", engine.pid, how)
    assert death["next"] == "clients are told, the server exits with 70"
    # And this one was asked to show prompts.
    assert (prompt["id"], prompt["prompt"]) == ("mine", PROMPT)
