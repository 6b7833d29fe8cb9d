"""Which route a path has, and what may be asked of it.

A route is a path, or a path with a parameter: `/v1/models/{model}` is every path under
`/v1/models/`, however many segments follow, as names of models have slashes.

Knows nothing of what the handlers do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

from fastserve.api import responses
from fastserve.api.anthropic_answers import error_body as messages_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.errors import FastserveError
    from fastserve.http1.exchange import Exchange


MESSAGES = "/v1/messages"


def error_words(path: str | None) -> Callable[[FastserveError], bytes]:
    """What renders the errors at a path: whoever asks for messages reads no errors of OpenAI's."""
    if path is not None and (path == MESSAGES or path.startswith(f"{MESSAGES}/")):
        return messages_error
    return responses.error_body


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What is at a path: a handler for each method, and the words for what goes wrong there.

    `generates`: while there is no engine to serve it, it is refused by its head alone.
    """

    path: str
    handlers: dict[str, Callable[[Exchange], None]]
    error_body: Callable[[FastserveError], bytes] = field(init=False)
    generates: bool = False
    methods: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        also = ("HEAD",) if "GET" in self.handlers else ()
        object.__setattr__(self, "methods", ("OPTIONS", *self.handlers, *also))
        object.__setattr__(self, "error_body", error_words(self.path))

    def handler(self, method: str) -> Callable[[Exchange], None]:
        """The handler of one of `methods`; HEAD is GET whose body is not sent."""
        return self.handlers["GET" if method == "HEAD" else method]


class Routes:
    """Every route of a server."""

    def __init__(self, *routes: Route) -> None:
        self.all = routes
        self._by_path = {route.path: route for route in routes}
        # The longest end comes first: what one route takes for its parameter may be another's end.
        self._by_ends = sorted(
            ((*_ends(route.path), route) for route in routes if "{" in route.path),
            key=lambda entry: -len(entry[1]),
        )

    def find(self, path: str) -> Route | None:
        """The route of a path as it was sent; None if there is none."""
        route = self._by_path.get(path)
        if route is None:
            for prefix, suffix, candidate in self._by_ends:
                least = len(prefix) + len(suffix)
                if len(path) > least and path.startswith(prefix) and path.endswith(suffix):
                    return candidate
        return route


def parameter(exchange: Exchange, route_path: str) -> str:
    """What a request's path has in the place of the parameter, percent-decoded (RFC 3986 2.1)."""
    prefix, suffix = _ends(route_path)
    return unquote(exchange.head.path.removeprefix(prefix).removesuffix(suffix))


def _ends(route_path: str) -> tuple[str, str]:
    """What stands before and after the parameter of a path."""
    prefix, _, rest = route_path.partition("{")
    return prefix, rest.partition("}")[2]
