"""The routes of responses that were stored: to come back to one, and to have it forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from fastserve.api.input_items import input_items
from fastserve.api.response_objects import deleted, response_of
from fastserve.errors import FastserveError, InvalidRequest, NotFound
from fastserve.frontend.refusals import error_response
from fastserve.frontend.routes import Route, parameter
from fastserve.http1.message import Response

if TYPE_CHECKING:
    from fastserve.frontend.response_store import ResponseStore
    from fastserve.http1.exchange import Exchange
    from fastserve.metrics.meter import Meter

_RESPONSE = "/v1/responses/{response}"
_INPUT_ITEMS = f"{_RESPONSE}/input_items"
_CANCEL = f"{_RESPONSE}/cancel"


class Kept:
    """The handlers of these routes. `store` None: nothing was ever stored."""

    def __init__(self, store: ResponseStore | None, *, meter: Meter) -> None:
        self._store = store
        self._meter = meter
        self.routes = (
            Route(path=_RESPONSE, handlers={"GET": self._get, "DELETE": self._delete}),
            Route(path=_INPUT_ITEMS, handlers={"GET": self._input_items}),
            Route(path=_CANCEL, handlers={"POST": self._cancel}),
        )

    def _get(self, exchange: Exchange) -> None:
        response_id = parameter(exchange, _RESPONSE)
        record = self._store.get(response_id) if self._store else None
        if "true" in parse_qs(exchange.head.query).get("stream", ()):
            message = "'stream' is not supported: only a response as it ended is stored."
            self._refuse(exchange, InvalidRequest(message, param="stream"))
        elif record is None:
            self._refuse(exchange, _unknown(response_id))
        else:
            self._respond(exchange, Response(200, body=response_of(record)))

    def _delete(self, exchange: Exchange) -> None:
        response_id = parameter(exchange, _RESPONSE)
        if self._store is not None and self._store.delete(response_id):
            self._respond(exchange, Response(200, body=deleted(response_id)))
        else:
            self._refuse(exchange, _unknown(response_id))

    def _input_items(self, exchange: Exchange) -> None:
        response_id = parameter(exchange, _INPUT_ITEMS)
        record = self._store.get(response_id) if self._store else None
        try:
            if record is None:
                raise _unknown(response_id)
            query = {name: values[-1] for name, values in parse_qs(exchange.head.query).items()}
            body = input_items(record, response_id=response_id, query=query)
        except FastserveError as error:
            self._refuse(exchange, error, route=_INPUT_ITEMS)
        else:
            self._respond(exchange, Response(200, body=body), route=_INPUT_ITEMS)

    def _cancel(self, exchange: Exchange) -> None:
        response_id = parameter(exchange, _CANCEL)
        if self._store is None or self._store.get(response_id) is None:
            self._refuse(exchange, _unknown(response_id), route=_CANCEL)
            return
        # Whatever is stored has ended.
        message = "Only a response that was made in the background can be cancelled; none is here."
        self._refuse(exchange, InvalidRequest(message), route=_CANCEL)

    def _refuse(self, exchange: Exchange, error: FastserveError, *, route: str = _RESPONSE) -> None:
        self._respond(exchange, error_response(error), route=route)

    def _respond(self, exchange: Exchange, response: Response, *, route: str = _RESPONSE) -> None:
        self._meter.request(route, response.status)
        exchange.respond(response)


def _unknown(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id}' not found.")
