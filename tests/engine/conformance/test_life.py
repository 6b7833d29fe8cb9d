"""What an adapter promises of itself: to describe, load, step in time, die aloud, and close."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fastserve.errors import StartError
from tests.engine.conformance.driving import Driver, pump
from tests.engine.conformance.subjects import MAX_SEQ_LEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.engine.interface import Engine
    from tests.engine.conformance.subjects import Subject

    Make = Callable[[], Engine]

# "Seconds at most".
CLOSE_S = 10.0


def started(make: Make) -> Driver:
    engine = make()
    card = engine.describe()
    engine.load(lambda _: None)
    return Driver(engine, card)


def close_in_time(engine: Engine) -> None:
    closing_s = time.monotonic()
    engine.close()
    assert time.monotonic() - closing_s < CLOSE_S


# --- before it runs ---


def test_the_card_is_there_before_the_weights_and_true(make: Make) -> None:
    engine = make()
    card = engine.describe()
    assert card.name
    assert Path(card.tokenizer_path).is_file()
    assert 0 < card.max_seq_len <= MAX_SEQ_LEN
    assert card.eos_token_ids
    assert all(0 <= one < card.vocab_size for one in card.eos_token_ids)


def test_before_it_is_loaded_it_is_idle(make: Make) -> None:
    engine = make()
    engine.describe()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert not engine.has_work()


def test_progress_only_grows_and_ends_at_one(make: Make) -> None:
    engine = make()
    engine.describe()
    told: list[float] = []
    idle: list[bool] = []

    def progress(share: float) -> None:
        told.append(share)
        idle.append(engine.stats().num_running + engine.stats().num_waiting == 0)

    engine.load(progress)
    assert told[-1] == 1.0
    assert all(0.0 <= before <= after <= 1.0 for before, after in pairwise([0.0, *told]))
    assert all(idle)


def test_what_the_progress_raises_ends_the_loading(make: Make) -> None:
    class Stopped(Exception):
        pass

    def progress(_share: float) -> None:
        raise Stopped

    engine = make()
    engine.describe()
    with pytest.raises(Stopped):
        engine.load(progress)
    close_in_time(engine)


def test_what_cannot_be_loaded_says_why_and_closes(subject: Subject, tmp_path: Path) -> None:
    engine = subject.make_broken(tmp_path)
    with pytest.raises(StartError) as refused:
        started(lambda: engine)
    assert refused.value.message
    assert not engine.has_work()
    assert engine.stats().num_running == 0
    close_in_time(engine)


@pytest.mark.parametrize("described", [False, True])
def test_it_can_be_closed_before_anything(make: Make, *, described: bool) -> None:
    engine = make()
    if described:
        engine.describe()
    close_in_time(engine)


# --- while it runs ---


def test_a_pump_that_gives_up_ends_the_step(make: Make) -> None:
    driver = started(make)
    waited: list[float] = []

    def give_up(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
        waited.append(time.monotonic())
        return False

    while not waited:  # a step that need not wait does without
        if not driver.engine.has_work():
            driver.add([5] * (MAX_SEQ_LEN - 20), max_tokens=20)
        driver.engine.step(give_up)
    assert time.monotonic() - waited[-1] < 1.0
    close_in_time(driver.engine)


# --- death ---


def test_death_is_told_of_in_a_step(make: Make, subject: Subject) -> None:
    if subject.kill is None and not subject.killing:
        pytest.skip("it cannot be killed")
    driver = started(make)
    driver.add(max_tokens=100, **subject.killing)
    driver.add([60, 61], max_tokens=100)
    driver.until(lambda: any(one.tokens for one in driver.live.values()))
    if subject.kill is not None:
        subject.kill(driver.engine)
    with pytest.raises(subject.death):
        step_for_ever(driver)
    stats = driver.engine.stats()
    assert stats.num_running + stats.num_waiting <= 2
    close_in_time(driver.engine)


def test_death_is_something_to_do(make: Make, subject: Subject) -> None:
    if not subject.dies_idle or subject.kill is None:
        pytest.skip("without a request it is not there to die")
    driver = started(make)
    assert not driver.engine.has_work()
    subject.kill(driver.engine)
    give_up_s = time.monotonic() + CLOSE_S
    while not driver.engine.has_work():
        assert time.monotonic() < give_up_s, "nobody is told"
    with pytest.raises(subject.death):
        driver.engine.step(pump)
    close_in_time(driver.engine)


def step_for_ever(driver: Driver) -> None:
    give_up_s = time.monotonic() + CLOSE_S
    while time.monotonic() < give_up_s:
        assert driver.engine.has_work(), "there is its death to tell of"
        driver.take(driver.engine.step(pump))


# --- closing ---


@pytest.mark.parametrize("num_requests", [0, 1, 9])
def test_closing_leaves_no_thread_no_descriptor_and_no_model(make: Make, num_requests: int) -> None:
    threads, descriptors, mapped = set(threading.enumerate()), open_files(), model_files()
    driver = started(make)
    for number in range(num_requests):
        driver.add([50 + number, 51], max_tokens=100)
    if num_requests:
        driver.step()
    close_in_time(driver.engine)
    assert not {one.name for one in set(threading.enumerate()) - threads}
    assert open_files() == descriptors
    assert model_files() == mapped
    assert not driver.engine.has_work()


def test_closing_twice_is_no_harm(make: Make) -> None:
    driver = started(make)
    driver.add(max_tokens=3)
    driver.step()
    close_in_time(driver.engine)
    close_in_time(driver.engine)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def model_files() -> set[str]:
    """Models that are mapped into memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if line.endswith((".gguf", ".safetensors"))}
