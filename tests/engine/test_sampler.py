"""From a row of logits to a token: each rule alone, and the truncations against a plain sort."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastserve.engine.guidance import Grammars
from fastserve.engine.sampler import (
    GrammarEnded,
    Sampler,
    likeliest,
    sampler_for,
    token_logprob,
)
from fastserve.errors import GenerationFailed, InvalidRequest
from fastserve.generation import LOGPROB_MIN, Grammar, GrammarKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

VOCAB_SIZE = 49_152


def row(*values: float) -> Floats:
    return np.array(values, np.float32)


def vocabulary_row(seed: int = 0, *, spread: float = 3.0) -> Floats:
    noise = np.random.default_rng(seed).standard_normal(VOCAB_SIZE)
    return (noise * spread).astype(np.float32)


def sampler(
    *, vocab_size: int = 4, prompt: Sequence[int] = (), ending: Sequence[int] = (), **params: Any
) -> Sampler:
    params.setdefault("max_tokens", 100)
    params.setdefault("temperature", 0.0)
    return Sampler(
        SamplingParams(**params),
        vocab_size=vocab_size,
        prompt_token_ids=prompt,
        ending_token_ids=ending,
    )


def draw(one: Sampler, logits: Floats, count: int = 1) -> list[int]:
    best = int(logits.argmax())
    return [one.sample(logits, best=best) for _ in range(count)]


def test_greedy_takes_the_greatest() -> None:
    assert draw(sampler(), row(0, 3, 1, 2)) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-45])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    assert draw(sampler(temperature=temperature), row(0, 3, 2.9, 2), count=20) == [1] * 20


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        pytest.param({"logit_bias": {0: 5.0}}, [0, 0], id="a bias lifts"),
        pytest.param({"logit_bias": {1: -100.0}}, [3, 3], id="a bias bans"),
        pytest.param({"presence_penalty": 2.5}, [1, 3], id="presence, once there"),
        pytest.param({"frequency_penalty": 0.6}, [1, 1, 3, 1], id="frequency, each time"),
        pytest.param({"repetition_penalty": 4.0}, [1, 3], id="repetition divides"),
        pytest.param({"min_tokens": 2, "ending": (1,)}, [3, 3, 1], id="no ending before its time"),
    ],
)
def test_what_changes_the_logits(params: dict[str, Any], expected: list[int]) -> None:
    assert draw(sampler(**params), row(0, 3, 1, 2), count=len(expected)) == expected


def test_repetition_counts_the_prompt_and_presence_does_not() -> None:
    logits = row(0, 3, 1, 2)
    assert draw(sampler(prompt=[1], repetition_penalty=4.0), logits) == [3]
    assert draw(sampler(prompt=[1], presence_penalty=2.0), logits) == [1]


def test_repetition_makes_a_negative_logit_less_likely_too() -> None:
    assert draw(sampler(prompt=[0], repetition_penalty=2.0), row(-1.0, -1.5, -3, -3)) == [1]


def test_presence_is_counted_once_though_frequency_cancels_it() -> None:
    # After the first token the two cancel out; after the second only frequency adds up.
    one = sampler(presence_penalty=0.5, frequency_penalty=-0.5)
    assert draw(one, row(1.0, 0.9, -9, -9), count=3) == [0, 0, 0]
    assert draw(one, row(0.0, 0.9, -9, -9)) == [0]


def test_the_logits_given_are_left_as_they_are() -> None:
    logits = row(0, 3, 1, 2)
    draw(sampler(temperature=1.0, logit_bias={0: 1.0}, presence_penalty=1.0, seed=1), logits)
    assert logits.tolist() == [0, 3, 1, 2]


def test_the_same_seed_gives_the_same_tokens() -> None:
    logits = vocabulary_row()
    runs = [
        draw(sampler(vocab_size=VOCAB_SIZE, temperature=1.0, seed=seed), logits, count=8)
        for seed in (7, 7, 8, -7, 2**63 - 1)
    ]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) == 4


def test_without_a_seed_no_two_requests_are_alike() -> None:
    logits = vocabulary_row()
    runs = [draw(sampler(vocab_size=VOCAB_SIZE, temperature=2.0), logits, 8) for _ in range(2)]
    assert runs[0] != runs[1]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="all"),
        pytest.param({"temperature": 0.5}, id="cold"),
        pytest.param({"top_k": 3}, id="top_k"),
        pytest.param({"top_p": 0.9}, id="top_p"),
        pytest.param({"min_p": 0.2}, id="min_p"),
    ],
)
def test_tokens_come_as_often_as_they_are_likely(params: dict[str, Any]) -> None:
    # More than one block, so that drawing a block first is covered.
    logits = np.full(600, -np.inf, np.float32)
    logits[[3, 255, 256, 300, 599]] = row(2.0, 1.5, 1.0, 0.5, -1.0)
    params = {"temperature": 1.0, **params}
    count = 8000
    drawn = draw(sampler(vocab_size=600, seed=3, **params), logits, count)
    shares = np.bincount(drawn, minlength=600) / count
    expected = reference(logits, **params)
    # Five standard deviations of the least certain share.
    assert np.abs(shares - expected).max() < 5 * np.sqrt(0.25 / count)
    assert not shares[expected == 0].any()


def reference(
    logits: Floats, *, temperature: float = 1.0, min_p: float = 0, top_k: int = 0, top_p: float = 1
) -> NDArray[np.float64]:
    """The same distribution by sorting all of it."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[weights[order] >= min_p][: top_k or None]
    share = np.cumsum(weights[kept]) / weights[kept].sum()
    kept = kept[: int(np.searchsorted(share, top_p)) + 1] if top_p < 1 else kept
    probabilities = np.zeros(logits.size)
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 10.0])
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    list(itertools.product([0.0, 0.1], [0, 1, 40, 500, 100_000], [0.0, 0.5, 0.95, 1.0])),
)
def test_truncations_keep_what_a_full_sort_keeps(
    spread: float, min_p: float, top_k: int, top_p: float
) -> None:
    logits = vocabulary_row(spread=spread)
    # Ties, whose order is that of their ids.
    logits[1000:1010] = logits.max()
    weights = np.exp(logits - logits.max())
    ids = likeliest(weights, min_p=min_p, top_k=top_k, top_p=top_p)
    share = np.cumsum(weights[ids].astype(np.float64))
    order = np.argsort(-weights, kind="stable")
    assert ids.tolist() == order[: len(ids)].tolist()
    left = order[weights[order] >= min_p][: top_k or None]
    total = weights[left].astype(np.float64).sum()
    if top_p == 1.0:
        assert len(ids) == len(left)
    else:
        assert share[-1] >= top_p * total * (1 - 1e-9)
        assert len(ids) == 1 or share[-2] < top_p * total


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_the_request(bad: float, temperature: float) -> None:
    with pytest.raises(GenerationFailed, match="logit"):
        draw(sampler(temperature=temperature), row(0, bad, 1, 2))


def test_a_request_that_bans_everything_fails() -> None:
    with pytest.raises(GenerationFailed, match="logit"):
        draw(sampler(vocab_size=2, min_tokens=1, ending=(0, 1)), row(0, 1))


def test_logprobs_are_those_of_the_softmax() -> None:
    logits = vocabulary_row()
    best = int(logits.argmax())
    wide = logits.astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    found = token_logprob(logits, 5, best=best, num_top=20)
    assert found.logprob == pytest.approx(expected[5], abs=1e-5)
    order = np.argsort(-logits, kind="stable")[:20]
    assert [token_id for token_id, _ in found.top] == order.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(expected[order], abs=1e-5)


def test_all_probabilities_add_up_to_one() -> None:
    logits = row(0, 3, 1, 2, -50)
    found = token_logprob(logits, 1, best=1, num_top=20)
    assert len(found.top) == 5
    assert sum(np.exp(logprob) for _, logprob in found.top) == pytest.approx(1.0)


def test_equal_logprobs_go_by_id_and_none_is_infinite() -> None:
    found = token_logprob(row(1, 2, -np.inf, 2, 1), 2, best=1, num_top=5)
    assert [token_id for token_id, _ in found.top] == [1, 3, 0, 4, 2]
    assert found.logprob == found.top[-1][1] == LOGPROB_MIN


def test_only_the_chosen_logprob_where_no_others_are_asked_for() -> None:
    assert token_logprob(row(0, 0), 1, best=0, num_top=0).top == ()


# ---- grammars

TOKENS = [b"a", b"b", b"c", b"ab", b"", b"", b"d"]
END, OTHER_END = 4, 5


def guided(pattern: str, *, eos: Sequence[int] = (END,), **params: Any) -> Sampler:
    grammars = Grammars(
        TOKENS,
        vocab_size=len(TOKENS),
        special_ids=[END, OTHER_END],
        eos_token_ids=eos,
        encode=lambda text: [TOKENS.index(letter.encode()) for letter in text],
    )
    params.setdefault("temperature", 0.0)
    return sampler_for(
        SamplingParams(max_tokens=100, **params),
        vocab_size=len(TOKENS),
        prompt_token_ids=[],
        eos_token_ids=frozenset(eos),
        guide=grammars.compile(Grammar(kind=GrammarKind.REGEX, source=pattern)),
    )


def said(one: Sampler, logits: Floats, count: int = 100) -> str:
    """What is said until the grammar is at its end, an end is chosen ("."), or it is enough."""
    text = b""
    for _ in range(count):
        [token_id] = draw(one, logits)
        if token_id in (END, OTHER_END):
            return text.decode() + "."
        text += TOKENS[token_id]
        if one.complete:
            break
    return text.decode()


LIKES_C = row(3, 2, 9, 1, 0, 0, 8)


@pytest.mark.parametrize(
    ("pattern", "params", "text"),
    [
        pytest.param("[ab]{3}", {}, "aaa", id="the greatest of what is allowed"),
        pytest.param("[ab]{3}", {"logit_bias": {1: 2.0}}, "bbb", id="bias comes before"),
        pytest.param("[ab]{3}", {"logit_bias": {2: 100.0}}, "aaa", id="no bias allows anything"),
        pytest.param("[ab]{4}", {"presence_penalty": 2.0}, "abaa", id="penalties come before"),
        pytest.param("a|ab", {"logit_bias": {END: -9.0, 3: 9.0}}, "ab", id="the end of all ways"),
        pytest.param("a+", {"logit_bias": {END: 9.0}}, "a.", id="an end where it matches"),
        pytest.param("a{2,9}", {"logit_bias": {END: 9.0}}, "aa.", id="and not before"),
        pytest.param("a+", {"logit_bias": {END: 9.0}, "min_tokens": 3}, "aaa.", id="min_tokens"),
        pytest.param("a{1,4}", {"logit_bias": {END: 9.0}, "ignore_eos": True}, "aaaa", id="no end"),
    ],
)
def test_what_a_grammar_leaves_is_chosen_from_as_ever(
    pattern: str, params: dict[str, Any], text: str
) -> None:
    assert said(guided(pattern, **params), LIKES_C) == text


def test_every_end_is_one() -> None:
    assert said(guided("a+", eos=(END, OTHER_END), logit_bias={OTHER_END: 9.0}), LIKES_C) == "a."


def test_an_end_that_is_a_stop_id_may_come_even_if_ends_are_ignored() -> None:
    params: dict[str, Any] = {
        "logit_bias": {END: 9.0},
        "ignore_eos": True,
        "stop_token_ids": (END,),
    }
    assert said(guided("a+", **params), LIKES_C) == "a."


def test_the_grammar_wins_over_min_tokens() -> None:
    one = guided("a(ab)?", min_tokens=5, stop_token_ids=(0, 3))
    with pytest.raises(InvalidRequest, match="banned"):  # its first letter is a stop id
        draw(one, LIKES_C)
    one = guided("b(a|ab)?", min_tokens=5, stop_token_ids=(0, 3))
    assert draw(one, LIKES_C) == [1]
    with pytest.raises(GrammarEnded):
        draw(one, LIKES_C)


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_what_is_drawn_is_allowed_and_as_likely_as_before(params: dict[str, Any]) -> None:
    logits = row(1.0, 0.0, 9.0, -50.0, 0.0, 0.0, 8.0)
    texts = [said(guided("[ab]", temperature=1.0, seed=n, **params), logits) for n in range(400)]
    assert set(texts) <= {"a", "b"}
    if not params:
        share = texts.count("a") / 400
        assert abs(share - 1 / (1 + np.exp(-1.0))) < 0.08


def test_a_seed_says_the_same_again() -> None:
    texts = {
        said(guided("[ab]{20}", temperature=1.0, seed=7), row(0, 0, 0, 0, 0, 0, 0)) for _ in "xy"
    }
    assert len(texts) == 1


def test_the_logits_stay_as_they_are() -> None:
    logits = LIKES_C.copy()
    draw(guided("[ab]"), logits)
    assert (logits == LIKES_C).all()


def test_logits_that_are_no_numbers_are_still_an_error() -> None:
    with pytest.raises(GenerationFailed, match="logit"):
        draw(guided("[ab]"), np.full(len(TOKENS), np.nan, np.float32))
