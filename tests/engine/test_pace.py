"""How much of a prompt a step takes while others decode."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from fastserve.engine import llama_runner
from fastserve.engine.pace import TOKENS_MIN, PrefillPace
from tests.engine.driving import Driver, wait

if TYPE_CHECKING:
    from pathlib import Path

    from fastserve.engine import llama

TARGET_S = 0.1


def simulated(*, token_s: list[float], decoding: int, tokens_max: int = 256) -> list[float]:
    """What the prompts add to each step of a processor on which a row costs so much by turns."""
    pace = PrefillPace(tokens_max=tokens_max, target_s=TARGET_S)
    added_s = []
    for cost_s in token_s:
        tokens = pace.budget(decoding=True)
        pace.took((tokens + decoding) * cost_s, rows=tokens + decoding)
        added_s.append(tokens * cost_s)
    return added_s


@pytest.mark.parametrize("decoding", [1, 31])
@pytest.mark.parametrize("cost_s", [0.0005, 0.002, 0.01])
def test_a_steady_processor_is_held_up_for_the_target_and_no_longer(
    cost_s: float, decoding: int
) -> None:
    after_the_first = simulated(token_s=[cost_s] * 20, decoding=decoding)[1:]
    assert max(after_the_first) <= TARGET_S + 1e-9
    assert min(after_the_first) > TARGET_S - cost_s


def test_one_that_slows_down_is_believed_at_once() -> None:
    added_s = simulated(token_s=[0.001] * 5 + [0.004] * 5, decoding=4)
    assert added_s[5] == pytest.approx(4 * TARGET_S)
    assert max(added_s[6:]) <= TARGET_S + 1e-9


def test_one_fast_step_among_slow_ones_changes_little() -> None:
    costs = itertools.islice(itertools.cycle([0.001, 0.002, 0.002]), 60)
    assert max(simulated(token_s=list(costs), decoding=4)[10:]) <= 1.5 * TARGET_S


def test_a_prompt_gets_on_however_slow_the_processor() -> None:
    assert simulated(token_s=[1.0] * 3, decoding=4)[-1] == TOKENS_MIN


def test_where_nobody_decodes_a_step_takes_all_it_may() -> None:
    pace = PrefillPace(tokens_max=256, target_s=TARGET_S)
    assert pace.budget(decoding=False) == 256
    pace.took(10.0, rows=256)
    assert pace.budget(decoding=False) == 256
    assert pace.budget(decoding=True) == TOKENS_MIN


def test_the_longest_piece_is_a_bound_too() -> None:
    assert PrefillPace(tokens_max=5, target_s=TARGET_S).budget(decoding=True) == 5
    pace = PrefillPace(tokens_max=64, target_s=TARGET_S)
    pace.took(0.0001, rows=100)
    assert pace.budget(decoding=True) == 64


def test_the_engine_holds_no_stream_up_for_longer_than_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock on which every row of a decode takes 4.9 ms: 40 of them make almost 200 ms."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    driver = Driver(prefill_target_ms=200.0)
    decode, clock = driver.context.decode, SimpleNamespace(now_s=0.0)
    rows: list[int] = []

    def timed(batch: llama.Batch) -> llama.Decoded:
        rows.append(len(batch))
        clock.now_s += 0.0049 * len(batch)
        return decode(batch)

    def patient(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
        return wait(fd=fd, timeout_s=60.0 * timeout_s)

    monkeypatch.setattr(driver.context, "decode", timed)
    monkeypatch.setattr(llama_runner, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    stream = driver.submit("Water boils at", max_tokens=30)
    driver.step(patient)
    long = driver.submit([5] * 200, max_tokens=1)
    rows.clear()
    while long not in driver.finishes:
        told = len(driver.tokens[stream])
        driver.step(patient)
        assert len(driver.tokens[stream]) == told + 1, "a token in every step"
    assert rows == [41] * 5, "a row of the stream's, and 40 of the prompt's"
    driver.engine.close()
