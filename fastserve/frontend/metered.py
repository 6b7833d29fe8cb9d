"""Counts what is refused before it becomes an exchange: the outermost Application."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.http1.application import Application
    from fastserve.http1.exchange import Exchange
    from fastserve.http1.message import RequestHead, Response
    from fastserve.metrics.meter import Meter


class Metered:
    """`app`, with its refusals counted. Whoever answers an exchange counts that."""

    def __init__(self, app: Application, meter: Meter) -> None:
        self._app = app
        self._meter = meter

    def check(self, head: RequestHead) -> Response | None:
        response = self._app.check(head)
        if response is not None:
            self._meter.request(head.path, response.status)
        return response

    def serve(self, exchange: Exchange) -> None:
        self._app.serve(exchange)

    def error_body(self, status: int, message: str) -> bytes:
        self._meter.request("other", status)
        return self._app.error_body(status, message)
