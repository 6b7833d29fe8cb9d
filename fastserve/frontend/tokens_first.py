"""Tokens before requests: of a burst of requests, each is followed by a look at the lane.

A request takes an acceptor some thirty times as long as a token. An event loop that has forty of
them to read would leave every stream without its next token until it has read them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.http1.application import Application
    from fastserve.http1.exchange import Exchange
    from fastserve.http1.message import RequestHead, Response


class TokensFirst:
    """`app`, with a call of `look` after each request that it serves."""

    def __init__(self, app: Application, look: Callable[[], None]) -> None:
        self._app = app
        self._look = look

    def check(self, head: RequestHead) -> Response | None:
        return self._app.check(head)

    def serve(self, exchange: Exchange) -> None:
        self._app.serve(exchange)
        self._look()

    def error_body(self, status: int, message: str, *, path: str | None) -> bytes:
        return self._app.error_body(status, message, path=path)
