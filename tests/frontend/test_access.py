"""Who may ask: keys, pages of other origins, and the path in front, around an application."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import orjson
import pytest

from fastserve.frontend.access import CORS, OPEN_PATHS, Access
from fastserve.http1.message import RequestHead, Response

if TYPE_CHECKING:
    from fastserve.http1.exchange import Exchange

ROUTES = {"/health": "GET", "/ready": "GET", "/metrics": "GET", "/v1/models": "GET"}
KEYS = ("first-key", "second-key")
PAGE = b"https://page.example"


def request(
    path: str = "/v1/models", *, method: str = "GET", **headers: bytes | str
) -> RequestHead:
    """A head; in names of headers, _ stands for -."""
    fields = tuple(
        (name.replace("_", "-").encode(), value.encode() if isinstance(value, str) else value)
        for name, value in headers.items()
    )
    return RequestHead(
        method=method,
        path=path,
        query="",
        minor=1,
        headers=fields,
        keep_alive=True,
        content_length=0,
        chunked=False,
    )


def preflight(path: str = "/v1/models", **headers: bytes | str) -> RequestHead:
    asked = {"access_control_request_method": "GET"} | headers
    return request(path, method="OPTIONS", **asked)


@dataclass
class App:
    """Knows some routes, and notes what reaches it."""

    checked: list[RequestHead] = field(default_factory=list)
    served: list[Any] = field(default_factory=list)

    def check(self, head: RequestHead) -> Response | None:
        self.checked.append(head)
        method = ROUTES.get(head.path)
        if method is None:
            return Response(404, body=b"{}")
        if head.method == "OPTIONS":
            return Response(204, headers=((b"Allow", b"OPTIONS, " + method.encode()),))
        return None

    def serve(self, exchange: Exchange) -> None:
        self.served.append(exchange)

    def error_body(self, status: int, message: str, *, path: str | None) -> bytes:
        return f"{status} {message} {path}".encode()


def fields_of(response: Response | None) -> dict[str, str]:
    assert response is not None
    return {name.decode(): value.decode() for name, value in response.headers}


# ---- keys


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer second-key"},
        {"authorization": "BEARER  first-key"},
        {"x_api_key": "first-key"},
        {"authorization": "Bearer wrong", "x_api_key": "second-key"},
        {"authorization": "Basic dTpw", "x_api_key": "second-key"},
    ],
    ids=str,
)
def test_a_valid_key_lets_a_request_through(headers: dict[str, str]) -> None:
    app = App()
    assert Access(app, api_keys=KEYS).check(request(**headers)) is None
    assert len(app.checked) == 1


@pytest.mark.parametrize(
    ("headers", "challenge"),
    [
        ({}, 'Bearer realm="fastserve"'),
        ({"authorization": "Basic dTpw"}, 'Bearer realm="fastserve"'),
        ({"authorization": "first-key"}, 'Bearer realm="fastserve"'),
        ({"authorization": "Bearer"}, 'Bearer realm="fastserve"'),
        ({"authorization": "Bearer wrong"}, 'Bearer realm="fastserve", error="invalid_token"'),
        ({"authorization": "Bearer "}, 'Bearer realm="fastserve", error="invalid_token"'),
        ({"authorization": "Bearer first-ke"}, 'Bearer realm="fastserve", error="invalid_token"'),
        ({"authorization": "Bearer first-key2"}, 'Bearer realm="fastserve", error="invalid_token"'),
        ({"authorization": "Bearer FIRST-KEY"}, 'Bearer realm="fastserve", error="invalid_token"'),
        ({"authorization": b"Bearer \xff"}, 'Bearer realm="fastserve", error="invalid_token"'),
        ({"x_api_key": ""}, 'Bearer realm="fastserve", error="invalid_token"'),
        ({"x_api_key": "Bearer first-key"}, 'Bearer realm="fastserve", error="invalid_token"'),
    ],
    ids=str,
)
def test_anything_else_is_401(headers: dict[str, Any], challenge: str) -> None:
    app = App()
    response = Access(app, api_keys=KEYS).check(request(**headers))
    assert response is not None
    assert response.status == 401
    assert fields_of(response) == {"WWW-Authenticate": challenge}
    error = orjson.loads(response.body)["error"]
    assert error["code"] == "invalid_api_key"
    assert error["type"] == "invalid_request_error"
    assert not app.checked, "the application hears nothing of it"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/no/such/route", "*"])
def test_every_route_needs_a_key_and_routes_that_are_none(path: str, method: str) -> None:
    response = Access(App(), api_keys=KEYS).check(request(path, method=method))
    assert response is not None
    assert response.status == 401


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_probes_need_none(path: str) -> None:
    assert Access(App(), api_keys=KEYS).check(request(path)) is None
    assert Access(App(), api_keys=KEYS).check(request(path, authorization="Bearer wrong")) is None


@pytest.mark.parametrize("path", ["/health/", "//health", "/health;x", "/Health", "/%68ealth"])
def test_what_only_resembles_a_probe_does(path: str) -> None:
    response = Access(App(), api_keys=KEYS).check(request(path))
    assert response is not None
    assert response.status == 401


def test_metrics_may_be_open() -> None:
    access = Access(App(), api_keys=KEYS, open_paths=OPEN_PATHS | {"/metrics"})
    assert access.check(request("/metrics")) is None


def test_without_keys_everybody_may_ask() -> None:
    assert Access(App()).check(request()) is None


# ---- the path in front


@pytest.mark.parametrize(
    ("path", "inner"),
    [
        ("/llm/v1/models", "/v1/models"),
        ("/v1/models", "/v1/models"),
        ("/llm", "/llm"),
        ("/llmv1/models", "/llmv1/models"),
        ("/llm/llm/v1/models", "/llm/v1/models"),
    ],
)
def test_the_root_path_is_taken_off(path: str, inner: str) -> None:
    app = App()
    access = Access(app, root_path="/llm")
    access.check(request(path))
    assert [head.path for head in app.checked] == [inner]
    exchange = SimpleNamespace(head=request(path), headers=())
    access.serve(cast("Exchange", exchange))
    assert app.served[0].head.path == inner


@pytest.mark.parametrize(
    ("path", "status"),
    [("/llm/health", None), ("/health", None), ("/llm/v1/models", 401), ("/llm/llm/health", 401)],
)
def test_keys_hold_under_a_root_path(path: str, status: int | None) -> None:
    response = Access(App(), api_keys=KEYS, root_path="/llm").check(request(path))
    assert (response and response.status) == status


# ---- pages of other origins


def test_with_cors_off_a_preflight_is_refused_and_answers_say_nothing() -> None:
    app = App()
    access = Access(app)
    response = access.check(preflight(origin=PAGE))
    assert response is not None
    assert response.status == 403
    assert not fields_of(response)
    assert orjson.loads(response.body)["error"]["code"] == "origin_not_allowed"
    assert access.check(request(origin=PAGE)) is None
    exchange = SimpleNamespace(head=request(origin=PAGE), headers=())
    access.serve(cast("Exchange", exchange))
    assert exchange.headers == ()


def test_a_preflight_is_answered_without_a_key() -> None:
    cors = CORS(allow_origins=(PAGE.decode(),), max_age_s=7.0)
    response = Access(App(), api_keys=KEYS, cors=cors).check(
        preflight(origin=PAGE, access_control_request_headers="authorization, x-stainless-os")
    )
    assert response is not None
    assert response.status == 204
    assert fields_of(response) == {
        "Vary": "Origin",
        "Access-Control-Allow-Origin": PAGE.decode(),
        "Allow": "OPTIONS, GET",
        "Access-Control-Allow-Methods": "OPTIONS, GET",
        "Access-Control-Max-Age": "7",
        "Access-Control-Allow-Headers": "authorization, x-stainless-os",
    }


def test_headers_may_be_named() -> None:
    cors = CORS(allow_origins=("*",), allow_headers=("authorization", "content-type"))
    response = Access(App(), cors=cors).check(
        preflight(origin=PAGE, access_control_request_headers="x-evil")
    )
    assert fields_of(response)["Access-Control-Allow-Headers"] == "authorization, content-type"


@pytest.mark.parametrize(
    "origin", [b"https://other.example", b"null", b"https://page.example.evil"]
)
def test_a_preflight_of_another_origin_is_refused(origin: bytes) -> None:
    cors = CORS(allow_origins=(PAGE.decode(),))
    response = Access(App(), cors=cors).check(preflight(origin=origin))
    assert response is not None
    assert response.status == 403
    assert fields_of(response) == {"Vary": "Origin"}


def test_a_preflight_of_no_route_is_404_that_the_page_may_read() -> None:
    cors = CORS(allow_origins=("*",))
    response = Access(App(), cors=cors).check(preflight("/nope", origin=PAGE))
    assert response is not None
    assert response.status == 404
    assert fields_of(response)["Access-Control-Allow-Origin"] == "*"


def test_options_without_an_origin_is_no_preflight() -> None:
    app = App()
    response = Access(app, cors=CORS(allow_origins=("*",))).check(
        request("/v1/models", method="OPTIONS")
    )
    assert fields_of(response) == {"Allow": "OPTIONS, GET"}
    response = Access(app, api_keys=KEYS).check(request("/v1/models", method="OPTIONS"))
    assert response is not None
    assert response.status == 401


@pytest.mark.parametrize(
    ("cors", "origin", "expected"),
    [
        (CORS(allow_origins=("*",)), PAGE, {"Access-Control-Allow-Origin": "*"}),
        (CORS(allow_origins=("*",)), None, {}),
        (CORS(allow_origins=(PAGE.decode(),)), None, {"Vary": "Origin"}),
        (CORS(allow_origins=(PAGE.decode(),)), b"https://other.example", {"Vary": "Origin"}),
        (
            CORS(
                allow_origins=(PAGE.decode(), "null"),
                allow_credentials=True,
                expose_headers=("X-Request-Id", "Retry-After"),
            ),
            PAGE,
            {
                "Vary": "Origin",
                "Access-Control-Allow-Origin": PAGE.decode(),
                "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
                "Access-Control-Allow-Credentials": "true",
            },
        ),
    ],
)
def test_answers_tell_the_browser_who_may_read_them(
    cors: CORS, origin: bytes | None, expected: dict[str, str]
) -> None:
    headers: dict[str, Any] = {} if origin is None else {"origin": origin}
    exchange = SimpleNamespace(head=request(**headers), headers=())
    Access(App(), cors=cors).serve(cast("Exchange", exchange))
    assert {name.decode(): value.decode() for name, value in exchange.headers} == expected


def test_a_page_may_read_its_refusal() -> None:
    access = Access(App(), api_keys=KEYS, cors=CORS(allow_origins=("*",)))
    refused = access.check(request(origin=PAGE))
    assert refused is not None
    assert refused.status == 401
    assert fields_of(refused)["Access-Control-Allow-Origin"] == "*"
    assert fields_of(refused)["WWW-Authenticate"].startswith("Bearer")


def test_refusals_of_the_layer_are_the_applications_to_render() -> None:
    access = Access(App(), root_path="/llm")
    for path in ("/llm/v1/models", "/v1/models"):
        assert access.error_body(413, "too large", path=path) == b"413 too large /v1/models"
    assert access.error_body(431, "too large", path=None) == b"431 too large None"
