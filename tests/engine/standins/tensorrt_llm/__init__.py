"""Stands in for TensorRT-LLM where there is no GPU: the LLM API of 1.2, driven by a test.

Its signatures, its refusals and its manners are the real one's: results must be made on a running
loop, are one object that changes with each response, and an abort only asks. A test takes the LLM
from `LLM.made`, and has its requests `emit`, `fail` and so on, from any thread, as the dispatcher
of the real one does. With TRTLLM_STANDIN set they go on by themselves: see generating.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tensorrt_llm import generating
from tensorrt_llm.nodes.session import attached

if TYPE_CHECKING:
    from collections.abc import Callable

ARGUMENTS = {
    "pipeline_parallel_size", "context_parallel_size", "moe_expert_parallel_size",
    "max_batch_size", "max_beam_width", "max_seq_len", "max_num_tokens", "kv_cache_config",
    "enable_chunked_prefill", "enable_iter_perf_stats", "stream_interval", "sampler_type",
    "guided_decoding_backend",
}  # fmt: skip


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    n: int = 1
    best_of: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    guided_decoding: Any = None
    ignore_eos: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k > 1_000_000:
            raise ValueError("top_k is too large")


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput:
    """A request, and what the test does with it."""

    def __init__(self, prompt_token_ids: list[int], sampling_params: SamplingParams) -> None:
        # Raises where no loop runs, as the real one's assertion does, only sooner.
        self._loop = asyncio.get_running_loop()
        self._responses: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self.thread = threading.current_thread()
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.asked_to_abort = threading.Event()
        self.made = 0
        self.over = False

    def abort(self) -> None:
        assert threading.current_thread() is self.thread, "sockets are not for several threads"
        self.asked_to_abort.set()

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        (await self._responses.get())()
        return self

    # --- for the test ---

    def emit(
        self,
        *token_ids: int,
        logprobs: list[Any] | None = None,
        finish: str | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        """The engine has produced these, and perhaps the end."""

        def handle() -> None:
            output = self.outputs[0]
            output.token_ids.extend(token_ids)
            output.logprobs += logprobs or []
            output.finish_reason = finish
            output.stop_reason = stop_reason
            self.finished = finish is not None

        self._respond(handle)

    def end(self) -> None:
        """The last response says nothing."""

        def handle() -> None:
            self.finished = True

        self._respond(handle)

    def fail(self, error: BaseException) -> None:
        """Whoever reads this result gets `error`."""

        def handle() -> None:
            self.finished = True
            raise error

        self._respond(handle)

    def block(self, until: threading.Event) -> None:
        """Whoever reads this result stands still: 1.2 shuts down there when the engine dies."""

        def handle() -> None:
            until.wait(60)

        self._respond(handle)

    def _respond(self, handle: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._responses.put_nowait, handle)


class LLM:
    """The engine. `made`: the last one; `refuses`: what its constructor raises, if anything."""

    made: ClassVar[LLM]
    refuses: ClassVar[BaseException | None] = None

    def __init__(  # noqa: PLR0917 - as the real one
        self,
        model: str,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        if unknown := set(kwargs) - ARGUMENTS:
            raise ValueError(f"unknown arguments: {unknown}")
        if self.refuses is not None:
            raise self.refuses
        self.arguments = {
            "model": model,
            "skip_tokenizer_init": skip_tokenizer_init,
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            **kwargs,
        }
        self.thread = threading.current_thread()
        self.requests: list[RequestOutput] = []
        self.arrived = threading.Semaphore(0)
        self.refuses_next: BaseException | None = None
        self.healthy = True
        self.stats: list[dict[str, Any]] = []
        self.shut_down = threading.Event()
        self.may_shut_down = threading.Event()
        self.may_shut_down.set()
        LLM.made = self
        if path := os.environ.get("TRTLLM_STANDIN_ARGUMENTS"):
            Path(path).write_text(json.dumps(self.arguments))
        self.leader = attached()
        behaviour = generating.wanted()
        if "raises" in behaviour:
            raise RuntimeError("only 1 GPU, but 8 are required")
        if "exits" in behaviour:
            os._exit(1)
        if "hangs" in behaviour:
            threading.Event().wait()
        if "shutdown-hangs" in behaviour:
            self.may_shut_down.clear()
        self.generator = generating.Generator(self, behaviour) if behaviour else None

    def generate_async(  # noqa: PLR0917 - as the real one
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        assert threading.current_thread() is self.thread, "sockets are not for several threads"
        assert streaming, "the test emits one response at a time"
        assert sampling_params is not None
        error, self.refuses_next = self.refuses_next, None
        if error is not None:
            self.arrived.release()
            raise error
        if sampling_params.end_id is None:
            raise ValueError("end_id is not set, and there is no tokenizer")
        request = RequestOutput(inputs["prompt_token_ids"], sampling_params)
        self.requests.append(request)
        self.arrived.release()
        return request

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self.stats

    def emit_together(
        self, token_ids: dict[RequestOutput, list[int]], *, last: Callable[[], None]
    ) -> None:
        """One step of the engine: the dispatcher wakes the loop once for all of it.

        `last` is called when the last of them is about to be read.
        """

        def dispatch() -> None:
            for request, ids in token_ids.items():
                request.outputs[0].token_ids.extend(ids)
                is_last = request is list(token_ids)[-1]
                request._responses.put_nowait(last if is_last else lambda: None)

        next(iter(token_ids))._loop.call_soon_threadsafe(dispatch)

    def _check_health(self) -> bool:
        return self.healthy

    def shutdown(self) -> None:
        self.shut_down.set()
        self.may_shut_down.wait(60)
        if self.generator is not None:
            self.generator.close()
