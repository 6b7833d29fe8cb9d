"""Continuous batching on llama.cpp: what the embedded engine does once its model is loaded.

A step plans a batch, has one thread decode it, and samples here. While that thread computes, the
stepping thread waits in the pump, so requests come and go meanwhile. An abort interrupts the decode
that its request is part of, and the step is done again without it; but only once in a step, for
else a storm of aborts would starve everybody. Nothing but `interrupt` may touch the context during
a decode, so the slot of an aborted request is dealt with when it is next used: see reuse.py.

Knows nothing of lanes, HTTP or text.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from fastserve.engine import guidance, llama
from fastserve.engine.checks import check_request, refuse_script
from fastserve.engine.interface import EngineStats, StepOutputs, finish_of
from fastserve.engine.offload import Offload
from fastserve.engine.pace import PrefillPace
from fastserve.engine.reuse import Reuse
from fastserve.engine.sampler import GrammarEnded, sampler_for, token_logprob
from fastserve.engine.schedule import PROMPT_LOGPROBS_ROWS_MAX, Request, Schedule, slot_of
from fastserve.errors import GenerationFailed, InvalidRequest
from fastserve.generation import Finish, FinishReason
from fastserve.log import get_logger
from fastserve.readable import wait_readable
from fastserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from fastserve.engine.admission import Queue
    from fastserve.engine.interface import Pump
    from fastserve.engine.sampler import Floats
    from fastserve.engine.schedule import Chunk
    from fastserve.generation import ModelCard, RequestId
    from fastserve.lane.messages import Submit

log = get_logger("engine")

# How long one wait for a decode is. Any value does: the pump serves the lanes meanwhile.
_PUMP_S = 1.0

# How long close() waits for the decode under way, which ends within milliseconds of an interrupt.
_CLOSE_TIMEOUT_S = 5.0


class LlamaRunner:
    """The loaded model at work: its schedule, its KV cache, and the thread that decodes."""

    def __init__(
        self,
        model: llama.Model,
        *,
        card: ModelCard,
        num_seqs: int,
        prefill_chunk_tokens: int,
        prefill_target_s: float,
        prefix_bytes_max: int,
        threads: int,
    ) -> None:
        self._card = card
        self._vocab_size = model.vocab_size
        self._max_seq_len = card.max_seq_len
        self._kv_cache_tokens = num_seqs * card.max_seq_len
        # The library knows some by their names that the file does not list.
        self._eos_token_ids = frozenset(card.eos_token_ids) | {
            token_id for token_id in range(model.vocab_size) if model.is_eog(token_id)
        }
        batch_rows_max = num_seqs + prefill_chunk_tokens
        self._schedule = Schedule(num_slots=num_seqs)
        self._pace = PrefillPace(tokens_max=prefill_chunk_tokens, target_s=prefill_target_s)
        self._batch = llama.Batch(batch_rows_max)
        self._context = llama.Context(
            model,
            num_sequences=num_seqs,
            sequence_tokens_max=card.max_seq_len,
            batch_rows_max=batch_rows_max,
            logits_rows_max=min(num_seqs + PROMPT_LOGPROBS_ROWS_MAX, batch_rows_max),
            threads=threads,
        )
        self._reuse = Reuse(
            self._context,
            self._schedule,
            bytes_max=prefix_bytes_max if model.keeps_all_positions else 0,
            place_s_max=prefill_target_s / 4,
        )
        self._decoder: Offload[llama.Decoded] = Offload("decode")
        tokenizer = Tokenizer.from_file(card.tokenizer_path, vocab_size=card.vocab_size)
        self._compiler = guidance.Compiler(
            guidance.Grammars(
                tokenizer.token_bytes[: model.vocab_size],
                vocab_size=model.vocab_size,
                special_ids=tokenizer.special_ids,
                # Without any, no grammar is announced, and none comes.
                eos_token_ids=self._eos_token_ids or {0},
                encode=functools.partial(tokenizer.encode, parse_special=False),
            )
        )
        # The requests of the decode under way, and whether one was interrupted in this step.
        self._decoding: set[RequestId] = set()
        self._interrupted = False
        self._decode_began_s = 0.0

    def warm_up(self, waiting: Callable[[], None]) -> None:
        """Decode one token and forget it, calling `waiting` ten times a second."""
        self._batch.clear()
        self._batch.add([0], position=0, sequence=0, logits=True)
        self._decoder.start(self._decode)
        while not wait_readable(self._decoder.fd, timeout_s=0.1):
            waiting()
        self._decoder.result()
        self._context.truncate(0)

    def add(self, submit: Submit) -> None:
        # A bad id would fail the whole batch.
        refuse_script(submit)
        check_request(submit, card=self._card, vocab_size=self._vocab_size)
        if submit.sampling.grammar is None:
            self._enqueue(submit)
        else:
            self._compiler.add(submit)

    def _enqueue(self, submit: Submit, guide: guidance.Guide | None = None) -> None:
        params = submit.sampling
        self._schedule.add(
            Request(
                request_id=submit.request_id,
                token_ids=list(submit.prompt_token_ids),
                num_prompt=len(submit.prompt_token_ids),
                sampling=params,
                added_s=time.monotonic(),
                reuses=params.prompt_logprobs is None,
                sampler=sampler_for(
                    params,
                    vocab_size=self._vocab_size,
                    prompt_token_ids=submit.prompt_token_ids,
                    eos_token_ids=self._eos_token_ids,
                    guide=guide,
                ),
                guide=guide,
            )
        )

    def _take_compiled(self) -> StepOutputs:
        """Let in the requests whose grammars are ready; return the ends of those without one."""
        outputs = StepOutputs(counts=[])
        for submit, guide in self._compiler.take():
            if isinstance(guide, InvalidRequest):
                outputs.end(submit.request_id, finish_of(guide))
            else:
                self._enqueue(submit, guide)
        return outputs

    def abort(self, request_ids: Collection[RequestId]) -> None:
        decoding = len(self._decoding)
        for request_id in request_ids:
            self._compiler.remove(request_id)
            self._schedule.remove(request_id)
            self._decoding.discard(request_id)
        # Once in a step, or when nobody is left who would lose by it.
        if len(self._decoding) < decoding and not (self._interrupted and self._decoding):
            self._interrupted = True
            self._context.interrupt()

    def has_work(self) -> bool:
        return bool(self._schedule.running or self._schedule.waiting or self._compiler)

    def step(self, pump: Pump) -> StepOutputs:
        """Plan, decode, sample; once more where the decode was interrupted or found no room."""
        if self._compiler and (refused := self._take_compiled()).request_ids:
            return refused
        self._interrupted = False
        while chunks := self._plan():
            if not self._await_decode(chunks, pump):
                break
            decoded = self._decoder.result()
            if decoded is llama.Decoded.DONE:
                self._learn_pace(chunks)
                return self._sample(chunks)
            if decoded is llama.Decoded.INTERRUPTED:
                self._roll_back(chunks)
            elif not self._schedule.preempt():
                return self._fail_all("the KV cache has no room for this request alone")
        if self._compiler:
            pump(fd=self._compiler.fd, timeout_s=_PUMP_S)
        return StepOutputs()

    def _plan(self) -> list[Chunk]:
        self._schedule.admit()
        if move := self._schedule.compact():
            source, target = move
            self._reuse.vacate(target)
            self._context.move(source, target=target)
        self._reuse.place()
        budget = self._pace.budget(decoding=self._schedule.decoding())
        return self._schedule.plan(prefill_tokens=budget)

    def _learn_pace(self, chunks: list[Chunk]) -> None:
        rows = sum(chunk.count for chunk in chunks)
        if rows > len(chunks):
            self._pace.took(time.monotonic() - self._decode_began_s, rows=rows)

    def _await_decode(self, chunks: list[Chunk], pump: Pump) -> bool:
        """Decode `chunks` while the pump runs. False: the pump gave up early, the server stops."""
        self._fill_batch(chunks)
        self._decoding = {chunk.request.request_id for chunk in chunks}
        self._context.resume()
        self._decode_began_s = time.monotonic()
        self._decoder.start(self._decode)
        self._prepare_masks(chunks)
        while True:
            waiting_since_s = time.monotonic()
            if pump(fd=self._decoder.fd, timeout_s=_PUMP_S):
                self._decoding.clear()
                return True
            if time.monotonic() - waiting_since_s < _PUMP_S:
                self._context.interrupt()
                return False

    @staticmethod
    def _prepare_masks(chunks: list[Chunk]) -> None:
        """Find what may come next for those whose tokens the decode will choose: it has the time.

        What is wrong is said when the token is chosen.
        """
        for chunk in chunks:
            guide = chunk.request.guide
            if guide is not None and chunk.is_last:
                guide.prepare()

    def _decode(self) -> llama.Decoded:
        return self._context.decode(self._batch)

    def _fill_batch(self, chunks: Iterable[Chunk]) -> None:
        self._batch.clear()
        for chunk in chunks:
            request = chunk.request
            slot = slot_of(request)
            start = request.num_computed
            if start == 0 and request.needs_prompt_logprobs:
                request.prompt_logprobs.clear()  # it was preempted, and begins anew
            self._batch.add(
                request.token_ids[start : start + chunk.count],
                position=start,
                sequence=slot,
                logits=chunk.is_last,
                first_logits=chunk.num_prompt_rows,
            )

    def _roll_back(self, chunks: Iterable[Chunk]) -> None:
        """Forget what an interrupted decode may have computed of its requests that still run."""
        for request in (chunk.request for chunk in chunks):
            if request.slot is not None and not self._context.truncate(
                request.slot, length=request.num_computed
            ):
                # A recurrent model keeps no past states to go back to.
                self._context.truncate(request.slot)
                request.num_computed = 0

    def _sample(self, chunks: list[Chunk]) -> StepOutputs:
        outputs = StepOutputs()
        rows, logits = self._rows_to_sample(chunks)
        for chunk in chunks:
            chunk.request.num_computed += chunk.count
        if logits is None or not rows:
            return outputs
        best = logits.argmax(axis=1).tolist()
        for row, request in enumerate(rows):
            # One that was aborted meanwhile has no slot any more.
            if request.slot is not None:
                self._advance(request, logits[row], best=best[row], outputs=outputs)
        return outputs

    def _rows_to_sample(self, chunks: list[Chunk]) -> tuple[list[Request], Floats | None]:
        """The requests whose next token can be chosen, and their rows of logits."""
        if any(chunk.num_prompt_rows for chunk in chunks):
            return self._part_prompt_rows(chunks)
        rows = [chunk.request for chunk in chunks if chunk.is_last]
        return rows, self._context.logits(len(rows)) if rows else None

    def _part_prompt_rows(self, chunks: list[Chunk]) -> tuple[list[Request], Floats]:
        """Keep what the rows of prompt tokens tell; return the others, as `_rows_to_sample`."""
        of_prompts: list[tuple[Request, slice]] = []
        choosing: dict[Request, int] = {}
        num_rows = 0
        for chunk in chunks:
            num_prompt_rows = chunk.num_prompt_rows
            of_prompts.append((chunk.request, slice(num_rows, num_rows + num_prompt_rows)))
            num_rows += num_prompt_rows
            if chunk.is_last:
                choosing[chunk.request] = num_rows
                num_rows += 1
        logits = self._context.logits(num_rows)
        for request, rows in of_prompts:
            _remember_prompt(request, logits[rows])
        return list(choosing), logits[list(choosing.values())]

    def _advance(
        self, request: Request, logits: Floats, *, best: int, outputs: StepOutputs
    ) -> None:
        """Add the request's next token to `outputs`, and its end if this is the last."""
        params = request.sampling
        if params.prompt_logprobs is not None and not request.num_answered:
            outputs.prompt_logprobs[len(outputs.request_ids)] = request.prompt_logprobs
            if not params.max_tokens:
                self._end(request, Finish(reason=FinishReason.LENGTH), outputs=outputs)
                return
        try:
            token_id = request.sampler.sample(logits, best=best)
            if params.logprobs is not None:
                outputs.logprobs[len(outputs.request_ids)] = [
                    token_logprob(logits, token_id, best=best, num_top=params.logprobs)
                ]
        except GrammarEnded:
            self._end(request, Finish(reason=FinishReason.STOP), outputs=outputs)
            return
        except (GenerationFailed, InvalidRequest) as error:
            self._end(request, finish_of(error), outputs=outputs)
            return
        # A bug in the sampling of one request is not the others' end.
        except Exception:
            log.exception("sampling failed", id=request.request_id)
            self._fail(request, "the next token could not be chosen", outputs=outputs)
            return
        request.token_ids.append(token_id)
        if finish := self._finish(request, token_id):
            outputs.finishes[len(outputs.request_ids)] = finish
            self._schedule.remove(request.request_id)
        outputs.request_ids.append(request.request_id)
        outputs.token_ids.append(token_id)
        if outputs.counts is not None:
            outputs.counts.append(1)

    def _finish(self, request: Request, token_id: int) -> Finish | None:
        params = request.sampling
        stop_token_id = None
        if token_id in self._eos_token_ids and not params.ignore_eos:
            reason = FinishReason.STOP
        elif token_id in params.stop_token_ids:
            reason, stop_token_id = FinishReason.STOP, token_id
        elif request.sampler.complete:
            reason = FinishReason.STOP
        elif (
            request.num_answered >= params.max_tokens or len(request.token_ids) >= self._max_seq_len
        ):
            reason = FinishReason.LENGTH
        else:
            return None
        return Finish(
            reason=reason,
            stop_token_id=stop_token_id,
            cached_tokens=request.cached_tokens,
            queue_time_s=request.queue_time_s or 0.0,
        )

    def _fail_all(self, error: str) -> StepOutputs:
        outputs = StepOutputs()
        for request in list(self._schedule.running.values()):
            self._fail(request, error, outputs=outputs)
        return outputs

    def _fail(self, request: Request, error: str, *, outputs: StepOutputs) -> None:
        self._end(request, Finish(reason=FinishReason.ERROR, error=error), outputs=outputs)

    def _end(self, request: Request, finish: Finish, *, outputs: StepOutputs) -> None:
        outputs.end(request.request_id, finish)
        self._schedule.remove(request.request_id)

    def stats(self) -> EngineStats:
        running = self._schedule.running
        computed = sum(request.num_computed for request in running.values())
        return EngineStats(
            num_running=len(running),
            num_waiting=len(self._schedule.waiting) + len(self._compiler),
            kv_cache_usage=computed / self._kv_cache_tokens,
            prefix_cache_queries=self._reuse.queries,
            prefix_cache_hits=self._reuse.hits,
        )

    def queue(self) -> Queue:
        return self._schedule.queue(also=self._compiler.prompt_lengths())

    def close(self) -> bool:
        """Free the KV cache. False if a decode still uses it, and with it the model."""
        self._context.interrupt()
        if not self._compiler.close(timeout_s=_CLOSE_TIMEOUT_S):
            log.warning("a grammar is still being compiled, abandoned")
        if not self._decoder.close(timeout_s=_CLOSE_TIMEOUT_S):
            return False
        self._context.close()
        return True


def _remember_prompt(request: Request, logits: Floats) -> None:
    """Keep the logprobs of the next tokens of a prompt, of which these rows tell."""
    num_top = request.sampling.prompt_logprobs or 0
    for row in logits:
        token_id = request.token_ids[len(request.prompt_logprobs) + 1]
        best = int(row.argmax())
        request.prompt_logprobs.append(token_logprob(row, token_id, best=best, num_top=num_top))
