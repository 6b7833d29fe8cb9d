"""One true picture of K acceptors, whichever of them is asked."""

from __future__ import annotations

import concurrent.futures
import urllib.request
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.harness import Server, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

FRONTENDS = 8


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(
        "--engine", "sim", "--frontends", str(FRONTENDS), "--sim-step-ms", "1",
        "--lane-heartbeat-interval-s", "0.05", "--metrics-perf-requests-max", "20",
    ) as server:  # fmt: skip
        yield server


def scrape(server: Server) -> dict[str, float]:
    """Samples as `name{label=value,...}` to their values, over a new connection."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def counters(samples: dict[str, float]) -> dict[str, float]:
    """What rests when the server does, but for the scrapes themselves."""
    return {
        name: value
        for name, value in samples.items()
        if "_total" in name or "_count" in name or "_sum" in name or "_bucket" in name
        if "/metrics" not in name
    }


def of_acceptor(gauge: str, lane: int) -> str:
    return f"fastserve_{gauge}{{acceptor={lane}}}"


def complete(server: Server, **options: Any) -> Any:
    client = server.client()
    model = client.models.list().data[0].id
    return client.completions.create(model=model, prompt="one two three", **options)


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in after.items() if value != before[name]}


def test_sums_are_those_of_the_requests_made(server: Server) -> None:
    before = counters(scrape(server))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: complete(server, max_tokens=5), range(40)))
    list(complete(server, max_tokens=7, stream=True))
    # At once: who has all answers finds them all counted, except for what the engine tells later.
    changes = difference(counters(scrape(server)), before)
    assert changes["fastserve_http_requests_total{code=200,endpoint=/v1/completions}"] == 41
    assert changes["fastserve_request_success_total{finished_reason=length}"] == 41
    assert changes["fastserve_generation_tokens_total"] == 40 * 5 + 7
    prompt_tokens = answers[0].usage.prompt_tokens
    assert changes["fastserve_prompt_tokens_total"] == 41 * prompt_tokens
    assert changes["fastserve_e2e_request_latency_seconds_count"] == 41
    assert changes["fastserve_time_to_first_token_seconds_count"] == 41
    assert changes["fastserve_request_queue_time_seconds_count"] == 41
    assert changes["fastserve_request_prompt_tokens_sum"] == 41 * prompt_tokens
    assert changes["fastserve_request_generation_tokens_sum"] == 40 * 5 + 7
    # Of the one stream: between seven tokens are six gaps.
    assert changes["fastserve_inter_token_latency_seconds_count"] == 6
    tokens = "fastserve_engine_batch_size_sum"
    wait_until(lambda: scrape(server)[tokens] == before[tokens] + 40 * 5 + 7)
    changes = difference(counters(scrape(server)), before)
    steps = changes["fastserve_engine_steps_total"]
    assert 7 <= steps <= 40 * 5 + 7
    assert changes["fastserve_engine_step_time_seconds_count"] == steps


def test_whoever_is_asked_says_the_same(server: Server) -> None:
    wait_until(lambda: server.num_in_engine() == 0)
    resting = [counters(scrape(server)) for _ in range(3 * FRONTENDS)]
    # Asking for the number in the engine is a request too; nobody asks now.
    assert resting == [resting[0]] * len(resting)
    assert len(resting[0]) > 500


def test_refusals_are_counted_by_their_status(server: Server) -> None:
    before = counters(scrape(server))
    assert server.get("/nowhere")[0] == 404
    assert server.get("/v1/completions")[0] == 405
    with pytest.raises(Exception, match="temperature"):
        complete(server, temperature=9)
    changes = difference(counters(scrape(server)), before)
    assert changes["fastserve_http_requests_total{code=404,endpoint=other}"] == 1
    assert changes["fastserve_http_requests_total{code=405,endpoint=/v1/completions}"] == 1
    assert changes["fastserve_http_requests_total{code=400,endpoint=/v1/completions}"] == 1


def test_a_client_that_goes_is_counted_as_499(server: Server) -> None:
    before = counters(scrape(server))
    stream = complete(server, max_tokens=5000, stream=True)
    next(iter(stream))
    stream.close()
    name = "fastserve_http_requests_total{code=499,endpoint=/v1/completions}"
    wait_until(lambda: scrape(server)[name] == before[name] + 1)
    changes = difference(counters(scrape(server)), before)
    assert changes["fastserve_requests_aborted_total{reason=client_gone}"] == 1


def test_counters_do_not_step_back_when_an_acceptor_dies(server: Server) -> None:
    streams = [complete(server, max_tokens=8000, stream=True) for _ in range(2 * FRONTENDS)]
    for stream in streams:
        next(iter(stream))
    in_flight = [of_acceptor("requests_in_flight", n) for n in range(FRONTENDS)]
    wait_until(lambda: sum(scrape(server)[name] for name in in_flight) == len(streams))
    first = before = scrape(server)
    victim = server.find("acceptor 1")
    victim.kill()
    died = "fastserve_process_respawns_total{process=acceptor,reason=died}"

    def respawned() -> bool:
        nonlocal before
        after = scrape(server)
        older, newer = counters(before), counters(after)
        assert not {name for name in older if newer[name] < older[name]}
        before = after
        return after[died] == first[died] + 1 and server.find("acceptor 1").pid != victim.pid

    wait_until(respawned)
    # Its requests were aborted, and what it held is not counted among what is open now.
    lost = first[in_flight[1]]
    assert lost
    name = "fastserve_requests_aborted_total{reason=lane_closed}"
    wait_until(lambda: scrape(server)[name] == first[name] + lost)
    for stream in streams:
        stream.close()
    wait_until(lambda: server.num_in_engine() == 0)
    wait_until(lambda: not any(scrape(server)[name] for name in in_flight))


def test_gauges_tell_of_now(server: Server) -> None:
    streams = [complete(server, max_tokens=3000, stream=True) for _ in range(5)]
    for stream in streams:
        next(iter(stream))
    wait_until(lambda: scrape(server)["fastserve_num_requests_running"] == 5)
    in_flight = [of_acceptor("requests_in_flight", n) for n in range(FRONTENDS)]
    wait_until(lambda: sum(scrape(server)[name] for name in in_flight) == 5)
    for stream in streams:
        stream.close()
    wait_until(lambda: scrape(server)["fastserve_num_requests_running"] == 0)
    assert scrape(server)["fastserve_engine_up"] == 1
    assert 0 <= scrape(server)["fastserve_engine_heartbeat_age_seconds"] < 30


def perf_metrics(server: Server) -> list[dict[str, Any]]:
    with urllib.request.urlopen(server.url + "/perf_metrics", timeout=30) as answer:
        told: list[dict[str, Any]] = orjson.loads(answer.read())
    return told


def test_the_last_requests_are_told_by_whoever_is_asked_and_again(server: Server) -> None:
    asked = [complete(server, max_tokens=number) for number in range(1, 31)]
    wait_until(lambda: server.num_in_engine() == 0)
    told = [perf_metrics(server) for _ in range(2 * FRONTENDS)]
    assert told == [told[0]] * len(told)
    assert len(told[0]) == 20
    assert [each["completion_tokens"] for each in told[0]] == list(range(11, 31))
    assert asked[-1].usage.prompt_tokens == told[0][-1]["prompt_tokens"]
    for each in told[0]:
        timings = each["perf_metrics"]["timing_metrics"]
        names = ("server_arrival_time", "prepared_time", "arrival_time")
        in_order = [timings[name] for name in (*names, "first_token_time", "last_token_time")]
        assert in_order == sorted(in_order)
        assert timings["arrival_time"] <= timings["first_scheduled_time"]
        assert (each["status"], each["finish_reason"], each["stream"]) == (200, "length", False)
