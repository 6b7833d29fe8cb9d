"""The embedded engine with its real model: what it generates, and who waits for whom."""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastserve.engine import llama
from fastserve.engine.adapters.llamacpp import LlamaCppEngine
from fastserve.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    StartError,
)
from fastserve.generation import FinishReason, RequestId, SamplingParams
from fastserve.lane.messages import Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fastserve.engine.interface import StepOutputs
    from fastserve.generation import Finish, TokenLogprob

# Read by OpenMP when the library loads: its threads otherwise spin between decodes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

MAX_SEQ_LEN = 512
MAX_NUM_SEQS = 8
EOS = 2
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little",
    "Water boils at",
    "My favourite colour is",
    "Two plus two is",
    "The quick brown fox jumps over",
    "To be or not to be, that",
    "In the beginning was",
)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tokenizer, which describing a model makes, out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def started(**settings: Any) -> LlamaCppEngine:
    settings = {"max_seq_len": MAX_SEQ_LEN, "max_num_seqs": MAX_NUM_SEQS, **settings}
    engine = LlamaCppEngine(**settings)
    engine.describe()
    engine.load(lambda share: None)
    return engine


@pytest.fixture(scope="module")
def shared() -> Iterator[LlamaCppEngine]:
    engine = started()
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: LlamaCppEngine) -> Iterator[LlamaCppEngine]:
    yield shared
    shared.abort([RequestId(number) for number in range(_numbers)])
    assert not shared.has_work()


def tokens(engine: LlamaCppEngine, text: str) -> list[int]:
    assert engine._model is not None
    return engine._model.tokenize(text)


def text_of(engine: LlamaCppEngine, ids: list[int]) -> str:
    assert engine._model is not None
    return b"".join(map(engine._model.token_to_piece, ids)).decode(errors="replace")


_numbers = 0


def submit(engine: LlamaCppEngine, prompt: str | list[int], **params: Any) -> RequestId:
    """Add a request, greedy and of 8 tokens unless told otherwise; returns its id."""
    global _numbers  # noqa: PLW0603 - ids are unique in the life of an engine, which tests share
    _numbers += 1
    number = RequestId(_numbers)
    ids = tokens(engine, prompt) if isinstance(prompt, str) else prompt
    params = {"max_tokens": 8, "temperature": 0.0, **params}
    engine.add(Submit(request_id=number, prompt_token_ids=ids, sampling=SamplingParams(**params)))
    return number


@dataclass
class Answers:
    """What steps brought, by request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    def take(self, outputs: StepOutputs) -> None:
        rest = iter(outputs.token_ids)
        for index, number in enumerate(outputs.request_ids):
            assert number not in self.finishes, "nothing follows a finish"
            count = 1 if outputs.counts is None else outputs.counts[index]
            self.tokens.setdefault(number, []).extend(next(rest) for _ in range(count))
            if index in outputs.finishes:
                self.finishes[number] = outputs.finishes[index]
            self.logprobs.setdefault(number, []).extend(outputs.logprobs.get(index, []))
            if index in outputs.prompt_logprobs:
                assert number not in self.prompt_logprobs, "they come once"
                assert len(self.tokens[number]) <= 1, "with the first token"
                self.prompt_logprobs[number] = outputs.prompt_logprobs[index]
        assert next(rest, None) is None, "every token belongs to a request"


def wait(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
    """A pump that has nothing else to serve."""
    return bool(select.select([fd] if fd is not None else [], [], [], timeout_s)[0])


class Meanwhile:
    """A pump that runs these once each, while the decodes it waits for are under way."""

    def __init__(self, *actions: Callable[[], None]) -> None:
        self.actions = list(actions)

    def __call__(self, *, fd: int | None = None, timeout_s: float = 0.0) -> bool:
        if fd is not None and self.actions:
            self.actions.pop(0)()
        return wait(fd=fd, timeout_s=timeout_s)


def finish_all(engine: LlamaCppEngine) -> Answers:
    answers = Answers()
    while engine.has_work():
        answers.take(engine.step(wait))
    return answers


def generate(engine: LlamaCppEngine, prompt: str | list[int], **params: Any) -> list[int]:
    number = submit(engine, prompt, **params)
    return finish_all(engine).tokens[number]


# --- what is generated


def test_it_answers(engine: LlamaCppEngine) -> None:
    assert text_of(engine, generate(engine, "The capital of France is", max_tokens=1)) == " Paris"


def test_greedy_answers_do_not_depend_on_company(engine: LlamaCppEngine) -> None:
    alone = [generate(engine, prompt, ignore_eos=True) for prompt in PROMPTS]
    numbers = [submit(engine, prompt, ignore_eos=True) for prompt in PROMPTS]
    together = finish_all(engine)
    assert [together.tokens[number] for number in numbers] == alone


def test_the_size_of_prefill_chunks_changes_nothing(engine: LlamaCppEngine) -> None:
    prompt = " ".join(PROMPTS) * 3
    whole = generate(engine, prompt, ignore_eos=True)
    chunked = started(prefill_chunk_tokens=16)
    try:
        numbers = [submit(chunked, p, ignore_eos=True) for p in (PROMPTS[1], prompt, PROMPTS[2])]
        assert finish_all(chunked).tokens[numbers[1]] == whole
    finally:
        chunked.close()


# --- what is told of a prompt


def test_a_prompt_is_as_likely_as_if_it_had_been_generated(engine: LlamaCppEngine) -> None:
    prompt = tokens(engine, "Once upon a time there was a little")
    generating = submit(engine, prompt, max_tokens=80, ignore_eos=True, logprobs=3)
    said = finish_all(engine)
    text = prompt + said.tokens[generating]
    # In company, and longer than what a step takes of such prompts.
    others = [submit(engine, p, ignore_eos=True) for p in PROMPTS[:3]]
    reading = submit(engine, text, max_tokens=1, prompt_logprobs=3)
    told = finish_all(engine)
    assert len(told.prompt_logprobs[reading]) == len(text) - 1
    for entry, original in zip(
        told.prompt_logprobs[reading][len(prompt) - 1 :], said.logprobs[generating], strict=True
    ):
        assert entry.logprob == pytest.approx(original.logprob, abs=1e-3)
        assert [one for one, _ in entry.top] == [one for one, _ in original.top]
        assert entry.top[0][1] == pytest.approx(original.top[0][1], abs=1e-3)
    assert not told.prompt_logprobs.keys() & set(others)
    assert [told.tokens[one] for one in others] == [
        generate(engine, p, ignore_eos=True) for p in PROMPTS[:3]
    ]


def test_a_prompt_may_be_told_of_without_an_answer(engine: LlamaCppEngine) -> None:
    full = ([7, 8, 9] * MAX_SEQ_LEN)[:MAX_SEQ_LEN]
    alone = submit(engine, full, max_tokens=0, prompt_logprobs=0)
    shortest = submit(engine, [7], max_tokens=0, prompt_logprobs=0)
    answers = finish_all(engine)
    for number, length in ((alone, MAX_SEQ_LEN), (shortest, 1)):
        assert answers.tokens[number] == []
        assert answers.finishes[number].reason is FinishReason.LENGTH
        assert len(answers.prompt_logprobs[number]) == length - 1
    assert all(entry.top == () for entry in answers.prompt_logprobs[alone])


def test_a_prompt_that_was_preempted_is_told_of_once(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tokens(engine, " ".join(PROMPTS))
    expected = submit(engine, text, max_tokens=2, prompt_logprobs=0)
    whole = finish_all(engine).prompt_logprobs[expected]
    first = submit(engine, PROMPTS[0], max_tokens=12, ignore_eos=True)
    second = submit(engine, text, max_tokens=2, prompt_logprobs=0)
    answers = Answers()
    answers.take(engine.step(wait))  # a part of the prompt
    decode, full = llama.Context.decode, [llama.Decoded.FULL]
    monkeypatch.setattr(
        llama.Context, "decode", lambda self, batch: full.pop() if full else decode(self, batch)
    )
    while engine.has_work():
        answers.take(engine.step(wait))
    assert len(answers.tokens[first]) == 12
    assert [one.logprob for one in answers.prompt_logprobs[second]] == pytest.approx(
        [one.logprob for one in whole], abs=1e-3
    )


# --- who waits for whom


def test_who_waits_is_served_by_priority() -> None:
    engine = started(max_num_seqs=1)
    try:
        submit(engine, PROMPTS[0], max_tokens=2)
        answers = Answers()
        answers.take(engine.step(wait))
        order = {
            submit(engine, PROMPTS[0], max_tokens=1, priority=priority): priority
            for priority in (5, 0, -3, 0)
        }
        while engine.has_work():
            answers.take(engine.step(wait))
        ended = [order[RequestId(n)] for n in answers.finishes if n in order]
        assert ended == [-3, 0, 0, 5]
    finally:
        engine.close()


def test_a_decode_step_waits_for_one_chunk_of_prefill_only() -> None:
    engine = started(prefill_chunk_tokens=16, prefill_target_ms=60_000)
    try:
        first = submit(engine, "Water boils at", max_tokens=20, ignore_eos=True)
        answers = Answers()
        answers.take(engine.step(wait))
        submit(engine, [5] * 100, max_tokens=1)
        for count in range(2, 8):
            answers.take(engine.step(wait))
            assert len(answers.tokens[first]) == count, "a token in every step"
            assert len(answers.tokens) == 1, "96 tokens of prompt are not all of it"
        answers.take(engine.step(wait))
        assert len(answers.tokens) == 2
    finally:
        engine.close()


def test_a_seed_gives_the_same_tokens_in_any_company(engine: LlamaCppEngine) -> None:
    params = {"temperature": 1.0, "top_p": 0.95, "ignore_eos": True}
    alone = generate(engine, PROMPTS[0], seed=11, **params)
    numbers = [
        submit(engine, prompt, seed=seed, **params)
        for prompt, seed in ((PROMPTS[1], 11), (PROMPTS[0], 11), (PROMPTS[0], 12))
    ]
    together = finish_all(engine).tokens
    assert together[numbers[1]] == alone
    assert together[numbers[2]] != alone


def test_an_end_of_turn_stops_and_is_the_last_token(engine: LlamaCppEngine) -> None:
    prompt = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    bias = {EOS: 100.0}
    number = submit(engine, prompt, logit_bias=bias)
    answers = finish_all(engine)
    assert answers.tokens[number] == [EOS]
    assert answers.finishes[number].reason is FinishReason.STOP
    assert answers.finishes[number].stop_token_id is None
    assert generate(engine, prompt, logit_bias=bias, ignore_eos=True, max_tokens=3) == [EOS] * 3


def test_min_tokens_puts_the_end_off(engine: LlamaCppEngine) -> None:
    found = generate(engine, PROMPTS[0], logit_bias={EOS: 100.0}, min_tokens=3)
    assert len(found) == 4
    assert found.index(EOS) == 3


def test_a_stop_id_stops_and_says_which(engine: LlamaCppEngine) -> None:
    whole = generate(engine, PROMPTS[1], ignore_eos=True)
    stop = whole[3]
    number = submit(engine, PROMPTS[1], stop_token_ids=(stop,), ignore_eos=True)
    answers = finish_all(engine)
    assert answers.tokens[number] == whole[: whole.index(stop) + 1]
    assert answers.finishes[number].reason is FinishReason.STOP
    assert answers.finishes[number].stop_token_id == stop


def test_the_limit_of_tokens_is_kept(engine: LlamaCppEngine) -> None:
    number = submit(engine, PROMPTS[0], max_tokens=3, ignore_eos=True)
    answers = finish_all(engine)
    assert len(answers.tokens[number]) == 3
    assert answers.finishes[number].reason is FinishReason.LENGTH


def test_a_full_context_ends_the_answer(engine: LlamaCppEngine) -> None:
    prompt = [5] * (MAX_SEQ_LEN - 3)
    number = submit(engine, prompt, max_tokens=100, ignore_eos=True)
    answers = finish_all(engine)
    assert len(answers.tokens[number]) == 3
    assert answers.finishes[number].reason is FinishReason.LENGTH


def test_logprobs_are_the_models_own_whatever_the_sampling(engine: LlamaCppEngine) -> None:
    plain = submit(engine, PROMPTS[0], logprobs=5, max_tokens=2, ignore_eos=True)
    biased = submit(
        engine, PROMPTS[0], logprobs=5, max_tokens=1, temperature=2.0, logit_bias={100: 100.0}
    )
    none = submit(engine, PROMPTS[0], max_tokens=1)
    chosen_only = submit(engine, PROMPTS[0], max_tokens=1, logprobs=0)
    answers = finish_all(engine)
    first, second = answers.logprobs[plain]
    assert first.top[0] == (answers.tokens[plain][0], first.logprob)
    assert [p for _, p in second.top] == sorted((p for _, p in second.top), reverse=True)
    assert 0.0 < sum(np.exp(p) for _, p in first.top) < 1.0
    assert answers.tokens[biased] == [100]
    assert answers.logprobs[biased][0].top == first.top
    assert answers.logprobs[biased][0].logprob < first.top[-1][1]
    assert answers.logprobs[none] == []
    assert [entry.top for entry in answers.logprobs[chosen_only]] == [()]


# --- who waits, and who goes


def test_more_requests_than_slots_wait_their_turn(engine: LlamaCppEngine) -> None:
    alone = generate(engine, PROMPTS[3], max_tokens=3, ignore_eos=True)
    numbers = [
        submit(engine, PROMPTS[3], max_tokens=3, ignore_eos=True) for _ in range(MAX_NUM_SEQS + 3)
    ]
    engine.step(wait)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (MAX_NUM_SEQS, 3)
    assert 0.0 < stats.kv_cache_usage < 1.0
    answers = finish_all(engine)
    assert answers.tokens[numbers[-1]] == alone
    assert set(answers.finishes) == set(numbers)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def test_an_abort_of_one_that_waits_forgets_it(engine: LlamaCppEngine) -> None:
    numbers = [submit(engine, PROMPTS[4], max_tokens=2) for _ in range(MAX_NUM_SEQS + 1)]
    engine.step(wait)
    engine.abort([numbers[-1], RequestId(1 << 40)])
    assert engine.stats().num_waiting == 0
    assert numbers[-1] not in finish_all(engine).tokens


def test_an_abort_in_prefill_frees_the_slot_while_the_step_goes_on(engine: LlamaCppEngine) -> None:
    expected = generate(engine, PROMPTS[5], ignore_eos=True)
    kept = submit(engine, PROMPTS[5], ignore_eos=True)
    answers = Answers()
    for _ in range(3):
        answers.take(engine.step(wait))
    gone = submit(engine, [5] * 500)
    answers.take(engine.step(Meanwhile(lambda: engine.abort([gone]))))
    assert engine.stats().num_running == 1
    assert len(answers.tokens[kept]) == 4, "the step was done again without the other"
    rest = finish_all(engine)
    assert answers.tokens[kept] + rest.tokens[kept] == expected
    assert gone not in rest.tokens


def test_an_abort_of_all_there_is_ends_the_step_at_once(engine: LlamaCppEngine) -> None:
    aborted_s: list[float] = []

    def abort() -> None:
        engine.abort([gone])
        aborted_s.append(time.monotonic())

    gone = submit(engine, [5] * 500)
    outputs = engine.step(Meanwhile(abort))
    # A chunk takes a second on the slowest machine; it was interrupted after milliseconds.
    assert time.monotonic() - aborted_s[0] < 1.0
    assert outputs.request_ids == []
    assert not engine.has_work()


def test_an_abort_in_decode_leaves_the_others_as_they_were(engine: LlamaCppEngine) -> None:
    alone = [generate(engine, prompt, ignore_eos=True) for prompt in PROMPTS[:4]]
    numbers = [submit(engine, prompt, ignore_eos=True) for prompt in PROMPTS[:4]]
    answers = Answers()
    for _ in range(3):
        answers.take(engine.step(wait))
    answers.take(engine.step(Meanwhile(lambda: engine.abort([numbers[1]]))))
    late = submit(engine, PROMPTS[1], ignore_eos=True)
    while engine.has_work():
        answers.take(engine.step(wait))
    assert len(answers.tokens[numbers[1]]) == 3, "nothing after the abort"
    assert [answers.tokens[numbers[i]] for i in (0, 2, 3)] == [alone[i] for i in (0, 2, 3)]
    assert answers.tokens[late] == alone[1], "who gets the slot next finds it empty"


def test_a_storm_of_aborts_interrupts_a_step_once(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine._runner is not None
    context = engine._runner._context
    interrupts: list[None] = []
    interrupt = context.interrupt

    def counted() -> None:
        interrupts.append(None)
        interrupt()

    monkeypatch.setattr(context, "interrupt", counted)
    numbers = [submit(engine, prompt, ignore_eos=True) for prompt in PROMPTS]
    engine.step(wait)
    storm = Meanwhile(*[partial(engine.abort, [number]) for number in numbers[1:]])
    steps = 0
    answers = Answers()
    while storm.actions:
        answers.take(engine.step(storm))
        steps += 1
    # The decode that is interrupted is done again in the same step, in which another comes.
    assert steps == (len(numbers[1:]) + 1) // 2
    assert len(answers.tokens[numbers[0]]) == steps, "who stays gets a token in every step"
    assert len(interrupts) <= steps


def test_requests_added_during_a_decode_run_in_the_next(engine: LlamaCppEngine) -> None:
    added: list[RequestId] = []
    first = submit(engine, PROMPTS[6], max_tokens=2, ignore_eos=True)
    answers = Answers()
    answers.take(
        engine.step(Meanwhile(lambda: added.append(submit(engine, PROMPTS[7], max_tokens=1))))
    )
    assert set(answers.tokens) == {first}
    answers.take(engine.step(wait))
    assert set(answers.tokens) == {first, *added}


def test_gaps_that_are_closed_change_no_answer(engine: LlamaCppEngine) -> None:
    expected = generate(engine, PROMPTS[7], max_tokens=8, ignore_eos=True)
    short = [submit(engine, prompt, max_tokens=2, ignore_eos=True) for prompt in PROMPTS[:5]]
    long = submit(engine, PROMPTS[7], max_tokens=8, ignore_eos=True)
    answers = Answers()
    while len(answers.finishes) < len(short):
        answers.take(engine.step(wait))
    answers.take(engine.step(wait))
    assert engine._runner is not None
    assert engine._runner._schedule.running[long].slot == 0
    answers.take(engine.step(wait))
    rest = finish_all(engine)
    assert answers.tokens[long] + rest.tokens[long] == expected


def decodes_fail_to_fit(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch, *, while_running: int
) -> None:
    """Let the KV cache be full for batches of that many requests or more."""
    assert engine._runner is not None
    runner = engine._runner
    decode = runner._context.decode

    def full(batch: llama.Batch) -> llama.Decoded:
        if len(runner._schedule.running) >= while_running:
            return llama.Decoded.FULL
        return decode(batch)

    monkeypatch.setattr(runner._context, "decode", full)


def test_a_full_cache_makes_requests_wait_and_fails_none(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [generate(engine, prompt, ignore_eos=True) for prompt in PROMPTS[:3]]
    numbers = [submit(engine, prompt, ignore_eos=True) for prompt in PROMPTS[:3]]
    answers = Answers()
    for _ in range(3):
        answers.take(engine.step(wait))
    decodes_fail_to_fit(engine, monkeypatch, while_running=2)
    answers.take(engine.step(wait))
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 2)
    while engine.has_work():
        answers.take(engine.step(wait))
    assert [answers.tokens[number] for number in numbers] == alone


def test_a_request_that_does_not_fit_alone_fails(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decodes_fail_to_fit(engine, monkeypatch, while_running=1)
    number = submit(engine, PROMPTS[0])
    answers = finish_all(engine)
    assert answers.finishes[number].reason is FinishReason.ERROR
    assert "no room" in (answers.finishes[number].error or "")


def test_logits_that_are_no_numbers_fail_their_request_alone(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = generate(engine, PROMPTS[1], max_tokens=2, ignore_eos=True)
    assert engine._runner is not None
    context = engine._runner._context
    logits = context.logits

    def poisoned(rows: int) -> Any:
        found = logits(rows).copy()
        if rows > 1:
            found[0, 77] = np.nan
        return found

    monkeypatch.setattr(context, "logits", poisoned)
    first, second = (
        submit(engine, prompt, max_tokens=2, ignore_eos=True, logprobs=0) for prompt in PROMPTS[:2]
    )
    answers = finish_all(engine)
    assert answers.finishes[first].reason is FinishReason.ERROR
    assert "nan" in (answers.finishes[first].error or "")
    assert (answers.tokens[first], answers.logprobs[first]) == ([], [])
    assert answers.tokens[second] == alone


def test_a_bug_in_one_requests_sampling_is_not_the_others_end(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        submit(engine, prompt, max_tokens=2, ignore_eos=True) for prompt in PROMPTS[:2]
    )
    assert engine._runner is not None
    sampler = engine._runner._schedule.waiting[first].sampler
    monkeypatch.setattr(type(sampler), "_record", raise_for(sampler, type(sampler)._record))
    answers = finish_all(engine)
    assert answers.finishes[first].reason is FinishReason.ERROR
    assert answers.finishes[second].reason is FinishReason.LENGTH


def raise_for(victim: object, method: Callable[..., None]) -> Callable[..., None]:
    def raising(self: object, token_id: int) -> None:
        if self is victim:
            raise ZeroDivisionError
        method(self, token_id)

    return raising


# --- what cannot be


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        pytest.param([], {}, "prompt", id="no prompt"),
        pytest.param([5, 49_152], {}, "prompt", id="a prompt id beyond the vocabulary"),
        pytest.param([5, -1], {}, "prompt", id="a negative prompt id"),
        pytest.param([5], {"max_tokens": 0}, "max_tokens", id="no tokens"),
        pytest.param([5], {"logit_bias": {49_152: 1.0}}, "logit_bias", id="a bias beyond"),
        pytest.param([5], {"stop_token_ids": (-1,)}, "stop_token_ids", id="a negative stop id"),
    ],
)
def test_what_cannot_run_is_refused(
    engine: LlamaCppEngine, prompt: list[int], params: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        submit(engine, prompt, **params)
    assert caught.value.param == param
    assert not engine.has_work()


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(engine: LlamaCppEngine) -> None:
    with pytest.raises(ContextLengthExceeded, match="512"):
        submit(engine, [5] * MAX_SEQ_LEN)


def test_a_script_for_the_simulated_engine_is_refused(engine: LlamaCppEngine) -> None:
    request = Submit(
        request_id=RequestId(1),
        prompt_token_ids=[5],
        sampling=SamplingParams(max_tokens=1),
        sim={"delay_ms": 1},
    )
    with pytest.raises(InvalidRequest, match="simulated"):
        engine.add(request)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 257}, "max_num_seqs: 257"),
        ({"max_seq_len": 1}, "max_seq_len: 1"),
        ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens: 0"),
        ({"kv_cache_tokens": -1}, "kv_cache_tokens: -1"),
        ({"prefill_target_ms": 0}, "prefill_target_ms: 0"),
        ({"prefix_cache_bytes_max": -1}, "prefix_cache_bytes_max: -1"),
        ({"threads": -1}, "threads: -1"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LlamaCppEngine(**settings)  # type: ignore[arg-type]  # the table's values are all int


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and then nothing")
    engine = LlamaCppEngine(model=str(path))
    with pytest.raises(StartError, match=r"model\.gguf"):
        engine.describe()
    engine.close()


# --- its life


def test_the_default_context_is_bounded_and_the_cache_decides_how_many_run() -> None:
    engine = LlamaCppEngine(kv_cache_tokens=4096, threads=1)
    card = engine.describe()
    assert (card.max_seq_len, card.vocab_size, EOS in card.eos_token_ids) == (2048, 49_152, True)
    shares: list[float] = []
    engine.load(shares.append)
    try:
        assert shares[-1] == 1.0
        for _ in range(3):
            submit(engine, "Hello", max_tokens=1)
        engine.step(wait)
        assert engine.stats().num_waiting == 1
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("settings", "memory_bytes", "num_seqs"),
    [
        ({}, 1 << 40, 48),
        ({}, 1 << 20, 1),
        ({}, 8 * 2048 * 23_040 * 5, 5),
        ({"max_seq_len": 512}, 8 * 2048 * 23_040 * 5, 20),
        ({"memory_shared_by": 5}, 8 * 2048 * 23_040 * 5, 1),
        ({"max_num_seqs": 4}, 1 << 40, 4),
        ({"kv_cache_tokens": 10_000}, 1 << 40, 4),
        ({"kv_cache_tokens": 10_000, "max_num_seqs": 3}, 0, 3),
    ],
)
def test_how_many_run_at_once_is_chosen_from_the_machine(
    settings: dict[str, int],
    memory_bytes: int,
    num_seqs: int,
    shared: LlamaCppEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastserve.engine.adapters.llamacpp.available_cpus", lambda: 3)
    monkeypatch.setattr(
        "fastserve.engine.adapters.llamacpp.available_memory_bytes", lambda: memory_bytes
    )
    engine = LlamaCppEngine(**settings)  # type: ignore[arg-type]  # the table's values are all int
    engine.describe()
    assert shared._model is not None
    assert shared._model.kv_bytes_per_token == 23_040
    assert engine._parallel_sequences(shared._model) == num_seqs


def test_a_pump_that_gives_up_ends_the_step_and_the_engine_closes() -> None:
    engine = started()
    submit(engine, [5] * 500)
    outputs = engine.step(lambda *, fd=None, timeout_s=0.0: False)
    assert outputs.request_ids == []
    closing_s = time.monotonic()
    engine.close()
    assert time.monotonic() - closing_s < 2.0


def test_a_library_that_breaks_is_the_engines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(max_num_seqs=1)
    assert engine._runner is not None
    monkeypatch.setattr(engine._runner._context._llama, "llama_decode", lambda *_: -3)
    submit(engine, "Hello")
    with pytest.raises(EngineDead, match="llama_decode failed with -3"):
        engine.step(wait)
    engine.close()


def test_closing_without_a_model_does_no_harm() -> None:
    engine = LlamaCppEngine()
    assert not engine.has_work()
    assert engine.stats().num_running == 0
    engine.close()
