"""Keys, origins, paths and the wire's manners, over real sockets and every acceptor."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.harness import DEADLINE_S, Server, failing, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "hunter2-is-secret"
FILE_KEY = "from-the-file"
PAGE = "https://page.example"
SIM = ("--engine", "sim", "--sim-step-ms", "1", "--served-model-name", "m")
ROUTES = [
    ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("GET", "/version"), ("GET", "/metrics"), ("GET", "/no/such"), ("OPTIONS", "/v1/models"),
    ("OPTIONS", "*"), ("HEAD", "/v1/models"), ("DELETE", "/v1/completions"),
    ("GET", "/perf_metrics"),
]  # fmt: skip


class Answer:
    """An answer, read whole."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def ask(
    server: Server,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        return Answer(connection.getresponse())
    finally:
        connection.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# a comment\n{FILE_KEY}\n")
    with Server(
        *SIM, "--frontends", "4", "--api-key-file", str(path), "--root-path", "/llm",
        "--cors-allow-origins", PAGE,
        environment={"FASTSERVE_API_KEY": KEY},
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with Server(*SIM, "--frontends", "2", "--http-body-bytes-max", "100000") as server:
        yield server


# ---- keys


@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_a_key(guarded: Server, method: str, path: str, root: str) -> None:
    for headers in ({}, bearer("wrong"), {"x-api-key": "wrong"}):
        answer = ask(guarded, method, path if path == "*" else root + path, headers=headers)
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        if method != "HEAD":
            assert answer.error["code"] == "invalid_api_key"


@pytest.mark.parametrize("root", ["", "/llm"])
def test_probes_need_none(guarded: Server, root: str) -> None:
    assert ask(guarded, "GET", f"{root}/health").status == 200
    assert ask(guarded, "HEAD", f"{root}/ready").status == 200


@pytest.mark.parametrize("root", ["", "/llm"])
def test_the_page_needs_none_since_it_asks_for_one(guarded: Server, root: str) -> None:
    page = ask(guarded, "GET", f"{root}/")
    assert page.status == 200
    assert KEY.encode() not in page.body


def test_every_acceptor_compares_every_key(guarded: Server) -> None:
    """D-11: 200 requests on 200 connections, so that each of four acceptors has many."""
    valid = [bearer(KEY), bearer(FILE_KEY), {"x-api-key": KEY}, {"Authorization": f"bearer {KEY}"}]
    wrong = [{}, bearer(KEY[:-1]), bearer(KEY + "x"), bearer(KEY.upper()), {"x-api-key": "x"}]

    def status(headers: dict[str, str]) -> int:
        return ask(guarded, "GET", "/v1/models", headers=headers).status

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(status, valid * 25)) == {200}
        assert set(pool.map(status, wrong * 20)) == {401}


@pytest.mark.parametrize("root", ["", "/llm"])
def test_openais_client_has_its_key(guarded: Server, root: str) -> None:
    base_url = f"{guarded.url}{root}/v1"
    with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        assert client.models.list().data[0].id == "m"
        assert list(client.completions.create(model="m", prompt="a", max_tokens=3, stream=True))
    with (
        openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refusal,
    ):
        client.models.list()
    assert refusal.value.code == "invalid_api_key"


def test_a_body_is_not_read_for_who_has_no_key(guarded: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=DEADLINE_S)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(10 << 20))
    connection.putheader("Expect", "100-continue")
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 401
    assert answer.headers["Connection"] == "close"
    connection.close()


def test_keys_show_nowhere(guarded: Server) -> None:
    """Not in ps, not in what the children inherit, not in the log."""
    for process in guarded.remember_processes().values():
        words = " ".join(process.cmdline())
        assert KEY not in words
        if process.pid != guarded.process.pid:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes().decode()
            assert KEY not in environ
            assert FILE_KEY not in environ
    assert KEY not in guarded.log
    assert FILE_KEY not in guarded.log


def test_keys_from_flags_are_gone_from_ps_once_it_serves() -> None:
    with Server(*SIM, "--api-key", KEY, "--api-key", "another", "--metrics-open") as server:
        assert not [each for each in server.remember_processes() if KEY in each]
        for key in (KEY, "another"):
            assert ask(server, "GET", "/v1/models", headers=bearer(key)).status == 200
        # Open, whether there is such a route or not.
        assert ask(server, "GET", "/metrics").status != 401


def test_the_printed_configuration_shows_no_key() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "fastserve", "--print-config", "--api-key", KEY],
        env=os.environ | {"FASTSERVE_API_KEY": FILE_KEY},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert KEY not in printed
    assert FILE_KEY not in printed
    assert 'api_key = ["(not shown)"]' in printed


def test_a_new_key_file_comes_in_with_hup(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old")
    with Server(*SIM, "--frontends", "1", "--api-key-file", str(path)) as server:

        def status(key: str) -> int:
            return ask(server, "GET", "/v1/models", headers=bearer(key)).status

        assert (status("old"), status("new")) == (200, 401)
        for text in ("new", ""):  # emptied by mistake, it must not open the server
            path.write_text(text)
            before = server.find("acceptor 0").pid
            server.process.send_signal(signal.SIGHUP)
            _wait_replaced(server, before)
            wait_until(lambda: server.get("/ready")[0] == 200)
            assert (status("old"), status("new")) == (401, 200)
        assert "credentials unchanged" in server.log


def _wait_replaced(server: Server, pid: int) -> None:
    wait_until(lambda: server.find("acceptor 0").pid != pid)


def test_a_key_file_that_is_missing_is_refused() -> None:
    with failing(*SIM, "--api-key-file", "/no/such/file") as server:
        assert server.wait_exit() == 2
        assert "server.api_key_file: /no/such/file" in server.log


# ---- pages of other origins

ASK = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


def test_a_page_that_is_allowed_may_use_the_server(guarded: Server) -> None:
    """D-18: the preflight needs no key."""
    answer = ask(guarded, "OPTIONS", "/v1/completions", headers=ASK)
    assert answer.status == 204
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    page = {"Origin": PAGE, "Content-Type": "application/json"}
    for stream in (True, False):
        body = json.dumps({"model": "m", "prompt": "a", "max_tokens": 3, "stream": stream})
        answer = ask(
            guarded, "POST", "/v1/completions", body=body.encode(), headers=page | bearer(KEY)
        )
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
        assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
        assert answer.headers["Vary"] == "Origin"
    refused = ask(guarded, "POST", "/v1/completions", body=b"{}", headers=page)
    assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (401, PAGE)


def test_another_page_may_not(guarded: Server) -> None:
    answer = ask(guarded, "OPTIONS", "/v1/completions", headers=ASK | {"Origin": "https://evil"})
    assert answer.status == 403
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_by_default_no_page_may(plain: Server) -> None:
    answer = ask(plain, "OPTIONS", "/v1/completions", headers=ASK)
    assert answer.status == 403
    assert answer.error["code"] == "origin_not_allowed"
    answer = ask(plain, "GET", "/health", headers={"Origin": PAGE})
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


# ---- the wire's manners


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/nope", 404, None),  # B-26
        ("POST", "/v1/nope", 404, None),
        ("GET", "/v1%2Fmodels", 404, None),  # D-06: a route is matched as it was sent
        ("GET", "/v1/completions", 405, {"OPTIONS", "POST"}),
        ("DELETE", "/v1/models", 405, {"GET", "HEAD", "OPTIONS"}),
        ("POST", "/health", 405, {"GET", "HEAD", "OPTIONS"}),
        ("PATCH", "/nope", 404, None),
        ("TRACE", "/health", 501, None),
    ],
)
def test_no_such_route_or_method_is_json(
    plain: Server, method: str, path: str, status: int, allow: set[str] | None
) -> None:
    answer = ask(plain, method, path)
    assert answer.status == status
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.error["message"]
    if allow is not None:
        assert set(answer.headers["Allow"].split(", ")) == allow


def test_head_and_options(plain: Server) -> None:
    head = ask(plain, "HEAD", "/health")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["Content-Length"]) == len(ask(plain, "GET", "/health").body)
    for path in ("/v1/completions", "*"):
        options = ask(plain, "OPTIONS", path)
        assert options.status == 204
        assert "POST" in options.headers["Allow"]
        assert "Access-Control-Allow-Origin" not in options.headers
    assert ask(plain, "GET", "/health?query=1").status == 200


def test_a_request_id_is_echoed_if_it_is_proper_and_made_otherwise(plain: Server) -> None:
    assert (
        ask(plain, "GET", "/health", headers={"X-Request-Id": "my-id.1"}).headers["X-Request-Id"]
        == "my-id.1"
    )
    made = {
        ask(plain, "GET", "/health", headers=headers).headers["X-Request-Id"]
        for headers in ({}, {}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 200})
    }
    assert len(made) == 4
    assert all(0 < len(each) < 64 for each in made)


BODY = b'{"model":"m","prompt":"a","max_tokens":1}'


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "APPLICATION/JSON"}, 200),
        ({}, 200),  # B-03: taken for JSON
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Encoding": "identity"}, 200),
    ],
    ids=str,
)
def test_media_types(plain: Server, headers: dict[str, str], status: int) -> None:
    answer = ask(plain, "POST", "/v1/completions", body=BODY, headers=headers)
    assert answer.status == status
    if status != 200:
        assert answer.error["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'"s"', b"123", b"null", b"true", b"{", b"{}}",  # B-02
        b'{"prompt":"\xc4\xe3"}',  # B-04: GBK
        b'{"temperature":NaN}', b'{"temperature":Infinity}', b'{"temperature":1e400}',  # B-06
        b"\xef\xbb\xbf{}",
        b'{"prompt":"\\ud800"}',
        b"[" * 40_000 + b"]" * 40_000,  # B-01
        b'{"prompt":' + b"[" * 40_000 + b"]" * 40_000 + b"}",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    ],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_a_body_that_is_no_request_is_400(plain: Server, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = ask(plain, "POST", path, body=body, headers={"Content-Type": "application/json"})
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"
        assert "orjson" not in answer.error["message"]
    assert "raceback" not in plain.log


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(plain: Server) -> None:
    """B-19: declared, and without end. D-04: instead of 100 Continue."""
    for headers in ({"Content-Length": str(10 << 30)}, {"Content-Length": "100001"}):
        for expect in ({}, {"Expect": "100-continue"}):
            connection = http.client.HTTPConnection("127.0.0.1", plain.port, timeout=DEADLINE_S)
            connection.putrequest("POST", "/v1/completions")
            for name, value in (headers | expect).items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            assert answer.status == 413
            assert answer.headers["Connection"] == "close"
            connection.close()


def test_a_body_without_end_is_refused_and_costs_no_memory(plain: Server) -> None:
    acceptors = [plain.find(f"acceptor {lane}") for lane in range(2)]
    before_bytes = sum(process.memory_info().rss for process in acceptors)
    connection = http.client.HTTPConnection("127.0.0.1", plain.port, timeout=DEADLINE_S)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    began_s = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() < began_s + DEADLINE_S:
            connection.send(b"2000\r\n%b\r\n" % bytes(0x2000))
    connection.close()
    # What comes after the refusal is read and dropped, for two seconds at most.
    assert time.monotonic() - began_s < 15
    after_bytes = sum(process.memory_info().rss for process in acceptors)
    assert after_bytes - before_bytes < 4 << 20


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_a_chunked_body_is_like_any_other(plain: Server, size: int) -> None:
    """B-20: with extensions and trailers."""
    chunks = [BODY[at : at + size] for at in range(0, len(BODY), size)]
    wire = b"".join(b"%x;x=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    connection = http.client.HTTPConnection("127.0.0.1", plain.port, timeout=DEADLINE_S)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    connection.send(wire + b"0\r\nX-Trailer: 1\r\n\r\n")
    answer = connection.getresponse()
    assert answer.status == 200
    assert json.loads(answer.read())["choices"][0]["finish_reason"] == "length"
    connection.close()
