from __future__ import annotations

import itertools

import pytest

from fastserve.load.build import LoadError
from fastserve.load.plan import Plan, Request, Send, poisson, read_trace, target_of

ENDPOINT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("url", "host", "port", "path", "models_path"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, ENDPOINT, "/v1/models"),
        ("http://localhost:8000/", "localhost", 8000, ENDPOINT, "/v1/models"),
        ("http://a.b/v1", "a.b", 80, ENDPOINT, "/v1/models"),
        ("http://[::1]:8000/v1/", "::1", 8000, ENDPOINT, "/v1/models"),
        ("http://a/llm/v1/completions", "a", 80, "/llm/v1/completions", "/llm/v1/models"),
        (f"http://a/x{ENDPOINT}", "a", 80, f"/x{ENDPOINT}", "/x/v1/models"),
    ],
)
def test_a_url_names_a_server_its_v1_or_an_endpoint(
    url: str, host: str, port: int, path: str, models_path: str
) -> None:
    target = target_of(url)
    assert (target.host, target.port) == (host, port)
    assert (target.path, target.models_path) == (path, models_path)


@pytest.mark.parametrize("url", ["https://a", "localhost:8000", "http://", ""])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(LoadError, match="http://"):
        target_of(url)


def test_a_request_carries_the_key_and_its_length() -> None:
    request = target_of("http://[::1]:8000", api_key="secret").request(b"{}")
    assert request == (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]:8000\r\n"
        b"Content-Type: application/json\r\nAuthorization: Bearer secret\r\n"
        b"Content-Length: 2\r\n\r\n{}"
    )


def plan(*, sends: tuple[Send, ...] = (), connections: int = 5) -> Plan:
    return Plan(
        target=target_of("http://127.0.0.1:8000"),
        requests=(Request(body=b"{}", expected_chunks=3), Request(body=b"[]")),
        sends=sends,
        connections=connections,
        ramp_s=0.5,
        warm_s=1.0,
        window_s=2.0,
        drain_s=4.0,
    )


def test_a_rendered_plan() -> None:
    rendered = plan(sends=(Send(0.25, 1),)).render(begin_ns=10**9)
    head = target_of("http://127.0.0.1:8000").request(b"")[: -len(b"0\r\n\r\n")]
    assert (
        rendered.decode().splitlines()
        == (
            "server 127.0.0.1 8000\nconnections 5\nbegin_ns 1000000000\nramp_ns 500000000\n"
            "window_begin_ns 2000000000\nwindow_end_ns 4000000000\ngive_up_ns 8000000000\n"
            f"request {len(head) + 7} 3\n{head.decode()}2\r\n\r\n{{}}\n"
            f"request {len(head) + 7} 0\n{head.decode()}2\r\n\r\n[]\n"
            "send 250000000 1\ngo\n"
        ).splitlines()
    )


def test_the_parts_of_a_closed_loop_have_all_its_connections_and_begin_elsewhere() -> None:
    parts = [plan().part(index, of=2) for index in range(2)]
    assert [part.connections for part in parts] == [3, 2]
    assert [part.requests[0].body for part in parts] == [b"{}", b"[]"]


def test_the_parts_of_an_open_loop_have_all_its_sends() -> None:
    sends = tuple(Send(at / 10, 0) for at in range(5))
    parts = [plan(sends=sends).part(index, of=2) for index in range(2)]
    assert [[send.at_s for send in part.sends] for part in parts] == [[0, 0.2, 0.4], [0.1, 0.3]]
    assert all(part.requests == plan().requests for part in parts)


def test_poisson_has_its_rate_and_gaps_of_chance() -> None:
    sends = poisson(rate_per_s=100, duration_s=100, num_requests=3, seed=1)
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(sends)]
    mean_s = sum(gaps) / len(gaps)
    deviation_s = (sum((gap - mean_s) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    # Of an exponential distribution both are 1 / rate.
    assert mean_s == pytest.approx(0.01, rel=0.05)
    assert deviation_s == pytest.approx(0.01, rel=0.05)
    assert sends[0].at_s > 0
    assert sends[-1].at_s < 100
    assert {send.request for send in sends} == {0, 1, 2}
    assert poisson(rate_per_s=100, duration_s=100, num_requests=3, seed=1) == sends
    assert poisson(rate_per_s=100, duration_s=100, num_requests=3, seed=2) != sends


def test_a_trace_is_replayed_in_the_order_of_its_times() -> None:
    requests, sends = read_trace(['{"at_s": 2, "body": {"n": 2}}', "", '{"at_s": 0.5, "body": {}}'])
    assert sends == [Send(0.5, 0), Send(2.0, 1)]
    assert [request.body for request in requests] == [b"{}", b'{"n": 2}']


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"at_s": 1}',
        '{"at_s": "soon", "body": {}}',
        '{"at_s": -1, "body": {}}',
        '{"at_s": NaN, "body": {}}',
        '{"at_s": Infinity, "body": {}}',
        '{"at_s": 1, "body": "{}"}',
    ],
)
def test_a_bad_line_of_a_trace_is_named(line: str) -> None:
    with pytest.raises(LoadError, match="line 2"):
        read_trace(['{"at_s": 0, "body": {}}', line])


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(LoadError, match="no requests"):
        read_trace(["", "\n"])
