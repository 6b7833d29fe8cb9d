"""No input, and no order of events, raises, leaks or leaves a connection half open."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.http1.fuzz import HAPPENS, Play, check_slicing, play
from tests.http1.test_connection import VALID
from tests.http1.test_corpus import CORPUS, load

ROOT = Path(__file__).parents[2]
MESSAGES = [load(path)[0] for path in CORPUS]
FUZZ_S = 10

pieces = st.one_of(
    st.sampled_from(MESSAGES),
    st.sampled_from(VALID),
    st.binary(max_size=40),
    st.sampled_from(
        [b"\r\n", b"\n", b"\r", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b": ", b"HTTP/"]
    ),
)


@pytest.mark.parametrize("message", MESSAGES, ids=[path.stem for path in CORPUS])
def test_each_message_of_the_corpus_with_everything_that_may_happen(message: bytes) -> None:
    for action in range(14):
        happening = HAPPENS + bytes([action])
        middle = len(message) // 2
        for tls in (False, True):
            play(message + happening + message, tls=tls)
            play(message[:middle] + happening + message[middle:], tls=tls)


@settings(max_examples=300)
@given(script=st.lists(st.one_of(pieces, st.integers(0, 13)), max_size=12), tls=st.booleans())
def test_mixtures_of_messages_and_events(script: list[bytes | int], tls: bool) -> None:
    data = b"".join(HAPPENS + bytes([one]) if isinstance(one, int) else one for one in script)
    play(data, tls=tls)


@settings(max_examples=200)
@given(st.lists(pieces, max_size=5))
def test_slicing_changes_nothing(parts: list[bytes]) -> None:
    check_slicing(b"".join(parts))


class Life(RuleBasedStateMachine):
    """A connection's life, event by event; hypothesis looks for the order that breaks it."""

    def __init__(self) -> None:
        super().__init__()
        self.play = Play()

    @rule(data=pieces)
    def send(self, data: bytes) -> None:
        self.play.send(data)

    @rule(data=st.sampled_from(VALID), at=st.integers(1, 60))
    def send_the_beginning(self, data: bytes, at: int) -> None:
        self.play.send(data[:at])

    @rule()
    def respond(self) -> None:
        self.play.respond()

    @rule()
    def start_stream(self) -> None:
        self.play.start_stream()

    @rule()
    def write(self) -> None:
        self.play.write()

    @rule()
    def end(self) -> None:
        self.play.end()

    @rule()
    def cut(self) -> None:
        self.play.cut()

    @rule()
    def client_stops(self) -> None:
        self.play.client_stops()

    @rule()
    def client_takes(self) -> None:
        self.play.client_takes()

    @rule()
    def client_finishes(self) -> None:
        self.play.client_finishes()

    @rule()
    def client_closes(self) -> None:
        self.play.client_closes()

    @rule()
    def wait_a_moment(self) -> None:
        self.play.wait_a_moment()

    @precondition(lambda self: self.play.wire.app.exchanges)
    @rule()
    def wait_long(self) -> None:
        self.play.wait_long()

    @precondition(lambda self: self.play.wire.app.exchanges)
    @rule()
    def drain(self) -> None:
        self.play.drain()

    @precondition(lambda self: self.play.wire.app.exchanges)
    @rule()
    def lose(self) -> None:
        self.play.lose()

    def teardown(self) -> None:
        self.play.finish()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=25)


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed (extra: fuzz)"
)
def test_a_coverage_guided_fuzzer_finds_nothing(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            sys.executable, "-m", "tests.http1.fuzz", f"-max_total_time={FUZZ_S}", "-seed=1",
            # The peak of its memory would begin with ours, from which it was forked.
            f"-artifact_prefix={tmp_path}/", "-timeout=5", "-rss_limit_mb=0",
            "-malloc_limit_mb=256",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
        capture_output=True, text=True, timeout=FUZZ_S * 10, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    assert "INITED cov:" in run.stderr, "the code under test is instrumented"
    # Reached by any run, however slow the machine; a broken harness reaches a few dozen.
    covered = int(run.stderr.rpartition("cov: ")[2].split()[0])
    assert covered > 300, run.stderr[-2000:]
