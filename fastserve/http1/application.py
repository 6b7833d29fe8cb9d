"""What the layer asks of whoever answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fastserve.http1.exchange import Exchange
    from fastserve.http1.message import RequestHead, Response


class Application(Protocol):
    """All three are called on the event loop, one at a time."""

    def check(self, head: RequestHead) -> Response | None:
        """Refuse a request by its head alone, before its body is read; None to go on.

        If a body was announced and has not come, the connection closes after the refusal.
        """

    def serve(self, exchange: Exchange) -> None:
        """Answer a whole request, now or later, through the exchange. Must not raise or block."""

    def error_body(self, status: int, message: str, *, path: str | None) -> bytes:
        """Render, as JSON, a refusal of the layer's own: 400, 408, 413, 414, 417, 431, 5xx.

        `path`: what was asked for; None where nobody can tell.
        """
