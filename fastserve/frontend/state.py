"""What an acceptor knows of the server it belongs to, and the one word that says it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastserve.errors import EngineDead, EngineStarting

if TYPE_CHECKING:
    from fastserve.frontend.liveness import Liveness
    from fastserve.frontend.model import Model


class ServingState:
    """`model` is None until the engine has said what it is."""

    __slots__ = ("draining", "liveness", "model")

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.model: Model | None = None
        self.draining = False

    @property
    def word(self) -> str:
        """One of dead, starting, stalled, draining, ready: the first that is so."""
        if self.liveness.dead is not None:
            return "dead"
        if self.model is None or not self.liveness.ready:
            return "starting"
        if self.liveness.stalled(now_s=time.monotonic()):
            return "stalled"
        return "draining" if self.draining else "ready"

    def loaded_model(self) -> Model:
        """Return the model, whether or not an engine can run it. Raises EngineStarting."""
        if self.model is None:
            raise EngineStarting("the model is still loading")
        return self.model

    def serving_model(self) -> Model:
        """Return the model if an engine is there to run it. Raises EngineDead, EngineStarting."""
        if self.liveness.dead is not None:
            raise EngineDead(self.liveness.dead)
        if self.model is None or not self.liveness.ready:
            raise EngineStarting("the model is still loading")
        return self.model
