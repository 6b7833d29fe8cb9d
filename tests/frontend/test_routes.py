"""Which route a path has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fastserve.frontend.routes import Route, Routes, parameter
from tests.frontend.stage import Asked

if TYPE_CHECKING:
    from fastserve.http1.exchange import Exchange


def serve(_: Exchange) -> None:
    raise AssertionError("nobody is served here")


ROUTES = Routes(
    Route(path="/things", handlers={"GET": serve, "POST": serve}),
    Route(path="/things/{thing}", handlers={"DELETE": serve}),
    Route(path="/things/all", handlers={"GET": serve}),
    Route(path="/things/{thing}/part", handlers={"GET": serve}),
)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/things", "/things"),
        ("/things/1", "/things/{thing}"),
        ("/things/a/b", "/things/{thing}"),
        ("/things/all", "/things/all"),
        ("/things/1/part", "/things/{thing}/part"),
        ("/things/a/b/part", "/things/{thing}/part"),
        ("/things/part", "/things/{thing}"),
        ("/things//part", "/things/{thing}"),
        ("/things/", None),
        ("/thing", None),
        ("/thingsandmore", None),
        ("", None),
    ],
)
def test_a_path_has_one_route_or_none(path: str, found: str | None) -> None:
    route = ROUTES.find(path)
    assert (route.path if route else None) == found


def test_head_comes_with_get() -> None:
    assert [route.methods for route in ROUTES.all] == [
        ("OPTIONS", "GET", "POST", "HEAD"), ("OPTIONS", "DELETE"), ("OPTIONS", "GET", "HEAD"),
        ("OPTIONS", "GET", "HEAD"),
    ]  # fmt: skip
    assert ROUTES.all[0].handler("HEAD") is serve


@pytest.mark.parametrize(
    ("path", "value"), [("/things/1", "1"), ("/things/a/b", "a/b"), ("/things/a%2Fb%20c", "a/b c")]
)
def test_the_parameter_is_percent_decoded(path: str, value: str) -> None:
    asked = Asked(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), b"")
    assert parameter(asked.exchange, "/things/{thing}") == value


def test_a_parameter_ends_where_the_path_goes_on() -> None:
    asked = Asked(b"GET /things/a%20b/part HTTP/1.1\r\nHost: x\r\n\r\n", b"")
    assert parameter(asked.exchange, "/things/{thing}/part") == "a b"
