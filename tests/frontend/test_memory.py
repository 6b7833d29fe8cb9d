"""What an answer in flight keeps: not what it was asked with, which may be long, and so may it."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from fastserve.frontend.model import Model
from fastserve.lane.messages import Outputs

if TYPE_CHECKING:
    from fastserve.generation import ModelCard
    from tests.frontend.stage import Asked, Stage

NUM = 100
LONG = "a" * 3000  # as many tokens: 24 KB
FIELDS = [f"X-Long: {'v' * 5000}"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_neither_prompt_nor_head_is_kept_while_an_answer_lasts(
    stage: Stage, card: ModelCard, path: str, *, stream: bool
) -> None:
    long_card = dataclasses.replace(card, max_seq_len=4096)
    stage.state.model = Model(long_card, template_bytes_max=1 << 20)

    def asked(text: str, *headers: str) -> list[Asked]:
        """So many answers in flight, each with a token or two."""
        said: dict[str, Any] = {"prompt": text}
        if "chat" in path:
            said = {"messages": [{"role": "user", "content": text}]}
        body = orjson.dumps(said | {"stream": stream, "max_tokens": 9})
        all_asked = [stage.request("POST", path, body=body, headers=headers) for _ in range(NUM)]
        ids: list[int] = [submit.request_id for submit in stage.submits]
        stage.inbox.clear()
        for _ in range(2):
            stage.frontend.on_outputs(Outputs(request_ids=ids, token_ids=[97] * NUM))
        return all_asked

    def kept_bytes(text: str, *headers: str) -> float:
        """What one of them keeps; the test itself keeps it, too."""
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        all_asked = asked(text, *headers)
        gc.collect()
        kept = (tracemalloc.get_traced_memory()[0] - before) / len(all_asked)
        for each in all_asked:
            each.exchange.disconnect()
        return kept

    kept_bytes(LONG, *FIELDS)  # caches fill
    tracemalloc.start()
    try:
        short = kept_bytes("a")
        long = kept_bytes(LONG, *FIELDS)
    finally:
        tracemalloc.stop()
    assert 1000 < short < 12_000
    assert long < short + 1000
