"""A result that grows becomes deltas, and log probabilities stand beside their tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fastserve.engine.trtllm_results import Cursor, Delta
from fastserve.generation import RequestId, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Iterator

STANDINS = Path(__file__).parent / "standins"
ONE, EOS = RequestId(1), 2


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package that stands in, imported afresh."""
    monkeypatch.syspath_prepend(str(STANDINS))
    import tensorrt_llm

    yield tensorrt_llm
    for name in [one for one in sys.modules if one.partition(".")[0] in ("tensorrt_llm", "torch")]:
        del sys.modules[name]


def test_log_probabilities_are_the_chosen_ones_and_the_best(library: Any) -> None:
    entry = {
        7: library.Logprob(-3.0, rank=9),
        4: library.Logprob(-0.5, rank=1),
        6: library.Logprob(-1.5, rank=2),
    }
    output = library.CompletionOutput(token_ids=[7], logprobs=[entry])
    top = ((4, -0.5), (6, -1.5))
    for num_top in (0, 1, 2):
        delta = cursor(logprobs=num_top).advance(output)
        assert delta == Delta(ONE, [7], [TokenLogprob(logprob=-3.0, top=top[:num_top])])


def test_a_bare_number_is_the_chosen_ones(library: Any) -> None:
    output = library.CompletionOutput(token_ids=[7], logprobs=[-3.0])
    assert cursor(logprobs=0).advance(output) == Delta(ONE, [7], [TokenLogprob(logprob=-3.0)])


def test_a_token_waits_for_its_log_probability(library: Any) -> None:
    reader = cursor(logprobs=0)
    output = library.CompletionOutput(token_ids=[7, 8], logprobs=[-1.0])
    assert reader.advance(output) == Delta(ONE, [7], [TokenLogprob(logprob=-1.0)])
    assert reader.advance(output) is None
    output.logprobs.append(-2.0)
    assert reader.advance(output) == Delta(ONE, [8], [TokenLogprob(logprob=-2.0)])


def test_a_token_that_waits_in_vain_is_a_failure(library: Any) -> None:
    output = library.CompletionOutput(token_ids=[7, 8], logprobs=[-1.0], finish_reason="stop")
    delta = cursor(logprobs=0).advance(output)
    assert delta is not None
    assert delta.finish is not None
    assert delta.finish.error == "1 tokens came without their log probabilities"


def cursor(**sampling: Any) -> Cursor:
    return Cursor(ONE, SamplingParams(max_tokens=10, **sampling), eos_token_ids=(EOS,))
