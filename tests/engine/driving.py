"""An embedded engine driven step by step, and what its requests got. For tests of several files."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING, Any

from fastserve.engine.adapters.llamacpp import LlamaCppEngine
from fastserve.generation import RequestId, SamplingParams
from fastserve.lane.messages import Submit

if TYPE_CHECKING:
    from fastserve.engine.llama import Context
    from fastserve.generation import Finish

# Read by OpenMP when the library loads: its threads otherwise spin between decodes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def wait(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
    """A pump that has nothing else to serve."""
    return bool(select.select([fd] if fd is not None else [], [], [], timeout_s)[0])


class Driver:
    """The engine, its requests' tokens and finishes so far; each request is greedy."""

    def __init__(self, **settings: Any) -> None:
        self.engine = LlamaCppEngine(**{"max_seq_len": 512, "max_num_seqs": 4, **settings})
        self.engine.describe()
        self.engine.load(lambda share: None)
        self.tokens: dict[RequestId, list[int]] = {}
        self.finishes: dict[RequestId, Finish] = {}

    @property
    def context(self) -> Context:
        assert self.engine._runner is not None
        return self.engine._runner._context

    def ids(self, text: str) -> list[int]:
        assert self.engine._model is not None
        return self.engine._model.tokenize(text)

    def submit(self, prompt: str | list[int], **params: Any) -> RequestId:
        number = RequestId(len(self.tokens) + 1)
        self.tokens[number] = []
        sampling = SamplingParams(
            **{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params}
        )
        ids = self.ids(prompt) if isinstance(prompt, str) else prompt
        self.engine.add(Submit(request_id=number, prompt_token_ids=ids, sampling=sampling))
        return number

    def step(self, pump: Any = wait) -> None:
        outputs = self.engine.step(pump)
        rest = iter(outputs.token_ids)
        for index, number in enumerate(map(RequestId, outputs.request_ids)):
            assert number not in self.finishes, "nothing follows a finish"
            count = 1 if outputs.counts is None else outputs.counts[index]
            self.tokens[number] += [next(rest) for _ in range(count)]
            if index in outputs.finishes:
                self.finishes[number] = outputs.finishes[index]

    def finish_all(self) -> None:
        while self.engine.has_work():
            self.step()

    def answer(self, prompt: str | list[int], **params: Any) -> list[int]:
        """Submit, and step until nothing is left."""
        number = self.submit(prompt, **params)
        self.finish_all()
        return self.tokens[number]

    def cached(self, number: RequestId) -> int:
        return self.finishes[number].cached_tokens
