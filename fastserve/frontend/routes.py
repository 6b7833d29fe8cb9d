"""Which route a path has, and what may be asked of it.

A route is a path, or a path that ends in a parameter: `/v1/models/{model}` is every path under
`/v1/models/`, however many segments follow, as names of models have slashes.

Knows nothing of what the handlers do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

from fastserve.api import responses

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.errors import FastserveError
    from fastserve.http1.exchange import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What is at a path: a handler for each method, and the words for what goes wrong there.

    `generates`: while there is no engine to serve it, it is refused by its head alone.
    """

    path: str
    handlers: dict[str, Callable[[Exchange], None]]
    error_body: Callable[[FastserveError], bytes] = responses.error_body
    generates: bool = False
    methods: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        also = ("HEAD",) if "GET" in self.handlers else ()
        object.__setattr__(self, "methods", ("OPTIONS", *self.handlers, *also))

    def handler(self, method: str) -> Callable[[Exchange], None]:
        """The handler of one of `methods`; HEAD is GET whose body is not sent."""
        return self.handlers["GET" if method == "HEAD" else method]


class Routes:
    """Every route of a server."""

    def __init__(self, *routes: Route) -> None:
        self.all = routes
        self._by_path = {route.path: route for route in routes}
        self._by_prefix = {
            route.path.partition("{")[0]: route for route in routes if "{" in route.path
        }

    def find(self, path: str) -> Route | None:
        """The route of a path as it was sent; None if there is none."""
        route = self._by_path.get(path)
        if route is None:
            for prefix, candidate in self._by_prefix.items():
                if path.startswith(prefix) and path != prefix:
                    return candidate
        return route


def parameter(exchange: Exchange, route_path: str) -> str:
    """What a request's path has in the place of the parameter, percent-decoded (RFC 3986 2.1)."""
    return unquote(exchange.head.path.removeprefix(route_path.partition("{")[0]))
