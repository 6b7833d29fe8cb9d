"""What the server says about itself: health, readiness, version, models, metrics, last requests.

Every acceptor answers for the whole server. None of it asks the engine anything, so a probe is
answered at once however busy that is.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastserve import __version__
from fastserve.api import openapi, responses
from fastserve.errors import FastserveError
from fastserve.frontend.page import page
from fastserve.frontend.prepare import check_model
from fastserve.frontend.refusals import error_response
from fastserve.frontend.routes import Route, parameter
from fastserve.http1.message import Response
from fastserve.metrics.exposition import CONTENT_TYPE, expose
from fastserve.metrics.perf import render

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.frontend.state import ServingState
    from fastserve.http1.exchange import Exchange
    from fastserve.metrics.board import Board
    from fastserve.metrics.exposition import ServerInfo
    from fastserve.metrics.meter import Meter


_MODEL = "/v1/models/{model}"


class About:
    """The handlers of these routes. `in_thread` runs what may take milliseconds off the loop.

    `shows_page`: whether there is a page for people at `/`.
    """

    def __init__(
        self,
        state: ServingState,
        *,
        board: Board,
        info: ServerInfo,
        meter: Meter,
        in_thread: Callable[[Callable[[], bytes], Callable[[bytes], None]], None],
        shows_page: bool = False,
    ) -> None:
        self._state = state
        self._board = board
        self._info = info
        self._meter = meter
        self._in_thread = in_thread
        handlers = {
            "/health": self._health,
            "/ready": self._ready,
            "/version": self._version,
            "/v1/models": self._models,
            _MODEL: self._one_model,
            "/metrics": self._metrics,
            "/perf_metrics": self._perf_metrics,
            "/openapi.json": self._openapi,
        }
        if shows_page:
            self._page = page()
            handlers["/"] = lambda exchange: self._respond(exchange, self._page)
        self.routes = [
            Route(path=path, handlers={"GET": handler}) for path, handler in handlers.items()
        ]

    def _health(self, exchange: Exchange) -> None:
        """200 while what runs is worth keeping; draining is."""
        word = self._state.word
        self._respond(exchange, self._status(200 if word in ("ready", "draining") else 503, word))

    def _ready(self, exchange: Exchange) -> None:
        """200 while new requests are welcome."""
        word = self._state.word
        self._respond(exchange, self._status(200 if word == "ready" else 503, word))

    def _status(self, status: int, word: str) -> Response:
        heartbeat = self._state.liveness.heartbeat
        body = b'{"status":"%b","num_running":%d,"num_waiting":%d}' % (
            word.encode(),
            heartbeat.num_running if heartbeat else 0,
            heartbeat.num_waiting if heartbeat else 0,
        )
        return Response(status, body=body)

    def _version(self, exchange: Exchange) -> None:
        self._respond(exchange, Response(200, body=responses.version(__version__)))

    def _openapi(self, exchange: Exchange) -> None:
        # The first time it is made, which takes 10 ms.
        self._in_thread(
            lambda: openapi.document(__version__),
            lambda body: self._respond(exchange, Response(200, body=body)),
        )

    def _models(self, exchange: Exchange) -> None:
        try:
            model = self._state.loaded_model()
        except FastserveError as error:
            self._respond(exchange, error_response(error))
            return
        body = responses.models(
            model.names, created=model.created, max_seq_len=model.card.max_seq_len
        )
        self._respond(exchange, Response(200, body=body))

    def _one_model(self, exchange: Exchange) -> None:
        try:
            model = self._state.loaded_model()
            name = parameter(exchange, _MODEL)
            check_model(name, model)
        except FastserveError as error:
            self._respond(exchange, error_response(error), endpoint=_MODEL)
            return
        body = responses.model(name, created=model.created, max_seq_len=model.card.max_seq_len)
        self._respond(exchange, Response(200, body=body), endpoint=_MODEL)

    def _metrics(self, exchange: Exchange) -> None:
        # Counted first, so that a scrape counts itself and two in a row differ by one.
        self._meter.request("/metrics", 200)
        model = self._state.model
        name = model.card.name if model else ""
        self._in_thread(
            lambda: expose(
                self._board.all_numbers(), info=self._info, model=name, now_s=time.monotonic()
            ),
            lambda text: exchange.respond(Response(200, body=text, content_type=CONTENT_TYPE)),
        )

    def _perf_metrics(self, exchange: Exchange) -> None:
        rings, records_max = self._board.all_recent(), self._board.recent_max
        self._in_thread(
            lambda: render(rings, records_max=records_max),
            lambda body: self._respond(exchange, Response(200, body=body)),
        )

    def _respond(
        self, exchange: Exchange, response: Response, *, endpoint: str | None = None
    ) -> None:
        self._meter.request(endpoint or exchange.head.path, response.status)
        exchange.respond(response)
