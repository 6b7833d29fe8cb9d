"""Embeddings by llama.cpp: what the embedded engine does where its model makes them.

A step takes as many of the texts that wait as fit into one batch, each of them whole, and has one
thread compute them; meanwhile the stepping thread waits in the pump. Nothing is kept from one batch
to the next, so what a text becomes does not depend on what came before. A text whose request is
aborted is computed for nobody; a batch of nobody's is interrupted.

Knows nothing of lanes, HTTP or text.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastserve.engine import llama
from fastserve.engine.admission import queue_of
from fastserve.engine.checks import check_request, refuse_script
from fastserve.engine.interface import EngineStats, StepOutputs
from fastserve.engine.offload import Offload
from fastserve.engine.waiting import WaitingQueue
from fastserve.generation import Finish, FinishReason, RequestId, packed_embedding
from fastserve.log import get_logger
from fastserve.readable import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from fastserve.engine.admission import Queue
    from fastserve.engine.interface import Pump
    from fastserve.generation import ModelCard
    from fastserve.lane.messages import Submit

log = get_logger("engine")

# How long one wait for a batch is. Any value does: the pump serves the lanes meanwhile.
_PUMP_S = 1.0

# How long close() waits for the batch under way, which ends within milliseconds of an interrupt.
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Text:
    """A request, and since when it has waited or, once it runs, how long it did."""

    submit: Submit
    added_s: float
    queue_time_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.submit.prompt_token_ids)


class LlamaEmbedder:
    """The loaded model at work: the texts that wait, those of the batch, and who computes it."""

    def __init__(
        self,
        model: llama.Model,
        *,
        card: ModelCard,
        num_seqs: int,
        batch_tokens: int,
        threads: int,
    ) -> None:
        """`num_seqs`: texts in a batch, of `batch_tokens` together, which any one text fits into.

        Raises StartError where memory does not suffice.
        """
        assert batch_tokens >= card.max_seq_len, f"{batch_tokens} of {card.max_seq_len} tokens"
        self._card = card
        self._vocab_size = model.vocab_size
        self._batch_tokens = batch_tokens
        self._num_seqs = min(num_seqs, batch_tokens)
        self._waiting: WaitingQueue[_Text] = WaitingQueue()
        # In the order of their sequences in the batch under way; none else is running.
        self._running: dict[RequestId, _Text] = {}
        self._batch = llama.Batch(batch_tokens)
        self._context = llama.Context(
            model,
            num_sequences=self._num_seqs,
            sequence_tokens_max=card.max_seq_len,
            batch_rows_max=batch_tokens,
            threads=threads,
            embeds=True,
        )
        self._computer: Offload[llama.Decoded] = Offload("embed")

    def warm_up(self, waiting: Callable[[], None]) -> None:
        """Embed one token, calling `waiting` ten times a second."""
        self._batch.clear()
        self._batch.add([0], position=0, sequence=0, logits=True)
        self._computer.start(self._compute)
        while not wait_readable(self._computer.fd, timeout_s=0.1):
            waiting()
        self._computer.result()
        self._context.truncate(0)

    def add(self, submit: Submit) -> None:
        refuse_script(submit)
        check_request(submit, card=self._card, vocab_size=self._vocab_size)
        self._waiting.add(
            submit.request_id,
            _Text(submit, time.monotonic()),
            priority=submit.sampling.priority,
            num_tokens=len(submit.prompt_token_ids),
        )

    def abort(self, request_ids: Collection[RequestId]) -> None:
        computing = bool(self._running)
        for request_id in request_ids:
            self._waiting.remove(request_id)
            self._running.pop(request_id, None)
        if computing and not self._running:
            self._context.interrupt()

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self, pump: Pump) -> StepOutputs:
        """Fill a batch, have it computed, and tell what its texts became."""
        texts = self._next_texts()
        if not texts or not self._await_batch(texts, pump):
            return StepOutputs()
        outputs = StepOutputs(counts=[])
        decoded = self._computer.result()
        for sequence, text in enumerate(texts):
            # One that was aborted meanwhile is not there any more.
            if self._running.pop(text.submit.request_id, None) is not None:
                outputs.end(text.submit.request_id, self._finish(text, sequence, decoded))
            self._context.truncate(sequence)
        return outputs

    def _next_texts(self) -> list[_Text]:
        """Those that have waited longest, as many as fit; they run from now on."""
        texts: list[_Text] = []
        room = self._batch_tokens
        while self._waiting and len(texts) < self._num_seqs:
            text = self._waiting.pop()
            submit = text.submit
            if text.num_tokens > room:
                self._waiting.put_back(
                    submit.request_id,
                    text,
                    priority=submit.sampling.priority,
                    num_tokens=text.num_tokens,
                )
                break
            room -= text.num_tokens
            text = _Text(submit, text.added_s, queue_time_s=time.monotonic() - text.added_s)
            self._running[submit.request_id] = text
            texts.append(text)
        return texts

    def _await_batch(self, texts: list[_Text], pump: Pump) -> bool:
        """Compute `texts` while the pump runs. False: the pump gave up early, the server stops."""
        self._batch.clear()
        for sequence, text in enumerate(texts):
            self._batch.add(
                text.submit.prompt_token_ids, position=0, sequence=sequence, logits=True
            )
        self._context.resume()
        self._computer.start(self._compute)
        while True:
            waiting_since_s = time.monotonic()
            if pump(fd=self._computer.fd, timeout_s=_PUMP_S):
                return True
            if time.monotonic() - waiting_since_s < _PUMP_S:
                self._context.interrupt()
                return False

    def _compute(self) -> llama.Decoded:
        return self._context.decode(self._batch)

    def _finish(self, text: _Text, sequence: int, decoded: llama.Decoded) -> Finish:
        if decoded is not llama.Decoded.DONE:
            return _failed("there is no room for this text")
        values = self._context.embedding(sequence)
        length = math.hypot(*values)
        if not 0 < length < math.inf:
            log.warning_burst("an embedding without a direction", id=text.submit.request_id)
            return _failed("the model made numbers of this text that have no direction")
        return Finish(
            reason=FinishReason.STOP,
            queue_time_s=text.queue_time_s,
            embedding=packed_embedding([value / length for value in values]),
        )

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._running), num_waiting=len(self._waiting))

    def queue(self) -> Queue:
        return queue_of(
            self._waiting.lengths(),
            num_waiting=len(self._waiting),
            num_tokens=self._waiting.num_tokens,
            num_free=self._num_seqs - len(self._running),
        )

    def close(self) -> bool:
        """Free the context. False if a batch under way still uses it, and with it the model."""
        self._context.interrupt()
        if not self._computer.close(timeout_s=_CLOSE_TIMEOUT_S):
            return False
        self._context.close()
        return True


def _failed(error: str) -> Finish:
    return Finish(reason=FinishReason.ERROR, error=error)
