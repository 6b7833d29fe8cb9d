"""Counts what is refused before it becomes an exchange: the outermost Application.

That costs a client nothing, and so it may come in thousands: its log lines are rate-limited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.log import get_logger
from fastserve.metrics.catalog import ADMISSION_REJECTIONS

if TYPE_CHECKING:
    from fastserve.http1.application import Application
    from fastserve.http1.exchange import Exchange
    from fastserve.http1.message import RequestHead, Response
    from fastserve.metrics.meter import Meter


log = get_logger("frontend")


class Metered:
    """`app`, with its refusals counted. Whoever answers an exchange counts that."""

    def __init__(self, app: Application, meter: Meter) -> None:
        self._app = app
        self._meter = meter

    def check(self, head: RequestHead) -> Response | None:
        response = self._app.check(head)
        if response is not None:
            self._meter.request(head.path, response.status)
            if response.status >= 400:
                log.info_burst(
                    "requests refused by their heads",
                    method=head.method,
                    path=head.path,
                    status=response.status,
                )
        return response

    def serve(self, exchange: Exchange) -> None:
        self._app.serve(exchange)

    def error_body(self, status: int, message: str, *, path: str | None) -> bytes:
        self._meter.request("other", status)
        if status == 503:  # http1's own: too many connections, or too much in their bodies
            self._meter.count(ADMISSION_REJECTIONS, "connections")
        log.info_burst("requests that were no HTTP, or too much", status=status, why=message)
        return self._app.error_body(status, message, path=path)
