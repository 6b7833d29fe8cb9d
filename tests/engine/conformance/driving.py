"""The engine core's part, played by hand; of every step it checks what must always hold."""

from __future__ import annotations

import itertools
import select
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve.generation import RequestId, SamplingParams
from fastserve.lane.messages import Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastserve.engine.interface import Engine, StepOutputs
    from fastserve.generation import Finish, ModelCard, TokenLogprob

DEADLINE_S = 60.0
PROMPT = (40, 41, 42, 43)

# Request ids are never used twice, also where cases share an engine.
_numbers = itertools.count(1)


def pump(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
    """A pump that has no lanes to serve."""
    return bool(select.select([] if fd is None else [fd], [], [], max(timeout_s, 0.0))[0])


@dataclass(slots=True)
class Answer:
    """What came of a request. `finish` None: it has not ended."""

    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None


@dataclass(slots=True)
class Driver:
    """An engine that is loaded, and who is live in it."""

    engine: Engine
    card: ModelCard
    live: dict[int, Answer] = field(default_factory=dict)

    def add(self, prompt: Iterable[int] = PROMPT, **fields: Any) -> RequestId:
        """Add a request: greedy, of 8 tokens and without an end, unless `fields` say otherwise."""
        request_id = RequestId(next(_numbers))
        script = fields.pop("sim", None)
        sampling = SamplingParams(
            **{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **fields}
        )
        answer = Answer(sampling)
        self.engine.add(
            Submit(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling=sampling,
                sim=script,
            )
        )
        self.live[request_id] = answer
        return request_id

    def abort(self, *request_ids: RequestId) -> None:
        self.engine.abort(request_ids)
        for request_id in request_ids:
            self.live.pop(request_id, None)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> dict[int, Answer]:
        """One step; return what it ended. `meanwhile` runs at its first wait in the pump."""
        waiting = iter([meanwhile])

        def pump_once(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
            next(waiting, lambda: None)()
            return pump(fd=fd, timeout_s=timeout_s)

        return self.take(self.engine.step(pump_once))

    def in_a_step(self, action: Callable[[], None]) -> None:
        """Step until `action` has run in the pump: a step that need not wait does without."""
        done: list[bool] = []

        def once() -> None:
            action()
            done.append(True)

        for _ in range(1000):
            if done:
                return
            self.step(once)
        assert done, "no step waits"

    def take(self, outputs: StepOutputs) -> dict[int, Answer]:
        """Read the columns of a step, in which nothing may be that should not."""
        counts = outputs.counts or [1] * len(outputs.request_ids)
        assert len(counts) == len(outputs.request_ids)
        assert sum(counts) == len(outputs.token_ids)
        assert {*outputs.finishes, *outputs.logprobs} <= set(range(len(counts)))
        ended: dict[int, Answer] = {}
        tokens = iter(outputs.token_ids)
        for index, request_id in enumerate(outputs.request_ids):
            assert request_id in self.live, "who is not live gets nothing"
            answer = self.live[request_id]
            told = list(itertools.islice(tokens, counts[index]))
            assert all(0 <= token_id < self.card.vocab_size for token_id in told)
            answer.tokens += told
            logprobs = outputs.logprobs.get(index, [])
            assert len(logprobs) == (0 if answer.sampling.logprobs is None else len(told))
            answer.logprobs += logprobs
            if index in outputs.finishes:
                answer.finish = _without_measures(outputs.finishes[index])
                ended[request_id] = self.live.pop(request_id)
        self.check_stats()
        return ended

    def check_stats(self) -> None:
        stats = self.engine.stats()
        assert stats.num_running + stats.num_waiting == len(self.live)
        assert 0.0 <= stats.kv_cache_usage <= 1.0
        assert self.engine.has_work() is bool(self.live)

    def run(self, *request_ids: RequestId) -> list[Answer]:
        """Step until these have ended."""
        ended: dict[int, Answer] = {}
        self.until(lambda: ended.keys() >= set(request_ids), ended)
        return [ended[request_id] for request_id in request_ids]

    def until(self, condition: Callable[[], bool], ended: dict[int, Answer] | None = None) -> None:
        """Step until `condition` holds, and put what ends into `ended`."""
        give_up_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.engine.has_work(), "it has nothing to do and has not ended"
            assert time.monotonic() < give_up_s, "it does not end"
            done = self.step()
            if ended is not None:
                ended |= done

    def one(self, prompt: Iterable[int] = PROMPT, **fields: Any) -> Answer:
        """Add a request and see it to its end."""
        return self.run(self.add(prompt, **fields))[0]

    def abort_all(self) -> None:
        self.abort(*(RequestId(one) for one in list(self.live)))
        self.check_stats()


def _without_measures(finish: Finish) -> Finish:
    """How a request ended, less what depends on the hour and on who came before."""
    assert finish.queue_time_s >= 0
    assert finish.cached_tokens >= 0
    return msgspec.structs.replace(finish, queue_time_s=0.0, cached_tokens=0)
