"""What an Answer knows of the frontend that it belongs to, and that of the engine: no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fastserve.errors import FastserveError
    from fastserve.frontend.observing import Observer
    from fastserve.frontend.streams import Answer
    from fastserve.generation import RequestId
    from fastserve.lane.messages import ToEngine
    from fastserve.metrics.meter import Meter


class Engine(Protocol):
    """The frontend's way to the engine: a lane."""

    def send(self, message: ToEngine) -> None: ...


class Registry(Protocol):
    """Who keeps the choices in flight by request id, and speaks to the engine for them."""

    def forget(self, request_id: RequestId) -> None: ...

    def abort(self, request_ids: list[RequestId]) -> None: ...

    def closed(self, answer: Answer) -> None: ...

    def rejected(self, error: FastserveError) -> None: ...

    @property
    def meter(self) -> Meter: ...

    @property
    def observer(self) -> Observer: ...
