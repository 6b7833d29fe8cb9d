"""An engine of several ranks, over real MPI: one server to clients, and one life with its ranks.

`spawned`: the engine starts its ranks. `launched`: mpiexec starts all of them, and this server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import psutil
import pytest

from fastserve.engine import mpi_shm
from tests.e2e.harness import DEADLINE_S, Server, failing, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec"
pytestmark = pytest.mark.skipif(not MPIEXEC.exists(), reason="MPI comes with the extra mpi")

STALL_KILL_S = 4
SIM = (
    "--engine", "sim", "--sim-step-ms", "5", "--served-model-name", "m", "--frontends", "2",
    "--lane-heartbeat-interval-s", "0.1",
    "--engine-stall-unhealthy-s", "2", "--engine-stall-kill-s", str(STALL_KILL_S),
)  # fmt: skip
# At 5 ms a step it takes longer than any test here.
ENDLESS = 7000
LONG = " ".join(f"clause {number}" for number in range(100))
# The kernel tells of a death in milliseconds; the rest is for a busy machine.
ANSWERED_S_MAX = 2.0
GONE_S_MAX = 5.0


def ranked(kind: str, *flags: str, ranks: int = 2) -> Server:
    """A server of that many ranks, not yet ready."""
    return Server("--dp_size", str(ranks), *flags, program=program(kind, ranks))


def program(kind: str, ranks: int) -> tuple[str, ...]:
    launcher = (str(MPIEXEC), "-n", str(ranks)) if kind == "launched" else ()
    return (*launcher, sys.executable, "-m", "fastserve")


class Stream:
    """A streamed completion that is read in a thread; `outcome` says how it ended, and when."""

    def __init__(self, server: Server, prompt: str = "go on", **options: Any) -> None:
        self.num_chunks = 0
        self.outcome: str | Exception = "unfinished"
        self.ended_s = 0.0
        self._client = server.client()
        self._answer: Any = None
        self._options: Any = {"max_tokens": ENDLESS, "model": "m", "prompt": prompt} | options
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._answer = self._client.completions.create(stream=True, **self._options)
            for chunk in self._answer:
                self.num_chunks += 1
                if chunk.choices and chunk.choices[0].finish_reason:
                    self.outcome = chunk.choices[0].finish_reason
        except Exception as error:
            self.outcome = error
        self.ended_s = time.monotonic()

    def started(self) -> Stream:
        wait_until(lambda: self.num_chunks or self.ended_s)
        assert self.num_chunks, self.outcome
        return self

    def join(self) -> Stream:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "nobody answers"
        return self

    def leave(self) -> None:
        """Hang up."""
        self._answer.close()
        self._client.close()
        self.join()


@contextlib.contextmanager
def streams(server: Server, prompts: list[str]) -> Iterator[list[Stream]]:
    """Endless streams, begun one after the other, and left at the end."""
    begun: list[Stream] = []
    try:
        for prompt in prompts:
            begun.append(Stream(server, prompt).started())
        yield begun
    finally:
        for each in begun:
            each.leave()
        wait_until(lambda: server.num_in_engine() == 0)


def moving_without(rank: psutil.Process, begun: list[Stream]) -> int:
    """How many of these streams go on while `rank` is stopped: those that others have."""
    rank.suspend()
    try:
        wait_until(lambda: rank.status() == psutil.STATUS_STOPPED)
        time.sleep(0.3)  # what was sent before
        before = [each.num_chunks for each in begun]
        time.sleep(0.3)
        return sum(each.num_chunks > count for each, count in zip(begun, before, strict=True))
    finally:
        rank.resume()


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    with ranked("spawned", *SIM) as server:
        yield server


def test_requests_are_spread_over_the_ranks(pair: Server) -> None:
    with streams(pair, [f"number {number}" for number in range(6)]) as begun:
        assert moving_without(pair.find("rank 1"), begun) == 3


def test_a_prompt_goes_where_its_beginning_was_read(pair: Server) -> None:
    with streams(pair, [f"{LONG} {number}" for number in range(3)]) as begun:
        assert moving_without(pair.find("rank 1"), begun) in (0, 3)


def test_who_hangs_up_is_forgotten_by_every_rank(pair: Server) -> None:
    with streams(pair, [f"number {number}" for number in range(4)]):
        wait_until(lambda: pair.num_in_engine() == 4)
    assert pair.num_in_engine() == 0


def test_an_acceptor_that_dies_is_forgotten_by_every_rank(pair: Server) -> None:
    begun = [Stream(pair, f"number {number}").started() for number in range(8)]
    victim = pair.find("acceptor 0")
    victim.kill()
    wait_until(lambda: pair.find("acceptor 0").pid != victim.pid)
    wait_until(lambda: pair.get("/ready")[0] == 200)
    for each in begun:
        with contextlib.suppress(Exception):
            each.leave()
    wait_until(lambda: pair.num_in_engine() == 0)
    assert Stream(pair, max_tokens=5).join().outcome == "length"


def test_the_ranks_are_of_one_process_tree(pair: Server) -> None:
    """A rank descends from the engine, and says what it is; its session is not the supervisor's."""
    rank = pair.find("rank 1")
    engine = pair.find("engine")
    assert engine.pid in [parent.pid for parent in rank.parents()]
    assert os.getsid(rank.pid) != os.getsid(pair.find("supervisor").pid)


def test_answers_are_those_of_one_engine(embedded: Server) -> None:
    def ask(server: Server) -> list[str]:
        begun = [Whole(server, f"The story of number {number} begins with") for number in range(6)]
        return [each.text() for each in begun]

    expected = ask(embedded)
    with ranked("spawned", "--frontends", "1", "--served-model-name", "m") as server:
        assert ask(server) == expected
        assert len(set(expected)) == 6


class Whole:
    """A greedy completion of the embedded model, read in a thread."""

    def __init__(self, server: Server, prompt: str) -> None:
        self._text = ""
        self._thread = threading.Thread(target=self._ask, args=(server, prompt), daemon=True)
        self._thread.start()

    def _ask(self, server: Server, prompt: str) -> None:
        client = server.client()
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=12)
        self._text = answer.choices[0].text

    def text(self) -> str:
        self._thread.join(DEADLINE_S)
        assert self._text
        return self._text


# ---- the end


def test_a_launchers_world_serves_and_ends_in_order() -> None:
    with ranked("launched", *SIM, ranks=4) as server:
        tree = server.remember_processes()
        for title in ("supervisor", "engine", "rank 1", "rank 2", "rank 3", "acceptor 1"):
            assert f"fastserve: {title}" in tree
        with streams(server, [f"number {number}" for number in range(4)]) as begun:
            assert moving_without(server.find("rank 3"), begun) == 3
        begun = [Stream(server, f"number {number}", max_tokens=500).started() for number in "1234"]
        server.process.send_signal(signal.SIGTERM)
        assert {each.join().outcome for each in begun} == {"length"}, "it drains first"
        assert server.wait_exit() == 0
        server.assert_nothing_left()


# One of each sort; the others are slow only for being so many.
QUICK = {("spawned", "kill"), ("launched", "kill"), ("spawned", "stop"), ("launched", "mpi_abort")}


@pytest.mark.parametrize(
    ("kind", "blow"),
    [
        pytest.param(kind, blow, marks=() if (kind, blow) in QUICK else pytest.mark.slow)
        for kind in ("spawned", "launched")
        for blow in ("kill", "stop", "exception", "mpi_abort")
    ],
)
def test_a_rank_lost_in_decode_is_the_end_of_the_engine(kind: str, blow: str) -> None:
    with ranked(kind, *SIM) as server:
        server.wait_ready()
        assert_ends(server, kind, [Stream(server).started(), *strike(server, blow)], blow=blow)


def strike(server: Server, blow: str) -> list[Stream]:
    """Strike rank 1, which has the second of two streams, or its engine at the tenth token."""
    if blow in ("exception", "mpi_abort"):
        return [Stream(server, extra_body={"sim": {"die_at": 10, "die_by": blow}})]
    second = Stream(server).started()
    rank = server.find("rank 1")
    rank.send_signal(signal.SIGKILL if blow == "kill" else signal.SIGSTOP)
    return [second]


def test_a_rank_lost_in_prefill_is_the_end_of_the_engine() -> None:
    with ranked("spawned", *SIM, "--sim-prefill-tokens-per-s", "100") as server:
        begun = [Stream(server, LONG), Stream(server, f"But {LONG}")]
        wait_until(lambda: server.num_in_engine() == 2)
        server.find("rank 1").kill()
        assert_ends(server, "spawned", begun, blow="kill")
        assert not any(each.num_chunks for each in begun)


def assert_ends(server: Server, kind: str, begun: list[Stream], *, blow: str) -> None:
    """Everybody is told the truth at once, and everything is gone."""
    server.remember_processes()
    struck_s = time.monotonic()
    for each in begun:
        error = each.join().outcome
        assert isinstance(error, openai.APIError), error
        assert "engine" in error.message
        assert error.code == "engine_dead"
    code = server.process.wait(DEADLINE_S)
    wait_until(lambda: not server._alive())
    gone_s = time.monotonic() - struck_s
    answered_s = max(each.ended_s for each in begun) - struck_s
    print(f"\n{kind} {blow}: answered {answered_s:.3f} s, gone {gone_s:.3f} s after the blow")
    silent_s = STALL_KILL_S + 1.5 if blow == "stop" else 0.0
    assert answered_s < ANSWERED_S_MAX + silent_s
    assert gone_s < GONE_S_MAX + silent_s
    # A launcher has a code of its own for a rank that was killed.
    assert code == 70 if kind == "spawned" else code != 0
    server.assert_nothing_left()
    mpi_shm.sweep(age_s=0.0)


def spawned_rank(server: Server) -> psutil.Process | None:
    """The process that is to become rank 1, from its very beginning."""
    tree = server.remember_processes()
    return next((one for title, one in tree.items() if "mpi4py.futures" in title), None)


@pytest.mark.parametrize("phase", ["start", "load"])
def test_a_rank_lost_before_it_serves_is_the_end_of_the_start(phase: str) -> None:
    with failing("--dp-size", "2", *SIM) as server:
        if phase == "start":
            rank = wait_until(lambda: spawned_rank(server))
        else:
            rank = server.find("rank 1")
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
        try:
            code = server.wait_exit(deadline_s=GONE_S_MAX + 5.0)
        finally:
            print(server.log)
        assert code in (2, 70)
        assert "is ready" not in server.stdout
    # What nobody had the time to know of, the next job removes.
    mpi_shm.sweep(age_s=0.0)


def is_replaced(server: Server, pid: int) -> bool:
    """Whether rank 1 is another than that, and all of the engine is ready."""
    rank = server.remember_processes().get("fastserve: rank 1")
    return rank is not None and rank.pid != pid and server.get("/ready")[0] == 200


def test_an_engine_that_lost_a_rank_is_respawned_with_all_of_them() -> None:
    with ranked("spawned", *SIM, "--engine-respawn", "3", ranks=3) as server:
        server.wait_ready()
        for victim in ("rank 2", "engine"):
            before = server.find("rank 1").pid
            begun = [Stream(server, f"number {number}").started() for number in range(3)]
            server.find(victim).kill()
            for each in begun:
                outcome = each.join().outcome
                assert isinstance(outcome, openai.APIError)
                assert outcome.code == "engine_dead"
            wait_until(partial(is_replaced, server, before))
            with streams(server, [f"number {number}" for number in range(3)]) as again:
                assert moving_without(server.find("rank 1"), again) == 2


# ---- what is refused


@pytest.mark.parametrize(
    ("kind", "ranks", "flags", "why"),
    [
        pytest.param("spawned", 2, ("--engine", "trtllm"), "server.dp_size", id="trtllm"),
        pytest.param("launched", 2, (*SIM, "--engine-respawn", "1"), "engine.respawn", id="again"),
        pytest.param("launched", 2, (*SIM, "--model", "/none"), "server.model", id="no model"),
        pytest.param("launched", 3, SIM, "server.dp_size", id="another number"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(kind: str, ranks: int, flags: tuple[str, ...], why: str) -> None:
    server = Server("--dp-size", "2", *flags, program=program(kind, ranks))
    try:
        assert server.wait_exit() == 2
        assert why in server.log
        server.assert_nothing_left()
    finally:
        server.kill_everything()
        mpi_shm.sweep(age_s=0.0)


def test_a_model_that_no_rank_can_load_is_no_reason_to_try_again(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_text("no model")
    with failing("--dp-size", "2", "--model", str(model)) as server:
        assert server.wait_exit() == 2
        assert "model.gguf" in server.log
