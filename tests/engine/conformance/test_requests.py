"""What an adapter promises of requests: who is taken, when one ends, and what it is told."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import pytest

from fastserve.errors import ContextLengthExceeded, InvalidRequest
from fastserve.generation import Finish, FinishReason, Grammar, GrammarKind, RequestId
from fastserve.text.tokenizer import Tokenizer
from tests.engine.conformance.driving import PROMPT, Answer, Driver
from tests.engine.conformance.subjects import BATCH, MAX_SEQ_LEN, Subject

STOP, LENGTH = Finish(reason=FinishReason.STOP), Finish(reason=FinishReason.LENGTH)
BEYOND = 10**6


def end_of(answer: Answer) -> tuple[FinishReason, int | None]:
    assert answer.finish is not None
    return answer.finish.reason, answer.finish.stop_token_id


# --- who is taken ---


def test_a_request_counts_from_the_moment_it_is_added(driver: Driver) -> None:
    assert not driver.engine.has_work()
    driver.add()
    driver.check_stats()
    assert driver.engine.has_work()


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        pytest.param((), {}, "prompt", id="no prompt"),
        pytest.param((5, BEYOND), {}, "prompt", id="a prompt of no token"),
        pytest.param((5, -1), {}, "prompt", id="a prompt of less than no token"),
        pytest.param(PROMPT, {"max_tokens": 0}, "max_tokens", id="no answer"),
        pytest.param(PROMPT, {"logit_bias": {BEYOND: 1.0}}, "logit_bias", id="bias on no token"),
        pytest.param(PROMPT, {"stop_token_ids": (BEYOND,)}, "stop_token_ids", id="no stop"),
        pytest.param(PROMPT, {"stop_token_ids": (-1,)}, "stop_token_ids", id="less than a stop"),
        pytest.param(PROMPT, {"sim": {"no_such_field": 1}}, "sim", id="a script"),
    ],
)
def test_what_cannot_run_is_refused_by_name_and_leaves_nothing(
    driver: Driver, prompt: tuple[int, ...], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        driver.add(prompt, **fields)
    assert refused.value.param == param
    assert refused.value.message
    driver.check_stats()


def test_a_prompt_must_leave_room_for_one_token_of_answer(driver: Driver) -> None:
    with pytest.raises(ContextLengthExceeded):
        driver.add([5] * MAX_SEQ_LEN)
    driver.check_stats()
    answer = driver.one([5] * (MAX_SEQ_LEN - 1))
    assert (len(answer.tokens), answer.finish) == (1, LENGTH)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "boolean"}'),
        (GrammarKind.REGEX, "(true|false)"),
        (GrammarKind.EBNF, 'root ::= "true" | "false"'),
    ],
)
def test_a_grammar_is_followed_or_refused(driver: Driver, kind: GrammarKind, source: str) -> None:
    asked: dict[str, Any] = {
        "grammar": Grammar(kind=kind, source=source), "ignore_eos": False, "max_tokens": 16,
    }  # fmt: skip
    if kind not in driver.card.grammar_kinds:
        with pytest.raises(InvalidRequest):
            driver.add(**asked)
        driver.check_stats()
        return
    answer = driver.one(**asked)
    assert end_of(answer) == (FinishReason.STOP, None)
    text = text_of(driver, answer.tokens)
    assert re.fullmatch("true|false", text.strip()), text
    assert isinstance(json.loads(text), bool)


def text_of(driver: Driver, tokens: list[int]) -> str:
    pieces = Tokenizer.from_file(driver.card.tokenizer_path).token_bytes
    ends = driver.card.eos_token_ids
    return b"".join(pieces[one] for one in tokens if one not in ends).decode()


# --- waiting ---


def test_who_finds_no_room_waits_and_is_served_in_the_end(driver: Driver) -> None:
    requests = [driver.add([50 + number, 51], max_tokens=12) for number in range(BATCH + 3)]
    driver.until(lambda: driver.engine.stats().num_running == BATCH)
    assert driver.engine.stats().num_waiting == 3
    answers = driver.run(*requests)
    assert [(len(one.tokens), one.finish) for one in answers] == [(12, LENGTH)] * len(requests)


def test_a_request_that_comes_in_the_middle_of_a_step_is_one_like_any_other(
    driver: Driver,
) -> None:
    first = driver.add(max_tokens=20)
    late: list[RequestId] = []
    driver.in_a_step(lambda: late.append(driver.add([60, 61], max_tokens=5)))
    one, other = driver.run(first, *late)
    assert (len(one.tokens), len(other.tokens)) == (20, 5)
    assert (one.finish, other.finish) == (LENGTH, LENGTH)


# --- ends ---


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_an_answer_has_as_many_tokens_as_it_may(driver: Driver, max_tokens: int) -> None:
    answer = driver.one(max_tokens=max_tokens)
    assert (len(answer.tokens), answer.finish) == (max_tokens, LENGTH)


def test_the_context_ends_an_answer_too(driver: Driver) -> None:
    answer = driver.one([5] * (MAX_SEQ_LEN - 6), max_tokens=MAX_SEQ_LEN)
    assert (len(answer.tokens), answer.finish) == (6, LENGTH)


@pytest.mark.parametrize("number", [1, 4])
def test_the_end_of_a_text_is_its_last_token(driver: Driver, subject: Subject, number: int) -> None:
    answer = driver.one(ignore_eos=False, **subject.ending(driver.card, number))
    assert end_of(answer) == (FinishReason.STOP, None)
    assert len(answer.tokens) == number
    assert [one in driver.card.eos_token_ids for one in answer.tokens].index(True) == number - 1


def test_an_end_that_is_ignored_ends_nothing(driver: Driver, subject: Subject) -> None:
    answer = driver.one(max_tokens=5, **subject.ending(driver.card, 2))
    assert (len(answer.tokens), answer.finish) == (5, LENGTH)
    assert driver.card.eos_token_ids[0] in answer.tokens


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_what_ends_any_text_is_a_stop_id_only_where_texts_do_not_end(
    driver: Driver, subject: Subject, *, ignore_eos: bool
) -> None:
    end = driver.card.eos_token_ids[0]
    answer = driver.one(
        ignore_eos=ignore_eos, stop_token_ids=(end,), **subject.ending(driver.card, 2)
    )
    assert end_of(answer) == (FinishReason.STOP, end if ignore_eos else None)
    assert (len(answer.tokens), answer.tokens[-1]) == (2, end)


def test_a_stop_id_is_the_last_token_and_is_named(driver: Driver) -> None:
    spoken = driver.one(max_tokens=10).tokens
    stop = next(token_id for token_id in spoken[1:] if token_id != spoken[0])
    answer = driver.one(max_tokens=10, stop_token_ids=(stop, driver.card.eos_token_ids[0]))
    assert answer.tokens == spoken[: spoken.index(stop) + 1]
    assert end_of(answer) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("min_tokens", [1, 3, 10])
def test_before_its_least_length_an_answer_has_no_stop_id(driver: Driver, min_tokens: int) -> None:
    stop = driver.one(max_tokens=1).tokens[0]
    answer = driver.one(max_tokens=10, stop_token_ids=(stop,), min_tokens=min_tokens)
    assert stop not in answer.tokens[:min_tokens]
    assert len(answer.tokens) >= min_tokens
    stopped = stop in answer.tokens
    assert end_of(answer) == ((FinishReason.STOP, stop) if stopped else (FinishReason.LENGTH, None))


# --- chance ---


def test_what_is_left_to_chance_by_nothing_is_the_same_in_any_company(driver: Driver) -> None:
    alone = driver.one(max_tokens=12).tokens
    others = [driver.add([70 + number, 71], max_tokens=15) for number in range(BATCH - 1)]
    driver.step()
    again = driver.one(max_tokens=12).tokens
    assert again == alone
    driver.abort(*others)


def test_a_seed_gives_the_same_in_any_company_or_is_refused(
    driver: Driver, subject: Subject
) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8}
    if not subject.seeds:
        with pytest.raises(InvalidRequest) as refused:
            driver.add(seed=7, **asked)
        assert refused.value.param == "seed"
        driver.check_stats()
        return
    alone = driver.one(seed=7, **asked).tokens
    others = [driver.add([70 + number, 71], seed=number, **asked) for number in range(BATCH - 1)]
    driver.step()
    assert driver.one(seed=7, **asked).tokens == alone
    driver.abort(*others)
    # The choices of one request: seeds in a row, extreme ones too.
    first, second = (
        [one.tokens for one in driver.run(*(driver.add(seed=seed, **asked) for seed in seeds))]
        for seeds in (range(7, 7 + BATCH), range(7, 7 + BATCH))
    )
    assert first == second
    assert first[0] == alone
    assert len({tuple(tokens) for tokens in first}) > 1
    for extreme in (-(2**63), 2**63 - 1, 0):
        assert driver.one(seed=extreme, **asked).finish == LENGTH


def test_a_bias_keeps_a_token_away(driver: Driver, subject: Subject) -> None:
    if not subject.random:
        pytest.skip("its words are not chosen by their probability")
    likeliest = driver.one(max_tokens=1).tokens[0]
    answer = driver.one(max_tokens=10, logit_bias={likeliest: -100.0})
    assert likeliest not in answer.tokens


# --- log probabilities ---


@pytest.mark.parametrize("asked", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_likeliest_come_in_order_and_the_chosen_one_in_any_case(
    driver: Driver, asked: int, temperature: float
) -> None:
    answer = driver.one(logprobs=asked, temperature=temperature)
    assert len(answer.logprobs) == len(answer.tokens) == 8
    for token_id, entry in zip(answer.tokens, answer.logprobs, strict=True):
        assert len(entry.top) == asked
        assert len({other for other, _ in entry.top}) == asked
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) < 1.001
        assert entry.logprob <= 0.0
        told = dict(entry.top)
        if token_id in told:
            assert told[token_id] == entry.logprob
        elif values:
            assert entry.logprob <= values[-1]
        if asked and not temperature:
            assert entry.top[0][1] == entry.logprob


def test_they_come_to_those_who_asked(driver: Driver) -> None:
    """The driver holds every step to it, for the asked and the others."""
    requests = [driver.add(logprobs=asked) for asked in (None, 2, None, 0)]
    answers = driver.run(*requests)
    assert [len(one.logprobs) for one in answers] == [0, 8, 0, 8]


# --- aborts ---


def test_an_abort_before_the_first_step(driver: Driver) -> None:
    gone = driver.add()
    driver.abort(gone)
    assert not driver.engine.has_work()
    driver.check_stats()


def test_an_abort_between_two_steps(driver: Driver) -> None:
    gone, other = driver.add(max_tokens=100), driver.add([60, 61], max_tokens=10)
    driver.until(lambda: driver.live[gone].tokens != [])
    driver.abort(gone)
    assert len(driver.run(other)[0].tokens) == 10


def test_an_abort_in_the_middle_of_a_step(driver: Driver) -> None:
    gone, other = driver.add(max_tokens=100), driver.add([60, 61], max_tokens=10)
    driver.step()
    driver.in_a_step(lambda: driver.abort(gone))
    assert len(driver.run(other)[0].tokens) == 10


def test_the_last_ones_abort_in_the_middle_of_a_step_leaves_nothing_to_do(driver: Driver) -> None:
    gone = driver.add(max_tokens=100)
    driver.in_a_step(lambda: driver.abort(gone))
    assert not driver.engine.has_work()


def test_an_abort_of_who_waits(driver: Driver) -> None:
    running = [driver.add([50 + number, 51], max_tokens=20) for number in range(BATCH)]
    waiting = [driver.add([80 + number, 51], max_tokens=20) for number in range(3)]
    driver.until(lambda: driver.engine.stats().num_running == BATCH)
    driver.abort(waiting[0], waiting[2])
    driver.check_stats()
    answers = driver.run(*running, waiting[1])
    assert [len(one.tokens) for one in answers] == [20] * (BATCH + 1)


def test_an_abort_of_who_has_ended_or_was_never_there(driver: Driver) -> None:
    ended = driver.add(max_tokens=1)
    other = driver.add([60, 61], max_tokens=10)
    driver.run(ended)
    driver.engine.abort([ended, RequestId(2**62)])
    driver.engine.abort([])
    driver.check_stats()
    assert len(driver.run(other)[0].tokens) == 10


def test_who_comes_after_an_abort_answers_as_if_nothing_had_been(driver: Driver) -> None:
    """What an aborted request has left, in a cache or in a batch, is nobody's context."""
    alone = driver.one(max_tokens=8).tokens
    for number in range(BATCH + 1):
        gone = driver.add([90 + number] * 30, max_tokens=50)
        driver.step()
        driver.abort(gone)
    assert driver.one(max_tokens=8).tokens == alone


def test_whoever_comes_and_goes_every_end_is_exact(driver: Driver) -> None:
    """Steps of chance, from one seed: adds and aborts between steps and in them."""
    chance = random.Random(1)
    lengths: dict[RequestId, int] = {}
    aborted: set[int] = set()
    ended: dict[int, Answer] = {}

    def come_and_go() -> None:
        for _ in range(chance.randrange(3)):
            length = chance.randrange(1, 7)
            prompt = [chance.randrange(40, 90) for _ in range(chance.randrange(1, 20))]
            lengths[driver.add(prompt, max_tokens=length)] = length
        for request_id in chance.sample(sorted(driver.live), min(len(driver.live), 1)):
            if chance.random() < 0.4:
                driver.abort(RequestId(request_id))
                aborted.add(request_id)

    for _ in range(25):
        come_and_go()
        if driver.engine.has_work():
            ended |= driver.step(come_and_go)
        driver.check_stats()
    driver.until(lambda: not driver.live, ended)
    assert len(aborted) > 3
    assert ended.keys() == lengths.keys() - aborted
    for request_id, answer in ended.items():
        assert (len(answer.tokens), answer.finish) == (lengths[RequestId(request_id)], LENGTH)


# --- failures of one ---


def test_the_failure_of_one_is_told_and_the_others_go_on(driver: Driver, subject: Subject) -> None:
    if subject.fail is None and not subject.failing:
        pytest.skip("it cannot be made to fail")
    other = driver.add([60, 61], max_tokens=20)
    failing = driver.add(max_tokens=100, **subject.failing)
    driver.until(lambda: len(driver.live[failing].tokens) >= 1)
    if subject.fail is not None:
        subject.fail(driver.engine, failing)
    failed, whole = driver.run(failing, other)
    assert failed.finish is not None
    assert failed.finish.reason is FinishReason.ERROR
    assert failed.finish.error
    assert not failed.finish.invalid
    assert 1 <= len(failed.tokens) < 100
    assert (len(whole.tokens), whole.finish) == (20, LENGTH)
