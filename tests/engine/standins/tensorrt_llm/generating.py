"""The stand-in's own engine, where nobody emits by hand: a thread that gives every request a token
a step, `max_batch_size` of them at a time, and its ranks, which are processes that do nothing.

Its model has as many tokens as config.json says; which comes next depends on the prompt, on how
many there are, and on the seed where the temperature is not 0. A bias decides as it does for real.

TRTLLM_STANDIN turns it on, in words: "generates", and how it is to fail. `raises`, `hangs` or
`exits` in the constructor; after so many steps `fatal@N` (the executor's error reaches every
result), `request@N` (one result's own), `silent@N` (no result hears of anything any more) or
`exit@N` (the process is gone); `shutdown-hangs`. If a rank is killed it is silent, too: that is all
that 1.2 makes of it.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorrt_llm import LLM, RequestOutput

VARIABLE = "TRTLLM_STANDIN"
STEP_S = 0.002
_FIRST_WORD = 10  # no control token
_LOG_HALF = math.log(0.5)


def wanted() -> dict[str, int]:
    """What TRTLLM_STANDIN says: each word, and the number after its @."""
    words = [word.partition("@") for word in os.environ.get(VARIABLE, "").split()]
    return {name: int(number or 0) for name, _, number in words}


class Generator:
    """Steps for an LLM until it is closed."""

    def __init__(self, llm: LLM, behaviour: dict[str, int]) -> None:
        self._llm = llm
        self._behaviour = behaviour
        self._batch_max = int(llm.arguments["max_batch_size"])
        config = json.loads((Path(llm.arguments["model"]) / "config.json").read_text())
        self._vocab_size = int(config["vocab_size"])
        self._steps = 0
        self._closed = threading.Event()
        self._silent = False
        world = llm.arguments["tensor_parallel_size"] * llm.arguments["pipeline_parallel_size"]
        self.ranks = [_rank(number) for number in range(world)]
        self._thread = threading.Thread(target=self._run, name="stand-in", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def _run(self) -> None:
        while not self._closed.wait(STEP_S):
            if any(rank.poll() is not None for rank in self.ranks):
                self._silent = True
            live = [one for one in self._llm.requests if not one.over]
            if live and not self._silent:
                self._steps += 1
                try:
                    self._step(live)
                except RuntimeError:  # the loop is closed: nobody reads results any more
                    return

    def _step(self, live: list[RequestOutput]) -> None:
        self._fail(live)
        for request in live[: self._batch_max]:
            self._advance(request)

    def _fail(self, live: list[RequestOutput]) -> None:
        from tensorrt_llm.executor import CppExecutorError
        from tensorrt_llm.executor.utils import RequestError

        now = {name for name, number in self._behaviour.items() if number == self._steps}
        if "exit" in now:
            os._exit(1)
        if "request" in now:
            live[0].over = True
            live[0].fail(RequestError("out of blocks"))
        if "silent" in now:
            self._silent = True
        if "fatal" in now:
            self._silent = True
            for request in live:
                request.fail(CppExecutorError("CUDA error: an illegal memory access"))

    def _advance(self, request: RequestOutput) -> None:
        if request.over or self._silent:
            return
        if request.asked_to_abort.is_set():
            request.over = True
            request.emit(finish="cancelled")
            return
        params = request.sampling_params
        ends = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            ends.add(params.end_id)
        request.made += 1
        banned = ends if request.made <= (params.min_tokens or 0) else set()
        ranked = self._ranked(request, params, banned)
        # As often as not the likeliest; a seed makes the draw the same every time.
        draw = random.Random(f"{params.seed} {request.made}") if params.seed is not None else random
        rank = 0 if not params.temperature or params.top_k == 1 else draw.randrange(4)
        token_id = ranked[rank]
        finish = stop_reason = None
        if token_id in ends:
            is_end = token_id == params.end_id and not params.ignore_eos
            finish, stop_reason = "stop", None if is_end else token_id
        elif request.made >= params.max_tokens:
            finish = "length"
        request.over = finish is not None
        logprobs = None
        if params.logprobs is not None:
            logprobs = [_logprobs(ranked, rank, num_top=params.logprobs)]
        told = [token_id]
        if stop_reason is not None and not params.include_stop_str_in_output:
            told, logprobs = [], None
        request.emit(*told, logprobs=logprobs, finish=finish, stop_reason=stop_reason)

    def _ranked(self, request: RequestOutput, params: Any, banned: set[int]) -> list[int]:
        """The tokens that may come next, best first."""
        start = zlib.crc32(repr((request.prompt_token_ids, request.made)).encode())
        words = range(_FIRST_WORD, self._vocab_size)
        ranked = [words[(start + offset) % len(words)] for offset in range(len(words))]
        bias = params.embedding_bias
        if bias is not None:
            favoured = [at for at, value in enumerate(bias) if value > 0]
            ranked = favoured + [one for one in ranked if bias[one] == 0]
        return [one for one in ranked if one not in banned]


def _logprobs(ranked: list[int], rank: int, *, num_top: int) -> dict[int, Any]:
    """The likeliest, and the sampled one in any case; in no order that could be relied on."""
    from tensorrt_llm import Logprob

    ranks = sorted({*range(num_top), rank}, reverse=True)
    return {ranked[at]: Logprob(_LOG_HALF * (at + 1), at + 1) for at in ranks}


def _rank(number: int) -> subprocess.Popen[bytes]:
    """A process that looks as if MPI had started it."""
    environment = os.environ | {"OMPI_COMM_WORLD_RANK": str(number)}
    return subprocess.Popen(["sleep", "600"], env=environment, start_new_session=False)
