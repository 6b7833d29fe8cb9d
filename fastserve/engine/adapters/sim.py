"""The `sim` engine: no model, but the timing of one, and scripts for every way to misbehave.

A step takes `step_ms` plus the prefill it does at `prefill_tokens_per_s`; at most `max_batch_size`
requests run. A request's tokens depend on its prompt and seed alone: words of the vocabulary in a
fixed order, from a place that they choose. With a script (the request's field `sim`) it emits what
it is told, when it is told, or fails, hangs or dies. The subject of benches and fault tests.

Hot path: `_emit`, about 0.2 microseconds per token, so that 300,000 tokens/s leave room.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import signal
import time
import zlib
from array import array
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from fastserve.engine.admission import queue_of
from fastserve.engine.checks import check_request
from fastserve.engine.interface import EngineStats, StepOutputs
from fastserve.engine.mpi_library import abort
from fastserve.engine.waiting import WaitingQueue
from fastserve.errors import InvalidRequest, StartError
from fastserve.generation import Finish, FinishReason, TokenLogprob, packed_embedding
from fastserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from fastserve.engine.admission import Queue
    from fastserve.engine.interface import Pump
    from fastserve.generation import ModelCard, RequestId, SamplingParams
    from fastserve.lane.messages import Submit

# A step does no more prefill than fits beside its decode: this long, if the step itself is shorter.
_PREFILL_STEP_MS_MIN = 10.0
_WORDS = 512
_STOP = Finish(reason=FinishReason.STOP)
_LENGTH = FinishReason.LENGTH
_LOG_HALF = math.log(0.5)

Step = Annotated[int, msgspec.Meta(ge=0)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
# JSON has none of the numbers that engines get wrong. null is a NaN.
Logprob = float | Literal["inf", "-inf"] | None
# "mpi_abort" is for an engine of several ranks.
DieBy = Literal["exception", "sigkill", "exit", "mpi_abort"]


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's field `sim`. Steps count this request's decode steps, from 0.

    `token_ids` are emitted one a step, then the request ends with "stop"; without them it emits
    words. `logprobs` stand beside them as [logprob, [[id, logprob], ...]], and `prompt_logprobs`
    beside the prompt's tokens from the second on. `delay_ms` passes before the first. At its step,
    `fail_at` ends the request with an error, `hang_at` never ends the step (the engine stands
    still), and `die_at` ends the process by `die_by`.
    """

    token_ids: list[TokenId] | None = None
    logprobs: list[tuple[Logprob, list[tuple[TokenId, Logprob]]]] | None = None
    prompt_logprobs: list[tuple[Logprob, list[tuple[TokenId, Logprob]]]] | None = None
    delay_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    fail_at: Step | None = None
    hang_at: Step | None = None
    die_at: Step | None = None
    die_by: DieBy = "sigkill"


class _Request:
    """A running or waiting request: the next word, how many are left, and its script, if any."""

    __slots__ = (
        "added_s", "cursor", "done", "id", "left", "max_tokens", "prefill_left", "queue_time_s",
        "ready_at_s", "script", "submit",
    )  # fmt: skip

    def __init__(self, submit: Submit, script: Script | None, *, max_tokens: int) -> None:
        self.id = submit.request_id
        self.submit = submit
        self.script = script
        prompt = array("I", submit.prompt_token_ids).tobytes()
        self.cursor = zlib.crc32(prompt, submit.sampling.seed or 0)
        self.left = self.max_tokens = max_tokens
        self.prefill_left = len(submit.prompt_token_ids)
        self.done = 0
        self.added_s = time.monotonic()
        self.queue_time_s = 0.0
        self.ready_at_s = self.added_s + (script.delay_ms / 1000 if script else 0.0)

    @property
    def num_prompt(self) -> int:
        return len(self.submit.prompt_token_ids)


class SimEngine:
    """The Engine without a model; see the module's header for what it does instead."""

    def __init__(
        self,
        *,
        describe: Callable[[], ModelCard],
        step_ms: float,
        prefill_tokens_per_s: float,
        max_batch_size: int,
        embedding_size: int = 0,
    ) -> None:
        self._describe = describe
        self._embedding_size = embedding_size
        self._step_s = step_ms / 1000
        self._prefill_tokens_per_s = prefill_tokens_per_s
        prefill_s = max(step_ms, _PREFILL_STEP_MS_MIN) / 1000
        self._prefill_tokens_max = max(1, int(prefill_tokens_per_s * prefill_s))
        self._max_batch_size = max_batch_size
        self._card: ModelCard | None = None
        self._words: list[int] = []
        self._waiting: WaitingQueue[_Request] = WaitingQueue()
        self._running: dict[int, _Request] = {}
        self._next_step_s = 0.0

    def describe(self) -> ModelCard:
        self._card = self._describe()
        if self._embedding_size:
            self._card = dataclasses.replace(self._card, embedding_size=self._embedding_size)
        return self._card

    def load(self, progress: Callable[[float], None]) -> None:
        assert self._card is not None, "describe() comes first"
        self._words = _common_words(Tokenizer.from_file(self._card.tokenizer_path))
        progress(1.0)

    def add(self, request: Submit) -> None:
        assert self._card is not None, "described before anything is added"
        max_tokens = check_request(request, card=self._card, vocab_size=self._card.vocab_size)
        script = None
        if request.sim is not None:
            script = self._read_script(request.sim)
        elif request.embed or _needs_care(request.sampling):
            script = Script()  # an empty one: the careful way, which the hot path has no time for
        self._waiting.add(
            request.request_id,
            _Request(request, script, max_tokens=max_tokens),
            priority=request.sampling.priority,
            num_tokens=len(request.prompt_token_ids),
        )

    def abort(self, request_ids: Collection[RequestId]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)
            self._waiting.remove(request_id)

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._running), num_waiting=len(self._waiting))

    def queue(self) -> Queue:
        return queue_of(
            self._waiting.lengths(),
            num_waiting=len(self._waiting),
            num_tokens=self._waiting.num_tokens,
            num_free=self._max_batch_size - len(self._running),
        )

    def close(self) -> None:
        self._running.clear()
        self._waiting.clear()

    def step(self, pump: Pump) -> StepOutputs:
        if not self._running:
            self._next_step_s = time.monotonic()
        self._admit()
        prefilled = self._prefill() if self._prefill_tokens_per_s else 0
        self._pace(pump, prefilled=prefilled)
        return self._emit()

    def _read_script(self, fields: dict[str, Any]) -> Script:
        """Raises InvalidRequest for what is no script, or has a token that the model has not."""
        try:
            script = msgspec.convert(fields, Script)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"sim: {error}", param="sim") from error
        assert self._card is not None
        rows = (script.logprobs or []) + (script.prompt_logprobs or [])
        told = [token for _, top in rows for token, _ in top]
        last = max(told + (script.token_ids or []), default=0)
        if last >= self._card.vocab_size:
            raise InvalidRequest(
                f"sim: token {last} is not below the vocabulary's {self._card.vocab_size}",
                param="sim",
            )
        return script

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch_size:
            request = self._waiting.pop()
            request.queue_time_s = time.monotonic() - request.added_s
            self._running[request.id] = request

    def _prefill(self) -> int:
        budget = self._prefill_tokens_max
        for request in self._running.values():
            if request.prefill_left and budget:
                share = min(request.prefill_left, budget)
                request.prefill_left -= share
                budget -= share
        return self._prefill_tokens_max - budget

    def _pace(self, pump: Pump, *, prefilled: int) -> None:
        """Wait until this step's time is over, serving the lanes meanwhile.

        Steps follow each other without drift; one that comes late is not waited for.
        """
        duration_s = self._step_s
        if prefilled:
            duration_s += prefilled / self._prefill_tokens_per_s
        now_s = time.monotonic()
        self._next_step_s = max(self._next_step_s + duration_s, now_s)
        pump(timeout_s=self._next_step_s - now_s)

    def _emit(self) -> StepOutputs:
        # Columns start as one token each; a scripted finish without a token makes counts of them.
        step = StepOutputs()
        ids, tokens, words = step.request_ids, step.token_ids, self._words
        num_words = len(words)
        paced = bool(self._prefill_tokens_per_s)
        for request in list(self._running.values()):
            if request.script is not None:
                self._perform(request, request.script, step)
                continue
            if paced and request.prefill_left:
                continue
            ids.append(request.id)
            tokens.append(words[request.cursor % num_words])
            request.cursor += 1
            request.left -= 1
            if not request.left:
                step.finishes[len(ids) - 1] = Finish(
                    reason=_LENGTH, queue_time_s=request.queue_time_s
                )
                del self._running[request.id]
        if step.counts is not None:
            step.counts += [1] * (len(ids) - len(step.counts))
        return step

    def _perform(self, request: _Request, script: Script, step: StepOutputs) -> None:
        """One step of a scripted request."""
        if time.monotonic() < request.ready_at_s:
            return
        if self._prefill_tokens_per_s and request.prefill_left:
            return
        at = request.done
        if script.die_at == at:
            _die(script.die_by)
        if script.hang_at == at:
            _hang()
        finish: Finish | None = None
        tokens: list[int] = []
        if script.fail_at == at:
            finish = Finish(reason=FinishReason.ERROR, error=f"scripted to fail at step {at}")
        elif request.submit.embed:
            finish = self._embedded(request)
        elif not request.left:
            # Nothing was asked for but the logprobs of the prompt.
            finish = Finish(reason=_LENGTH)
        elif script.token_ids is None:
            tokens = [self._word(request)]
        elif at < len(script.token_ids):
            tokens = [script.token_ids[at]]
        else:
            finish = _STOP
        request.done += 1
        finish = finish or self._finish_after(request, script, tokens[0])
        self._put(step, request, tokens, finish)

    def _embedded(self, request: _Request) -> Finish:
        """The end of a request that embeds: a direction that its prompt alone decides."""
        assert self._card is not None
        chance = random.Random(request.cursor)  # noqa: S311 (to be the same each time, not secret)
        values = [chance.gauss() for _ in range(self._card.embedding_size)]
        length = math.hypot(*values)
        return Finish(
            reason=FinishReason.STOP,
            embedding=packed_embedding([value / length for value in values]),
        )

    def _word(self, request: _Request) -> int:
        """The next word; a stop id is passed over while it may not be chosen."""
        words, sampling = self._words, request.submit.sampling
        if request.done < sampling.min_tokens:
            for _ in words:
                if words[(request.cursor + request.done) % len(words)] in sampling.stop_token_ids:
                    request.cursor += 1
        return words[(request.cursor + request.done) % len(words)]

    def _finish_after(self, request: _Request, script: Script, token: int) -> Finish | None:
        sampling = request.submit.sampling
        assert self._card is not None
        if request.done > sampling.min_tokens:
            if token in self._card.eos_token_ids and not sampling.ignore_eos:
                return _STOP
            if token in sampling.stop_token_ids:
                return Finish(reason=FinishReason.STOP, stop_token_id=token)
        if request.done >= request.max_tokens:
            return Finish(reason=_LENGTH)
        if script.token_ids is not None and request.done == len(script.token_ids):
            return _STOP
        return None

    def _put(
        self, step: StepOutputs, request: _Request, tokens: list[int], finish: Finish | None
    ) -> None:
        index = len(step.request_ids)
        if step.counts is None and len(tokens) != 1:
            step.counts = [1] * index
        step.request_ids.append(request.id)
        step.token_ids += tokens
        if step.counts is not None:
            step.counts += [1] * (index - len(step.counts))
            step.counts.append(len(tokens))
        if request.submit.sampling.logprobs is not None and tokens:
            step.logprobs[index] = [self._logprob(request, tokens[0])]
        if request.submit.sampling.prompt_logprobs is not None and request.done == 1:
            step.prompt_logprobs[index] = self._prompt_logprobs(request)
        if finish is not None:
            step.finishes[index] = msgspec.structs.replace(
                finish, queue_time_s=request.queue_time_s
            )
            del self._running[request.id]

    def _logprob(self, request: _Request, token: int) -> TokenLogprob:
        """What the script says of the token just emitted; or else that it is the likeliest of as
        many words as were asked for, each half as likely as the one before."""
        script, at = request.script, request.done - 1
        asked = request.submit.sampling.logprobs or 0
        if script is not None and script.logprobs is not None and at < len(script.logprobs):
            return _scripted(script.logprobs[at], num_top=asked)
        others = (word for word in self._words if word != token)
        ranked = islice(chain((token,), others), asked)
        return TokenLogprob(
            logprob=_LOG_HALF,
            top=tuple((word, rank * _LOG_HALF) for rank, word in enumerate(ranked, 1)),
        )

    def _prompt_logprobs(self, request: _Request) -> list[TokenLogprob]:
        """What the script says of the prompt's tokens from the second on; or else that the one at
        place p has a logprob of -p / 64, and is the likeliest of those that were asked for."""
        asked = request.submit.sampling.prompt_logprobs or 0
        scripted = request.script.prompt_logprobs if request.script is not None else None
        rows = [_scripted(row, num_top=asked) for row in scripted or ()]
        for place in range(len(rows) + 1, len(request.submit.prompt_token_ids)):
            token = request.submit.prompt_token_ids[place]
            others = (word for word in self._words if word != token)
            ranked = islice(chain((token,), others), asked)
            top = tuple((word, -place / 64 - rank) for rank, word in enumerate(ranked))
            rows.append(TokenLogprob(logprob=-place / 64, top=top))
        return rows[: len(request.submit.prompt_token_ids) - 1]


def _common_words(tokenizer: Tokenizer) -> list[int]:
    """The first tokens of the vocabulary that are a word after a space: what any text is made of.

    Raises StartError for a vocabulary without such.
    """
    words = [
        token_id
        for token_id, raw in enumerate(tokenizer.token_bytes)
        if raw[:1] == b" " and raw[1:].isalpha() and raw.isascii()
    ]
    if not words:
        raise StartError("the tokenizer's vocabulary has no words for the sim engine to say")
    return words[:_WORDS]


def _needs_care(sampling: SamplingParams) -> bool:
    return (
        sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
        or bool(sampling.stop_token_ids)
    )


def _scripted(row: tuple[Logprob, list[tuple[TokenId, Logprob]]], *, num_top: int) -> TokenLogprob:
    logprob, top = row
    return TokenLogprob(
        logprob=_number(logprob),
        top=tuple((other, _number(value)) for other, value in top[:num_top]),
    )


def _number(logprob: Logprob) -> float:
    return math.nan if logprob is None else float(logprob)


def _die(how: DieBy) -> None:
    if how == "exception":
        raise RuntimeError("scripted to die by an exception")
    if how == "mpi_abort":
        abort(1)
    if how == "exit":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    while True:
        time.sleep(3600)
