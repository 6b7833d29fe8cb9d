"""The embedded engine: continuous batching on llama.cpp, token ids in and token ids out.

A step plans a batch, has one thread decode it, and samples here. While that thread computes, the
stepping thread waits in the pump, so requests come and go meanwhile. An abort interrupts the decode
that its request is part of, and the step is done again without it; but only once in a step, for
else a storm of aborts would starve everybody. Nothing but `interrupt` may touch the context during
a decode, so the slot of an aborted request is dealt with when it is next used: see reuse.py.

Knows nothing of lanes, HTTP or text.
"""

from __future__ import annotations

import dataclasses
import select
import time
from typing import TYPE_CHECKING

from fastserve.engine import llama
from fastserve.engine.checks import check_request, refuse_script
from fastserve.engine.cpus import available_cpus, available_memory_bytes
from fastserve.engine.interface import EngineStats, StepOutputs
from fastserve.engine.model_files import describe_gguf, resolve_model
from fastserve.engine.offload import Offload
from fastserve.engine.pace import PrefillPace
from fastserve.engine.reuse import Reuse
from fastserve.engine.sampler import Sampler, token_logprob
from fastserve.engine.schedule import PROMPT_LOGPROBS_ROWS_MAX, Request, Schedule, slot_of
from fastserve.errors import ConfigError, GenerationFailed, StartError
from fastserve.generation import Finish, FinishReason
from fastserve.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from fastserve.engine.interface import Pump
    from fastserve.engine.sampler import Floats
    from fastserve.engine.schedule import Chunk
    from fastserve.generation import ModelCard, RequestId
    from fastserve.lane.messages import Submit

log = get_logger("engine")

# LLAMA_MAX_SEQ in llama.cpp.
_NUM_SEQS_MAX = 256

# The defaults for a machine. More sequences than that gain a processor nothing and cost everybody
# patience; the rest of the memory is for weights, acceptors, and the neighbours.
_NUM_SEQS_PER_CPU = 16
_KV_CACHE_MEMORY_SHARE = 1 / 8

# The default where a model was trained for more: the KV cache is reserved for all of it.
_MAX_SEQ_LEN_DEFAULT = 2048

# How long one wait for a decode is. Any value does: the pump serves the lanes meanwhile.
_PUMP_S = 1.0

# How long close() waits for the decode under way, which ends within milliseconds of an interrupt.
_CLOSE_TIMEOUT_S = 5.0


class LlamaCppEngine:
    """An Engine over one GGUF file."""

    def __init__(
        self,
        *,
        model: str | None = None,
        name: str | None = None,
        max_seq_len: int | None = None,
        max_num_seqs: int = 0,
        kv_cache_tokens: int = 0,
        prefill_chunk_tokens: int = 256,
        prefill_target_ms: float = 200.0,
        prefix_cache_bytes_max: int = 512 << 20,
        threads: int = 0,
        fallback_directory: Path | None = None,
    ) -> None:
        """`model`: a GGUF file, or None for the one that ships; `name`: what it is served as.

        `max_seq_len`: prompt and answer in tokens (default: what the model was trained for, at most
        2048). `max_num_seqs`: requests that run at once, up to 256 (0: 16 for each processor);
        fewer where the KV cache, of `kv_cache_tokens`, does not hold as many of `max_seq_len`. It
        is reserved at once; 0: an eighth of the memory at most.
        `prefill_chunk_tokens`: prompt tokens in one step; fewer where they would hold up a step of
        decode by more than about `prefill_target_ms`. `prefix_cache_bytes_max`: what is kept for
        requests that begin alike; 0: nothing is reused. `threads` 0: the processors there are.
        `fallback_directory`: where a tokenizer built from the file may be kept. Raises ConfigError.
        """
        if not 0 <= max_num_seqs <= _NUM_SEQS_MAX:
            raise ConfigError(f"max_num_seqs: {max_num_seqs} is not within 0 to {_NUM_SEQS_MAX}")
        for key, value, least in (
            ("max_seq_len", max_seq_len, 2),
            ("kv_cache_tokens", kv_cache_tokens, 0),
            ("prefill_chunk_tokens", prefill_chunk_tokens, 1),
            ("prefill_target_ms", prefill_target_ms, 1),
            ("prefix_cache_bytes_max", prefix_cache_bytes_max, 0),
            ("threads", threads, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{key}: {value} is less than {least}")
        self._model_setting = model
        self._name = name
        self._max_seq_len = max_seq_len
        self._max_num_seqs = max_num_seqs or min(
            _NUM_SEQS_PER_CPU * available_cpus(), _NUM_SEQS_MAX
        )
        self._kv_cache_tokens = kv_cache_tokens
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._prefill_target_ms = prefill_target_ms
        self._prefix_cache_bytes_max = prefix_cache_bytes_max
        self._threads = threads or available_cpus()
        self._fallback_directory = fallback_directory
        self._path: Path | None = None
        self._card: ModelCard | None = None

        # What load() makes and close() frees.
        self._model: llama.Model | None = None
        self._runner: _Runner | None = None

    def describe(self) -> ModelCard:
        """See Engine. Reads the file's metadata and not its weights."""
        self._path = resolve_model(self._model_setting)
        if self._path.is_dir():
            raise StartError(f"{self._path} has no GGUF file, which the llamacpp engine needs")
        card = describe_gguf(
            self._path,
            name=self._name,
            max_seq_len=self._max_seq_len,
            read_metadata=llama.read_gguf_metadata,
            fallback_directory=self._fallback_directory,
        )
        if self._max_seq_len is None:
            max_seq_len = min(card.max_seq_len, _MAX_SEQ_LEN_DEFAULT)
            card = dataclasses.replace(card, max_seq_len=max_seq_len)
        self._card = card
        return card

    def load(self, progress: Callable[[float], None]) -> None:
        """See Engine. Also runs the model once: weights come off the disk on first use."""
        assert self._card is not None, "described before it is loaded"
        self._model = llama.Model(str(self._path), progress=progress)
        num_seqs = self._parallel_sequences(self._model)
        self._runner = _Runner(
            self._model,
            card=self._card,
            num_seqs=num_seqs,
            prefill_chunk_tokens=self._prefill_chunk_tokens,
            prefill_target_s=self._prefill_target_ms / 1000,
            prefix_bytes_max=self._prefix_cache_bytes_max,
            threads=self._threads,
        )
        self._runner.warm_up(lambda: progress(1.0))
        log.info(
            "model loaded",
            model=self._card.name,
            max_seq_len=self._card.max_seq_len,
            max_num_seqs=num_seqs,
            kv_cache_tokens=num_seqs * self._card.max_seq_len,
            prefix_cache_bytes_max=self._prefix_cache_bytes_max,
            threads=self._threads,
        )

    def _parallel_sequences(self, model: llama.Model) -> int:
        """As many as may run and the KV cache holds, and one in any case."""
        assert self._card is not None
        tokens = self._kv_cache_tokens
        if not tokens:
            memory_bytes = available_memory_bytes() * _KV_CACHE_MEMORY_SHARE
            tokens = int(memory_bytes / model.kv_bytes_per_token)
        return max(1, min(tokens // self._card.max_seq_len, self._max_num_seqs))

    def add(self, request: Submit) -> None:
        """See Engine. Raises InvalidRequest for what llama.cpp would fail on."""
        self._loaded().add(request)

    def abort(self, request_ids: Collection[RequestId]) -> None:
        """See Engine. A decode under way that any of them is part of is interrupted."""
        self._loaded().abort(request_ids)

    def has_work(self) -> bool:
        """See Engine."""
        return self._runner is not None and self._runner.has_work()

    def step(self, pump: Pump) -> StepOutputs:
        """See Engine. Raises EngineDead if the library breaks."""
        return self._loaded().step(pump)

    def stats(self) -> EngineStats:
        """See Engine."""
        if self._runner is None:
            return EngineStats(num_running=0, num_waiting=0)
        return self._runner.stats()

    def close(self) -> None:
        """See Engine. What a decode that does not end still uses is left to the process's end."""
        runner, self._runner = self._runner, None
        model, self._model = self._model, None
        if runner is not None and not runner.close():
            log.error("the decode under way does not end")
            return
        if model is not None:
            model.close()

    def _loaded(self) -> _Runner:
        assert self._runner is not None, "the model is not loaded"
        return self._runner


class _Runner:
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
        # The requests of the decode under way, and whether one was interrupted in this step.
        self._decoding: set[RequestId] = set()
        self._interrupted = False
        self._decode_began_s = 0.0

    def warm_up(self, waiting: Callable[[], None]) -> None:
        """Decode one token and forget it, calling `waiting` ten times a second."""
        self._batch.clear()
        self._batch.add([0], position=0, sequence=0, logits=True)
        self._decoder.start(self._decode)
        while not select.select((self._decoder.fd,), (), (), 0.1)[0]:
            waiting()
        self._decoder.result()
        self._context.truncate(0)

    def add(self, submit: Submit) -> None:
        params = submit.sampling
        # A bad id would fail the whole batch.
        refuse_script(submit)
        check_request(submit, card=self._card, vocab_size=self._vocab_size)
        ending = self._eos_token_ids.union(params.stop_token_ids)
        self._schedule.add(
            Request(
                request_id=submit.request_id,
                token_ids=list(submit.prompt_token_ids),
                num_prompt=len(submit.prompt_token_ids),
                sampling=params,
                added_s=time.monotonic(),
                reuses=params.prompt_logprobs is None,
                sampler=Sampler(
                    params,
                    vocab_size=self._vocab_size,
                    prompt_token_ids=submit.prompt_token_ids,
                    ending_token_ids=ending,
                ),
            )
        )

    def abort(self, request_ids: Collection[RequestId]) -> None:
        decoding = len(self._decoding)
        for request_id in request_ids:
            self._schedule.remove(request_id)
            self._decoding.discard(request_id)
        # Once in a step, or when nobody is left who would lose by it.
        if len(self._decoding) < decoding and not (self._interrupted and self._decoding):
            self._interrupted = True
            self._context.interrupt()

    def has_work(self) -> bool:
        return bool(self._schedule.running or self._schedule.waiting)

    def step(self, pump: Pump) -> StepOutputs:
        """Plan, decode, sample; once more where the decode was interrupted or found no room."""
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
        while True:
            waiting_since_s = time.monotonic()
            if pump(fd=self._decoder.fd, timeout_s=_PUMP_S):
                self._decoding.clear()
                return True
            if time.monotonic() - waiting_since_s < _PUMP_S:
                self._context.interrupt()
                return False

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
        except GenerationFailed as error:
            self._fail(request, str(error), outputs=outputs)
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
        """End one request without a token, which takes a column of counts."""
        if outputs.counts is None:
            outputs.counts = [1] * len(outputs.request_ids)
        outputs.finishes[len(outputs.request_ids)] = finish
        outputs.request_ids.append(request.request_id)
        outputs.counts.append(0)
        self._schedule.remove(request.request_id)

    def stats(self) -> EngineStats:
        running = self._schedule.running
        computed = sum(request.num_computed for request in running.values())
        return EngineStats(
            num_running=len(running),
            num_waiting=len(self._schedule.waiting),
            kv_cache_usage=computed / self._kv_cache_tokens,
            prefix_cache_queries=self._reuse.queries,
            prefix_cache_hits=self._reuse.hits,
        )

    def close(self) -> bool:
        """Free the KV cache. False if a decode still uses it, and with it the model."""
        self._context.interrupt()
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
