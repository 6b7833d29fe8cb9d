"""What requests with a common beginning save each other, and that no answer changes by it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from fastserve.engine.llama import Model
from fastserve.generation import RequestId
from tests.engine.driving import Driver, wait

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSTEM = (
    "<|im_start|>system\nYou are a patient teacher of geography who answers in short and simple "
    "sentences, names the continent first, and never speaks of the weather.<|im_end|>\n"
)
QUESTIONS = (
    "Where is Paris?",
    "Which river is the longest?",
    "Name three islands.",
    "How high is Mont Blanc?",
    "What is a fjord?",
    "Where do penguins live?",
)


def chat(question: str) -> str:
    return f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tokenizer, which describing a model makes, out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def plain() -> Iterator[Driver]:
    """An engine that reuses nothing: whose answers are the right ones."""
    driver = Driver(prefix_cache_bytes_max=0)
    yield driver
    driver.engine.close()


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.engine.close()


def test_a_common_system_prompt_is_computed_once(driver: Driver, plain: Driver) -> None:
    common = len(driver.ids(SYSTEM + "<|im_start|>user\n"))
    numbers = []
    for question in QUESTIONS[:3]:
        numbers.append(driver.submit(chat(question)))
        driver.finish_all()
        assert driver.tokens[numbers[-1]] == plain.answer(chat(question))
    assert driver.cached(numbers[0]) == 0
    assert all(driver.cached(number) >= common for number in numbers[1:])
    stats = driver.engine.stats()
    assert stats.prefix_cache_queries == sum(len(driver.ids(chat(q))) for q in QUESTIONS[:3])
    assert stats.prefix_cache_hits == sum(map(driver.cached, numbers))
    assert stats.prefix_cache_hits / stats.prefix_cache_queries > 0.4


def test_a_conversation_computes_only_what_is_new_in_each_turn(
    driver: Driver, plain: Driver
) -> None:
    talk = driver.ids(chat(QUESTIONS[0]))
    for question in QUESTIONS[1:3]:
        number = driver.submit(talk, max_tokens=12)
        driver.finish_all()
        assert driver.tokens[number] == plain.answer(talk, max_tokens=12)
        before = len(talk) + 12 - 1  # the last token of an answer is computed by nobody
        turn = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        talk += driver.tokens[number] + driver.ids(turn)
        # Another conversation between the turns takes the slot, and gives it back.
        driver.answer(f"A story of number {question}", max_tokens=2)
        assert driver.cached(driver_again(driver, talk)) == before


def driver_again(driver: Driver, talk: list[int]) -> RequestId:
    number = driver.submit(talk, max_tokens=1)
    driver.finish_all()
    return number


def test_the_same_prompt_again_computes_one_token(driver: Driver, plain: Driver) -> None:
    prompt = driver.ids(chat(QUESTIONS[1]))
    first, again = driver.answer(prompt), driver.answer(prompt)
    assert first == again == plain.answer(prompt)
    assert driver.cached(RequestId(2)) == len(prompt) - 1


def test_a_burst_with_one_beginning_computes_it_once(driver: Driver, plain: Driver) -> None:
    # More than there are slots: the last ones find it where the first ones were.
    numbers = [driver.submit(chat(question), max_tokens=4) for question in QUESTIONS]
    driver.finish_all()
    common = len(driver.ids(SYSTEM + "<|im_start|>user\n"))
    assert [driver.cached(number) >= common for number in numbers] == [False] + [True] * 5
    for number, question in list(zip(numbers, QUESTIONS, strict=True))[1::2]:
        assert driver.tokens[number] == plain.answer(chat(question), max_tokens=4)


def test_who_is_waited_for_may_go(driver: Driver, plain: Driver) -> None:
    first = driver.submit(chat(QUESTIONS[0]))
    waits = driver.submit(chat(QUESTIONS[1]))

    def abort(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
        if fd is not None:
            driver.engine.abort([first])
        return wait(fd=fd, timeout_s=timeout_s)

    driver.step(abort)
    driver.finish_all()
    assert driver.tokens[first] == []
    assert driver.tokens[waits] == plain.answer(chat(QUESTIONS[1]))


def test_nothing_is_reused_where_it_is_switched_off(plain: Driver) -> None:
    numbers = [plain.submit(chat(QUESTIONS[0])) for _ in range(3)]
    plain.finish_all()
    assert [plain.cached(number) for number in numbers] == [0, 0, 0]
    assert plain.engine.stats().prefix_cache_hits == 0


def test_who_needs_all_of_a_prompt_computed_waits_for_nobody(driver: Driver) -> None:
    assert driver.engine._runner is not None
    numbers = [driver.submit(chat(QUESTIONS[0]), max_tokens=1) for _ in range(3)]
    driver.engine._runner._schedule.waiting[numbers[1]].reuses = False
    driver.finish_all()
    common = len(driver.ids(chat(QUESTIONS[0]))) - 1
    assert [driver.cached(number) for number in numbers] == [0, 0, common]


def test_what_has_no_room_is_computed_anew() -> None:
    driver = Driver(max_num_seqs=1, prefix_cache_bytes_max=1)
    try:
        first, other = chat(QUESTIONS[0]), "Something else, of at least sixteen tokens. " * 3
        expected = driver.answer(first)
        driver.answer(other)
        assert driver.answer(first) == expected
        assert driver.cached(RequestId(3)) == 0
    finally:
        driver.engine.close()


def test_a_queue_time_is_told(driver: Driver) -> None:
    numbers = [driver.submit([n] * 40, max_tokens=4) for n in range(5, 10)]
    driver.finish_all()
    waited_s = [driver.finishes[number].queue_time_s for number in numbers]
    assert max(waited_s[:4]) < waited_s[4], "the fifth has four before it in four slots"


def test_no_answer_depends_on_what_came_and_went_before(plain: Driver) -> None:
    """Requests of few beginnings come and go at random, some in the middle of a decode: in three
    slots, with room for a few copies, so that everything is overwritten again and again."""
    chance = random.Random(1)
    driver = Driver(max_num_seqs=3, prefix_cache_bytes_max=6 << 20, prefill_chunk_tokens=48)
    beginnings = [SYSTEM, SYSTEM + "<|im_start|>user\n" + QUESTIONS[0], "Once upon a time " * 8]
    prompts: dict[RequestId, list[int]] = {}
    gone: set[RequestId] = set()

    def go(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
        if fd is not None and prompts and chance.random() < 0.2:
            number = chance.choice(list(prompts))
            driver.engine.abort([number])
            gone.add(number)
        return wait(fd=fd, timeout_s=timeout_s)

    try:
        for _ in range(12):
            text = chance.choice(beginnings) + " " + chance.choice(QUESTIONS)
            ids = driver.ids(text)[: chance.randrange(20, 120)]
            if prompts and chance.random() < 0.3:
                earlier = chance.choice(list(prompts))
                ids = prompts[earlier] + driver.tokens[earlier]
            prompts[driver.submit(ids, max_tokens=chance.randrange(1, 6))] = ids
            for _ in range(chance.randrange(4)):
                driver.step(go)
        driver.finish_all()
        for number, prompt in prompts.items():
            told = driver.tokens[number]
            expected = plain.answer(prompt, max_tokens=5)
            assert told == expected[: len(told)], number
            assert number in driver.finishes or number in gone
        assert driver.engine.stats().prefix_cache_hits > 0
    finally:
        driver.engine.close()


def test_a_model_that_forgets_positions_reuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "keeps_all_positions", property(lambda model: False))
    driver = Driver(max_num_seqs=1)
    try:
        assert driver.answer(chat(QUESTIONS[0])) == driver.answer(chat(QUESTIONS[0]))
        assert driver.cached(RequestId(2)) == 0
    finally:
        driver.engine.close()
