"""What an adapter is: the one interface between the engine core and an inference library.

One thread calls all of it. A step may take long (a decode on a CPU takes 10 to 500 ms), so an
adapter never just blocks: it waits through the `pump` it is given, and the core uses that time to
take new messages. So `add` and `abort` may be called while `step` is waiting in `pump`, and at no
other moment than there or between steps.

Knows nothing of lanes, sockets, HTTP or text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from fastserve.generation import Finish, ModelCard, RequestId, TokenLogprob
    from fastserve.lane.messages import Submit


class Pump(Protocol):
    """Serve the lanes until `fd` is readable (True) or `timeout_s` seconds have passed (False)."""

    def __call__(self, *, fd: int | None = None, timeout_s: float = 0.0) -> bool: ...


@dataclass(slots=True)
class StepOutputs:
    """What one step added, in columns, over all lanes: see lane.messages.Outputs."""

    request_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] | None = None
    finishes: dict[int, Finish] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A look at the adapter's scheduler. `kv_cache_usage` is a share from 0 to 1.

    `prefix_cache_queries`: prompt tokens of all requests so far that might have been reused, and
    `prefix_cache_hits`: those that were. Both only grow.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class Engine(Protocol):
    """An adapter. The life of one: describe, load, then add/abort/step at will, close."""

    def describe(self) -> ModelCard:
        """Read what a frontend must know, before the weights. Raises StartError."""

    def load(self, progress: Callable[[float], None]) -> None:
        """Load the model, telling `progress` the share done, from 0 to 1. Raises StartError."""

    def add(self, request: Submit) -> None:
        """Take a request; it waits until there is room. Raises InvalidRequest or GenerationFailed
        for one that this engine can never run: the core answers it with a finish of ERROR."""

    def abort(self, request_ids: Collection[RequestId]) -> None:
        """Forget these requests now; no output follows. Unknown ids are no error."""

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self, pump: Pump) -> StepOutputs:
        """One iteration over the running batch. Every delta of it belongs to a live request."""

    def stats(self) -> EngineStats:
        """Cheap; called with every heartbeat."""

    def close(self) -> None:
        """Release the model and stop every thread. Called once, also after a failed load."""
