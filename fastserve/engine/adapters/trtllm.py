"""TensorRT-LLM on NVIDIA GPUs, through its LLM API: token ids in and token ids out.

The library schedules and steps by itself. A thread of ours submits to it and collects what comes
(trtllm_loop.py); a step here waits in the pump until something has, and returns all of it. So a
step that does not end is an engine that stands still, and steps are counted by those who watch.

Until 1.3 the library does not notice that a rank was killed, and its shutdown waits for ever. So
ranks are watched here, and closing has a deadline: what is left then is killed, and abandoned to
the end of the process.

Knows nothing of lanes, HTTP or text.
"""

from __future__ import annotations

import dataclasses
import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve.engine import mpi_shm
from fastserve.engine.admission import queue_of
from fastserve.engine.checks import check_request, refuse_script
from fastserve.engine.interface import EngineStats, StepOutputs
from fastserve.engine.mpi_find import find_ranks
from fastserve.engine.mpi_library import finalize
from fastserve.engine.mpi_release import release_all
from fastserve.engine.mpi_watch import IdentityWatch
from fastserve.engine.trtllm_api import (
    SamplingTranslator,
    TrtLlmOptions,
    grammar_kinds,
    import_library,
    llm_arguments,
    read_extra_options,
    refuse_variables,
)
from fastserve.engine.trtllm_loop import GenerationLoop
from fastserve.engine.trtllm_results import Cursor
from fastserve.engine.trtllm_stats import StatsReader
from fastserve.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    StartError,
)
from fastserve.log import get_logger
from fastserve.readable import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from fastserve.engine.admission import Queue
    from fastserve.engine.interface import Pump
    from fastserve.engine.trtllm_api import LLM, Library
    from fastserve.engine.trtllm_results import Delta
    from fastserve.generation import ModelCard, RequestId
    from fastserve.lane.messages import Submit

log = get_logger("engine")

# How long one wait for the library is, and how often its health is asked after.
_PUMP_S = 1.0

# How often loading lets the lanes be served.
_PROGRESS_INTERVAL_S = 0.2

# An orderly shutdown waits for the ranks. It must fit into server.terminate_timeout_s, or else the
# supervisor kills first, which loses nothing but the library's last words.
_CLOSE_TIMEOUT_S = 4.0

# Once the engine is dead nobody is to wait for it.
_ABANDON_TIMEOUT_S = 0.2


class TensorRTLLMEngine:
    """An Engine over one Hugging Face model directory."""

    def __init__(
        self,
        *,
        describe: Callable[[], ModelCard],
        model: str | None,
        max_num_seqs: int = 0,
        options: TrtLlmOptions | None = None,
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`describe` reads the card of `model`, a directory; its max_seq_len is what is allocated.

        `max_num_seqs`: requests that run at once (0: the choice of `options`). `close_timeout_s`:
        how long close() waits for an orderly shutdown. Raises ConfigError.
        """
        self._options = options or TrtLlmOptions()
        if max_num_seqs and self._options.max_batch_size not in (None, max_num_seqs):
            raise ConfigError(
                f"max_num_seqs is {max_num_seqs} and max_batch_size is "
                f"{self._options.max_batch_size}, which mean the same: set one of them"
            )
        self._describe = describe
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._close_timeout_s = close_timeout_s
        self._clock = clock
        self._extra: dict[str, object] = {}
        self._card: ModelCard | None = None
        self._loading: GenerationLoop | None = None
        self._runner: _Runner | None = None

    def describe(self) -> ModelCard:
        """See Engine. Reads the model's configuration and the file of extra options."""
        refuse_variables(os.environ)
        self._model = _model_directory(self._model)
        if self._options.extra_options_path is not None:
            self._extra = read_extra_options(Path(self._options.extra_options_path))
        kinds = grammar_kinds(self._extra)
        self._card = dataclasses.replace(self._describe(), grammar_kinds=kinds)
        return self._card

    def load(self, progress: Callable[[float], None]) -> None:
        """See Engine. The library does not say how far it is, so `progress` is 0 until it is 1."""
        assert self._card is not None, "described before it is loaded"
        assert self._model is not None, "described before it is loaded"
        arguments = llm_arguments(
            model=self._model,
            card=self._card,
            options=self._options,
            max_num_seqs=self._max_num_seqs,
            extra=self._extra,
        )
        mpi_shm.sweep()  # of an engine before this one that had no time to
        start = _Start(arguments)
        self._loading = GenerationLoop(start.make_llm, is_fatal=start.is_fatal)
        while not wait_readable(self._loading.fd, timeout_s=_PROGRESS_INTERVAL_S):
            progress(0.0)
        if self._loading.error is not None:
            raise _start_error(self._loading.error)
        self._runner = _Runner(
            self._loading,
            library=start.loaded(),
            arguments=arguments,
            card=self._card,
            vocab_size=_logits_width(Path(self._model), default=self._card.vocab_size),
            clock=self._clock,
        )
        self._loading = None
        progress(1.0)

    def add(self, request: Submit) -> None:
        """See Engine. Raises InvalidRequest for what the library would fail on, or ignore."""
        self._loaded().add(request)

    def abort(self, request_ids: Collection[RequestId]) -> None:
        """See Engine. The library learns of it a moment later; no output follows all the same."""
        self._loaded().abort(request_ids)

    def has_work(self) -> bool:
        """See Engine. Also true once the engine is dead, so that `step` can say so."""
        return self._runner is not None and self._runner.has_work()

    def step(self, pump: Pump) -> StepOutputs:
        """See Engine. Raises EngineDead."""
        return self._loaded().step(pump)

    def stats(self) -> EngineStats:
        """See Engine. A request counts as waiting until its first token."""
        if self._runner is None:
            return EngineStats(num_running=0, num_waiting=0)
        return self._runner.stats()

    def queue(self) -> Queue:
        """See Engine. The library has the queue, and does not say who of it has begun: that is
        reckoned from its batch's size."""
        return self._loaded().queue()

    def close(self) -> None:
        """See Engine. Takes at most `close_timeout_s`, or a moment if the engine is dead."""
        loading, self._loading = self._loading, None
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close(timeout_s=self._close_timeout_s)
        elif loading is not None and not loading.close(orderly=False, timeout_s=_ABANDON_TIMEOUT_S):
            log.warning("TensorRT-LLM is still loading, abandoned")
            _kill_ranks()

    def _loaded(self) -> _Runner:
        assert self._runner is not None, "the model is not loaded"
        return self._runner


class _Start:
    """What the library's thread does first: import it, and make the LLM."""

    def __init__(self, arguments: dict[str, object]) -> None:
        self._arguments = arguments
        self._library: Library | None = None

    def make_llm(self) -> LLM:
        self._library = import_library()
        return self._library.make_llm(**self._arguments)

    def is_fatal(self, error: BaseException) -> bool:
        return self._library is None or self._library.is_fatal(error)

    def loaded(self) -> Library:
        assert self._library is not None, "there is an LLM, so there is a library"
        return self._library


class _Runner:
    """The loaded model at work."""

    def __init__(
        self,
        loop: GenerationLoop,
        *,
        library: Library,
        arguments: dict[str, object],
        card: ModelCard,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        assert loop.llm is not None, "loaded"
        loop.take()
        self._loop = loop
        self._llm = loop.llm
        self._library = library
        self._card = card
        self._vocab_size = vocab_size
        self._clock = clock
        self._translator = SamplingTranslator(
            library, arguments=arguments, eos_token_ids=card.eos_token_ids, vocab_size=vocab_size
        )
        chunked = bool(arguments["enable_chunked_prefill"])
        step_tokens_max = arguments["max_num_tokens"]
        self._prompt_tokens_max = (
            step_tokens_max
            if isinstance(step_tokens_max, int) and not chunked
            else card.max_seq_len
        )
        self._batch_size = _batch_size(arguments)
        self._stats_wanted = bool(arguments.get("enable_iter_perf_stats"))
        self._stats: StatsReader | None = None
        # How many tokens the prompt of each has, in the order in which they came.
        self._waiting: dict[int, int] = {}
        self._running: set[int] = set()
        self._dead: EngineDead | None = None
        self._healthy_at_s = clock()
        self._watch = IdentityWatch(find_ranks())
        # One descriptor for the pump: deltas, or the end of a rank.
        self._poll = select.epoll()
        self._poll.register(loop.fd, select.EPOLLIN)
        self._poll.register(self._watch.fd, select.EPOLLIN)
        log.info(
            "model loaded",
            model=card.name,
            max_seq_len=card.max_seq_len,
            library=f"tensorrt_llm {library.version}",
            ranks=len(self._watch.local),
        )

    def add(self, submit: Submit) -> None:
        max_tokens = self._check(submit)
        params = submit.sampling
        sampling_params = self._translator.translate(params, max_tokens=max_tokens)
        cursor = Cursor(submit.request_id, params, eos_token_ids=self._card.eos_token_ids)
        self._waiting[submit.request_id] = len(submit.prompt_token_ids)
        traced = self._library.takes_trace_headers and submit.trace_headers
        self._loop.submit(
            submit.request_id,
            list(submit.prompt_token_ids),
            sampling_params,
            cursor=cursor,
            more={"trace_headers": submit.trace_headers} if traced else None,
        )
        # Before the first request there are no statistics to read.
        if self._stats_wanted and self._stats is None:
            self._stats = StatsReader(self._llm)

    def _check(self, submit: Submit) -> int:
        """Return how many tokens the answer may have. Raises InvalidRequest."""
        refuse_script(submit)
        if submit.sampling.prompt_logprobs is not None:
            raise InvalidRequest(
                "this engine does not tell the logprobs of a prompt, which 'echo' asks for",
                param="logprobs",
            )
        if submit.sampling.priority:
            raise InvalidRequest("this engine serves in order: 'priority' is 0", param="priority")
        max_tokens = check_request(submit, card=self._card, vocab_size=self._vocab_size)
        num_prompt = len(submit.prompt_token_ids)
        if num_prompt > self._prompt_tokens_max:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens, and a step takes {self._prompt_tokens_max} "
                "(max_num_tokens; prompts are not taken in chunks: enable_chunked_prefill is off)"
            )
        return max_tokens

    def abort(self, request_ids: Collection[RequestId]) -> None:
        live = [one for one in request_ids if one in self._running or one in self._waiting]
        self._running.difference_update(live)
        for request_id in live:
            self._waiting.pop(request_id, None)
        if live:
            self._loop.abort(live)

    def has_work(self) -> bool:
        self._look_after()
        return bool(self._running or self._waiting or self._dead)

    def step(self, pump: Pump) -> StepOutputs:
        """Wait until the library has said something, and return all of it."""
        while True:
            outputs = self._collect()
            if outputs.request_ids or not (self._running or self._waiting):
                return outputs
            self._look_after()
            if self._dead is not None:
                raise self._dead
            waiting_since_s = self._clock()
            readable = pump(fd=self._poll.fileno(), timeout_s=_PUMP_S)
            if not readable and self._clock() - waiting_since_s < _PUMP_S:
                return StepOutputs()  # the pump gave up early: the server stops

    def _collect(self) -> StepOutputs:
        counts: list[int] = []
        outputs = StepOutputs(counts=counts)
        for delta in self._loop.take():
            # What was aborted may still have had something to say.
            if self._waiting.pop(delta.request_id, None) is not None:
                self._running.add(delta.request_id)
            elif delta.request_id not in self._running:
                continue
            self._put(delta, outputs)
            counts.append(len(delta.token_ids))
        if not counts and self._dead is not None:
            raise self._dead
        return outputs

    def _put(self, delta: Delta, outputs: StepOutputs) -> None:
        index = len(outputs.request_ids)
        outputs.request_ids.append(delta.request_id)
        outputs.token_ids += delta.token_ids
        if delta.logprobs:
            outputs.logprobs[index] = delta.logprobs
        if delta.finish is not None:
            outputs.finishes[index] = delta.finish
            self._running.discard(delta.request_id)

    def _look_after(self) -> None:
        """See whether the engine still lives; the library itself is asked once a second."""
        if self._dead is not None:
            return
        now_s = self._clock()
        if self._loop.error is not None:
            error = self._loop.error
            self._die(f"{type(error).__name__}: {error}", cause=error)
        elif exited := self._watch.exited():
            self._die(f"{exited[0]} exited")
        elif now_s - self._healthy_at_s >= _PUMP_S:
            self._healthy_at_s = now_s
            if not self._is_healthy():
                self._die("it says that it is shutting down, or that it is not healthy")

    def _is_healthy(self) -> bool:
        """Ask the library, where it has an answer: what /health asks in trtllm-serve.

        Some versions shut down on the thread that reads results, and wait there for dead ranks;
        then this is the only word of it.
        """
        # Private, but the only way: not every version has it.
        check = getattr(self._llm, "_check_health", None)
        try:
            return check is None or bool(check())
        except Exception as error:
            log.warning_burst("health check failed", error=repr(error))
            return not self._library.is_fatal(error)

    def _die(self, reason: str, *, cause: BaseException | None = None) -> None:
        self._dead = EngineDead(f"TensorRT-LLM is dead: {reason}")
        self._dead.__cause__ = cause
        # Its pool's manager thread would be joined at the interpreter's exit, and never end.
        release_all(reason=reason)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=self._stats.kv_cache_usage if self._stats is not None else 0.0,
        )

    def queue(self) -> Queue:
        return queue_of(
            self._waiting.values(),
            num_waiting=len(self._waiting),
            num_tokens=sum(self._waiting.values()),
            num_free=self._batch_size - len(self._running),
        )

    def close(self, *, timeout_s: float) -> None:
        """Shut down in order if the engine lives; whatever is left after that is killed."""
        if self._stats is not None:
            self._stats.close()
        self._look_after()
        orderly = self._dead is None
        self._poll.close()
        closed = self._loop.close(
            orderly=orderly, timeout_s=timeout_s if orderly else _ABANDON_TIMEOUT_S
        )
        if not closed:
            log.error("TensorRT-LLM does not shut down, abandoned")
        elif orderly:
            finalize(timeout_s=_ABANDON_TIMEOUT_S)
        self._watch.kill()
        self._watch.close()


def _model_directory(model: str | None) -> str:
    """Return the model's directory. Raises StartError for what the library cannot load."""
    needs = "TensorRT-LLM needs a Hugging Face directory: config.json, safetensors, tokenizer.json"
    if model is None:
        raise StartError(f"the trtllm engine needs a model, --model PATH; {needs}")
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        raise StartError(f"{path}: a GGUF file is for the llamacpp engine; {needs}")
    if not path.is_dir():
        raise StartError(f"{path}: not a directory; {needs}")
    if not (path / "config.json").is_file():
        raise StartError(f"{path}: there is no config.json in it; {needs}")
    return str(path)


def _logits_width(model: Path, *, default: int) -> int:
    """How many logits a step has for each request. A tokenizer may have more tokens than that, and
    one of them would be the end of the whole batch."""
    try:
        config: Any = msgspec.json.decode((model / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return default
    match config:
        case {"vocab_size": int(size)} | {"text_config": {"vocab_size": int(size)}}:
            return size
    return default


def _batch_size(arguments: dict[str, object]) -> int:
    """How many requests run at once; attention data parallelism has such a batch on each rank."""
    batch_size, ranks = arguments["max_batch_size"], arguments["tensor_parallel_size"]
    assert isinstance(batch_size, int), "the library has taken it for its batch size"
    assert isinstance(ranks, int), "the library has taken it for its number of ranks"
    return batch_size * ranks if arguments.get("enable_attention_dp") else batch_size


def _start_error(error: BaseException) -> StartError:
    if isinstance(error, StartError):
        return error
    start_error = StartError(f"TensorRT-LLM cannot start: {type(error).__name__}: {error}")
    start_error.__cause__ = error
    return start_error


def _kill_ranks() -> None:
    watch = IdentityWatch(find_ranks())
    watch.kill()
    watch.close()
