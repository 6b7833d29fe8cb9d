"""What an adapter is: the one interface between the engine core and an inference library.

One thread calls all of it. A step may take long (a decode on a CPU takes 10 to 500 ms), so an
adapter never just blocks: it waits through the `pump` it is given, and the core uses that time to
take new messages. So `add`, `abort` and `stats` may be called while `step` is waiting in `pump`, or
`load` in `progress`; else only between those calls.

Each sentence below is a promise, and tests/engine/conformance has a case for it, which runs with
every adapter. Requests are those of generation.SamplingParams, ends those of generation.Finish.

Knows nothing of lanes, sockets, HTTP or text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from fastserve.errors import InvalidRequest
from fastserve.generation import Finish, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from fastserve.engine.admission import Queue
    from fastserve.errors import GenerationFailed
    from fastserve.generation import ModelCard, RequestId, TokenLogprob
    from fastserve.lane.messages import Submit


class Pump(Protocol):
    """Serve the lanes until `fd` is readable (True) or `timeout_s` seconds have passed (False).

    If it returns False before the time is up, the server stops: the step is to end, as it is.
    """

    def __call__(self, *, fd: int | None = None, timeout_s: float = 0.0) -> bool: ...


class StepOutputs(msgspec.Struct):
    """What one step added, in columns, over all lanes: see lane.messages.Outputs.

    `request_ids[i]` gets the next `counts[i]` of `token_ids` (`counts` None: one each), and nothing
    is left over. `finishes[i]` is there with a request's last entry, and with no other; an entry
    without tokens is an end alone. `logprobs[i]` has one value for each of those tokens where
    SamplingParams.logprobs is set, and is not there where it is not.
    """

    request_ids: list[int] = msgspec.field(default_factory=list)
    token_ids: list[int] = msgspec.field(default_factory=list)
    counts: list[int] | None = None
    finishes: dict[int, Finish] = msgspec.field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = msgspec.field(default_factory=dict)

    def end(self, request_id: int, finish: Finish) -> None:
        """End a request without a token, which takes a column of counts."""
        if self.counts is None:
            self.counts = [1] * len(self.request_ids)
        self.finishes[len(self.request_ids)] = finish
        self.request_ids.append(request_id)
        self.counts.append(0)


def finish_of(error: GenerationFailed | InvalidRequest) -> Finish:
    """The end of a request that fails with `error`."""
    return Finish(
        reason=FinishReason.ERROR,
        error=error.message,
        invalid=isinstance(error, InvalidRequest),
        param=error.param,
    )


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
        """Read what a frontend must know, before the weights. Raises StartError.

        The card has an existing tokenizer.json, and is the truth about `add`: ids up to vocab_size,
        sequences up to max_seq_len, grammars of grammar_kinds.
        """

    def load(self, progress: Callable[[float], None]) -> None:
        """Load the model, telling `progress` the share done: from 0 to 1, never less than before,
        and 1 before it returns. Raises StartError.

        Whatever `progress` raises ends the loading and comes out of here; close() follows.
        """

    def add(self, request: Submit) -> None:
        """Take a request, which waits until there is room for it; it counts in `stats` at once.

        Raises InvalidRequest, with the field's name in `param`, for what this engine can never run
        or would not heed: an empty prompt, one that leaves no room for an answer, token ids that
        the model has not, a grammar of no known kind, a script. Raises GenerationFailed for what
        fails. The core answers either with a finish of ERROR, and nothing of the request is left.
        Where the library finds out later, such a finish (`invalid`: the request's doing) comes
        from `step`.

        Exact ends: `max_tokens` tokens, or what the context has room for, end with LENGTH. A token
        that ends texts ends with STOP, and a stop id with STOP and `stop_token_id`; either is the
        last of the tokens, neither comes as one of the first `min_tokens`, and the former ends
        nothing with `ignore_eos`. Seeded requests of one prompt are equal, also in other company,
        and with other seeds they differ; so the choices of a request (`n`) are requests with seeds
        in a row. `temperature` 0 leaves nothing to chance. Among `logprobs` of N are the N
        likeliest, best first, and the chosen token's own value whether it is one of them or not.
        """

    def abort(self, request_ids: Collection[RequestId]) -> None:
        """Forget these requests now, waiting or running; no output of theirs follows, not even from
        the step that is under way, and the others' go on. Unknown and finished ones are no error.
        """

    def has_work(self) -> bool:
        """Whether `step` has anything to do: a request, or the engine's death to tell of."""

    def step(self, pump: Pump) -> StepOutputs:
        """One iteration over the running batch. Every delta of it belongs to a live request.

        Returns as soon as the pump gives up, and otherwise when the library has brought something,
        perhaps of nobody: it never waits but in the pump, so that who watches sees a step that does
        not end. Raises EngineDead once the library is gone, and with it every request; the failure
        of one request is a finish of ERROR, and the others go on.
        """

    def stats(self) -> EngineStats:
        """How many requests run and wait: together, those that were added and have not ended. Waits
        for nothing; called with every heartbeat, also before `load` and after the engine's death.
        """

    def queue(self) -> Queue:
        """What was added and has no place in the running batch, nor will with the next step.
        Cheap; called with every request if there is a limit."""

    def close(self) -> None:
        """Release the model, end every thread, close every descriptor. Takes seconds at most.

        Called once and last, at any time: before `load`, after it failed, with requests in flight,
        after the engine's death, of which it may leave behind what the process's end takes. Twice
        is no harm.
        """
