"""What a choice in flight asks of whoever keeps it: exchanges.py, or a stand-in of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fastserve.frontend.observing import Observer
    from fastserve.frontend.streams import Answer
    from fastserve.generation import RequestId
    from fastserve.metrics.meter import Meter


class Registry(Protocol):
    """Who keeps the choices in flight by request id, and speaks to the engine for them."""

    def forget(self, request_id: RequestId) -> None: ...

    def abort(self, request_ids: list[RequestId]) -> None: ...

    def closed(self, answer: Answer) -> None: ...

    @property
    def meter(self) -> Meter: ...

    @property
    def observer(self) -> Observer: ...
