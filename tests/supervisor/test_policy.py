"""What an exit means, as a table."""

from __future__ import annotations

import pytest

from fastserve.supervisor.policy import RespawnPolicy, Verdict, describe_exit, on_exit

POLICY = RespawnPolicy(restarts_max=2, window_s=10.0)


@pytest.mark.parametrize(
    ("essential", "exits_s", "verdict"),
    [
        pytest.param(True, [98.0, 99.0, 100.0], Verdict.STOP_ENGINE_DEAD, id="no more engines"),
        pytest.param(True, [100.0], Verdict.RESPAWN, id="an engine that may be respawned"),
        pytest.param(False, [100.0], Verdict.RESPAWN, id="one acceptor crash"),
        pytest.param(False, [99.0, 100.0], Verdict.RESPAWN, id="two, still within the limit"),
        pytest.param(False, [98.0, 99.0, 100.0], Verdict.STOP_CRASH_LOOP, id="a crash loop"),
        pytest.param(False, [1.0, 2.0, 100.0], Verdict.RESPAWN, id="old crashes are forgiven"),
    ],
)
def test_the_verdict(*, essential: bool, exits_s: list[float], verdict: Verdict) -> None:
    assert on_exit(essential=essential, exits_s=exits_s, now_s=100.0, policy=POLICY) is verdict


def test_an_engine_is_not_respawned_by_default() -> None:
    never = RespawnPolicy(restarts_max=0, window_s=10.0)
    verdict = on_exit(essential=True, exits_s=[100.0], now_s=100.0, policy=never)
    assert verdict is Verdict.STOP_ENGINE_DEAD


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (7, "exit code 7"),
        (-9, "killed by SIGKILL"),
        (-64, "killed by SIGRTMAX"),
    ],
)
def test_an_exit_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_an_exception_says_more_than_an_exit_code_and_less_than_a_signal() -> None:
    assert describe_exit(1, error="ValueError: no") == "ValueError: no"
    assert describe_exit(-9, error="ValueError: no") == "killed by SIGKILL"
