"""What crosses a lane: every message, who sends it to whom, and what answers it.

Requests and tokens as numbers, never text. A message of tokens is in columns, so that a step's
outputs for a lane cost one message whatever their number. What there are many of is a Struct: a
frozen dataclass sets its fields one by one, which takes ten times as long.

Knows nothing of bytes (codec.py) or sockets (client.py, server.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.generation import Finish, ModelCard, RequestId, SamplingParams, TokenLogprob


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptor -> engine: generate. Answered by Outputs, of which the last finishes the request.

    `embed`: make an embedding instead, which comes with the finish; `sampling` then says nothing.
    `gather`: nobody reads the tokens as they come, so send them all at once with the finish.
    `sim`: a script for the simulated engine, which no other engine accepts. `trace_headers`: those
    of W3C Trace Context, for an engine that makes spans of its own.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    gather: bool = False
    sim: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    embed: bool = False


class SubmitGroup(msgspec.Struct, frozen=True):
    """Acceptor -> engine: generate all of these, or none. Answered as each Submit is.

    They are one exchange's. Which of them there is no room for is decided for all at once.
    """

    submits: list[Submit]


class Abort(msgspec.Struct, frozen=True):
    """Acceptor -> engine: the client has gone. Not answered; no harm if already finished."""

    request_ids: list[RequestId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Acceptor -> engine: answer `lane` at `address` from now on. Answered by Attached.

    What an earlier incarnation of the lane had in flight is aborted; an Attach or a Detach of an
    earlier incarnation than the present one comes late and is ignored.
    """

    lane: int
    incarnation: int
    address: str


@dataclass(frozen=True, slots=True)
class Attached:
    """Engine -> acceptor: the lane is yours, and this is the model. Heartbeats follow."""

    card: ModelCard


@dataclass(frozen=True, slots=True)
class Detach:
    """Acceptor -> engine: the lane's last message (or, of one that died, the supervisor's word).

    Not answered. What the lane has in flight is aborted.
    """

    lane: int
    incarnation: int


class Outputs(msgspec.Struct, frozen=True, kw_only=True):
    """Engine -> acceptor: what one step added to the requests of this lane, in columns.

    `request_ids[i]` gets the next `counts[i]` of `token_ids` (`counts` None: one each). A request
    may be there more than once, in order. `finishes[i]` is there if that ended it, and
    `logprobs[i]` has one entry per token, if asked for.
    `prompt_logprobs[i]` comes once, with or before the first token: one entry for each token of the
    prompt but the first, which nothing comes before.
    """

    request_ids: list[int]
    token_ids: list[int]
    counts: list[int] | None = None
    finishes: dict[int, Finish] = msgspec.field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Engine -> every acceptor and the supervisor, once a second: alive, and how busy.

    `steps` counts finished steps: one that stands still while there is work is a stall.
    `kv_cache_usage` is a share from 0 to 1. `ready`: the model is loaded. `prefix_cache_queries`
    and `prefix_cache_hits` are tokens since the engine began, as in EngineStats.
    """

    ready: bool
    num_running: int
    num_waiting: int
    steps: int
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


ToEngine = Submit | SubmitGroup | Abort | Attach | Detach
ToAcceptor = Outputs | Attached | Heartbeat
