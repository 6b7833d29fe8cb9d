"""A full KV cache makes requests wait, and never fail; so does one with less room than promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fastserve.engine import llama
from fastserve.errors import ContextLengthExceeded
from fastserve.generation import FinishReason
from tests.engine.driving import Driver

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_SEQ_LEN = 32
PROMPTS = [f"{number} little ducks went out to play" for number in range(2, 6)]


@pytest.fixture
def driver(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Driver]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    driver = Driver(max_seq_len=MAX_SEQ_LEN, max_num_seqs=8, kv_cache_tokens=2 * MAX_SEQ_LEN + 5)
    yield driver
    driver.engine.close()


def test_requests_that_all_grow_until_the_cache_is_full_end_as_alone(driver: Driver) -> None:
    alone = [driver.answer(prompt, max_tokens=1000) for prompt in PROMPTS]
    numbers = [driver.submit(prompt, max_tokens=1000) for prompt in PROMPTS]
    running = []
    while driver.engine.has_work():
        driver.step()
        running.append(driver.engine.stats().num_running)
    assert max(running) == 2, "as many as have room at their longest"
    assert [driver.tokens[number] for number in numbers] == alone
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        assert driver.finishes[number].reason is FinishReason.LENGTH
        assert len(driver.ids(prompt)) + len(driver.tokens[number]) == MAX_SEQ_LEN
    assert driver.finishes[numbers[-1]].queue_time_s > driver.finishes[numbers[0]].queue_time_s


def test_the_longest_prompt_that_fits_runs_and_one_token_more_is_refused(driver: Driver) -> None:
    # Whoever holds the rest of the cache makes it wait at most.
    for prompt in PROMPTS:
        driver.submit(prompt)
    assert len(driver.answer([5] * (MAX_SEQ_LEN - 1))) == 1
    with pytest.raises(ContextLengthExceeded):
        driver.submit([5] * MAX_SEQ_LEN)


def test_the_youngest_is_put_off_when_there_is_less_room_than_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(max_seq_len=MAX_SEQ_LEN, max_num_seqs=4)
    alone = [driver.answer(prompt, max_tokens=1000) for prompt in PROMPTS]
    decode = driver.context.decode
    refusals = []

    def cramped(batch: llama.Batch) -> llama.Decoded:
        """Has room for sequences of as many tokens as one and a half, all together."""
        assert driver.engine._runner is not None
        running = driver.engine._runner._schedule.running.values()
        if sum(request.num_computed for request in running) + len(batch) > 1.5 * MAX_SEQ_LEN:
            refusals.append(len(running))
            return llama.Decoded.FULL
        return decode(batch)

    monkeypatch.setattr(driver.context, "decode", cramped)
    numbers = [driver.submit(prompt, max_tokens=1000) for prompt in PROMPTS]
    driver.finish_all()
    assert refusals
    assert max(refusals) > 1
    assert [driver.tokens[number] for number in numbers] == alone
    assert {driver.finishes[number].reason for number in numbers} == {FinishReason.LENGTH}
    driver.engine.close()
