"""The simulated engine by itself, on a clock of the test's own: when it says what."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import count, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from fastserve.engine.adapters import sim
from fastserve.engine.adapters.sim import SimEngine
from fastserve.engine.admission import Queue
from fastserve.errors import InvalidRequest
from fastserve.generation import FinishReason, RequestId, SamplingParams, embedding_values
from fastserve.lane.messages import Submit
from tests.frontend.stage import END, VOCAB_SIZE, WORDS, write_card

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fastserve.engine.interface import StepOutputs
    from fastserve.generation import Finish, ModelCard

FIRST_WORD = 256
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@dataclass
class Bench:
    """An engine and its clock, which moves only while the engine waits."""

    engine: SimEngine
    now_s: float = 100.0
    meanwhile: Callable[[], None] = lambda: None
    ids: Any = field(default_factory=lambda: count(1))

    def pump(self, *, fd: int | None = None, timeout_s: float = 0.0) -> bool:
        self.meanwhile()
        self.now_s += max(timeout_s, 0.0)
        return False

    def add(
        self, prompt: list[int] | None = None, *, script: Any = None, **sampling: Any
    ) -> RequestId:
        request_id = RequestId(next(self.ids))
        self.engine.add(
            Submit(
                request_id=request_id,
                prompt_token_ids=prompt or [1],
                sampling=SamplingParams(**{"max_tokens": 5} | sampling),
                sim=script,
            )
        )
        return request_id

    def step(self) -> dict[int, tuple[list[int], Finish | None]]:
        """What a step added, by request."""
        return by_request(self.engine.step(self.pump))

    def run(self, request_id: RequestId) -> tuple[list[int], Finish]:
        """Step until this request has finished; return all of it."""
        said: list[int] = []
        for _ in range(1000):
            tokens, finish = self.step().get(request_id, ([], None))
            said += tokens
            if finish is not None:
                return said, finish
        raise AssertionError("it never finished")


def by_request(step: StepOutputs) -> dict[int, tuple[list[int], Finish | None]]:
    counts = step.counts or [1] * len(step.request_ids)
    assert len(counts) == len(step.request_ids)
    assert sum(counts) == len(step.token_ids)
    tokens = iter(step.token_ids)
    return {
        request_id: ([next(tokens) for _ in range(counts[index])], step.finishes.get(index))
        for index, request_id in enumerate(step.request_ids)
    }


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    directory: Path = tmp_path_factory.mktemp("model")
    return write_card(directory)


@pytest.fixture
def make(card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    def make(
        *, step_ms: float = 10.0, prefill_tokens_per_s: float = 0.0, max_batch_size: int = 100
    ) -> Bench:
        engine = SimEngine(
            describe=lambda: card,
            step_ms=step_ms,
            prefill_tokens_per_s=prefill_tokens_per_s,
            max_batch_size=max_batch_size,
        )
        bench = Bench(engine)
        monkeypatch.setattr(sim, "time", SimpleNamespace(monotonic=lambda: bench.now_s))
        assert engine.describe() is card
        progress: list[float] = []
        engine.load(progress.append)
        assert progress == [1.0]
        return bench

    return make


# ---- words


def test_words_depend_on_prompt_and_seed_alone(make: Callable[..., Bench]) -> None:
    def words(prompt: list[int], seed: int | None = None) -> list[int]:
        bench = make()
        bench.add([9])  # company changes nothing
        return bench.run(bench.add(prompt, seed=seed))[0]

    assert words([1, 2]) == words([1, 2])
    assert words([1, 2], 3) == words([1, 2], 3)
    assert words([1, 2], -3) == words([1, 2], -3)
    starts = {words([1, 2], seed)[0] for seed in range(40)}
    assert starts == {FIRST_WORD + n for n in range(len(WORDS))}


def test_words_follow_each_other_round_the_vocabulary(make: Callable[..., Bench]) -> None:
    bench = make()
    said, finish = bench.run(bench.add(max_tokens=7))
    assert len(said) == 7
    assert all((b - a) % len(WORDS) == 1 for a, b in pairwise(said))
    assert finish.reason is LENGTH
    assert not bench.engine.has_work()


# ---- time


def test_steps_follow_each_other_without_drift(make: Callable[..., Bench]) -> None:
    bench = make(step_ms=10)
    bench.add(max_tokens=3)
    for at_s in (100.01, 100.02, 100.03):
        bench.step()
        assert bench.now_s == pytest.approx(at_s)
    bench.now_s = 200.0  # idle for long: nothing is made up for
    bench.add(max_tokens=2)
    bench.step()
    assert bench.now_s == pytest.approx(200.01)
    bench.now_s += 0.004  # a step that came late in its slot
    bench.step()
    assert bench.now_s == pytest.approx(200.02)


def test_a_prompt_is_read_at_its_pace(make: Callable[..., Bench]) -> None:
    bench = make(step_ms=10, prefill_tokens_per_s=1000)
    first = bench.add([1] * 30, max_tokens=1)
    second = bench.add([1] * 5, max_tokens=1)
    # 10 tokens a step, the first request first; a step with them takes twice as long.
    assert [sorted(bench.step()) for _ in range(4)] == [[], [], [first], [second]]
    assert bench.now_s == pytest.approx(100 + 4 * 0.01 + 35 / 1000)


def test_who_decodes_goes_on_while_a_prompt_is_read(make: Callable[..., Bench]) -> None:
    bench = make(step_ms=10, prefill_tokens_per_s=1000)
    running = bench.add([1], max_tokens=50)
    assert running in bench.step()
    bench.add([1] * 60)
    assert all(running in bench.step() for _ in range(6))


def test_a_batch_has_a_limit(make: Callable[..., Bench]) -> None:
    bench = make(max_batch_size=2)
    first, second, third = (bench.add(max_tokens=2) for _ in range(3))
    assert bench.engine.stats().num_waiting == 3
    assert sorted(bench.step()) == [first, second]
    assert (bench.engine.stats().num_running, bench.engine.stats().num_waiting) == (2, 1)
    bench.step()
    assert sorted(bench.step()) == [third]


def test_a_finish_tells_how_long_its_request_waited(make: Callable[..., Bench]) -> None:
    bench = make(max_batch_size=1)
    first, second, scripted = bench.add(), bench.add(), bench.add(script={})
    waited_s = [bench.run(request)[1].queue_time_s for request in (first, second, scripted)]
    assert waited_s == pytest.approx([0.0, 0.05, 0.1])


def test_an_abort_holds_from_the_moment_it_comes(make: Callable[..., Bench]) -> None:
    bench = make(max_batch_size=1)
    running, waiting, patient = (bench.add() for _ in range(3))
    bench.step()
    bench.meanwhile = lambda: bench.engine.abort([running, waiting, RequestId(99)])
    assert bench.step() == {}
    bench.meanwhile = lambda: None
    assert sorted(bench.step()) == [patient]


# ---- scripts


@pytest.mark.parametrize(
    ("script", "sampling", "tokens", "reason", "stop_token_id"),
    [
        pytest.param({"token_ids": [5, 6]}, {}, [5, 6], STOP, None, id="to its end"),
        pytest.param({"token_ids": []}, {}, [], STOP, None, id="of nothing"),
        pytest.param({"token_ids": [5, 6, 7]}, {"max_tokens": 2}, [5, 6], LENGTH, None, id="cut"),
        pytest.param({"token_ids": [5, 6]}, {"max_tokens": 2}, [5, 6], LENGTH, None, id="just cut"),
        pytest.param({"token_ids": [5, END, 7]}, {}, [5, END], STOP, None, id="an end token"),
        pytest.param(
            {"token_ids": [5, END, 7]}, {"ignore_eos": True}, [5, END, 7], STOP, None, id="ignored"
        ),
        pytest.param(
            {"token_ids": [5, 6, 7]}, {"stop_token_ids": (6,)}, [5, 6], STOP, 6, id="a stop token"
        ),
        pytest.param(
            {"token_ids": [5, 6], "fail_at": 1}, {}, [5], FinishReason.ERROR, None, id="f"
        ),
    ],
)
def test_a_script_is_followed(
    make: Callable[..., Bench],
    script: Any,
    *,
    sampling: Any,
    tokens: list[int],
    reason: Any,
    stop_token_id: int | None,
) -> None:
    bench = make()
    said, finish = bench.run(bench.add(script=script, **sampling))
    assert (said, finish.reason, finish.stop_token_id) == (tokens, reason, stop_token_id)
    assert (finish.error is not None) == (reason is FinishReason.ERROR)
    assert not bench.engine.has_work()


def test_scripts_and_words_share_a_step(make: Callable[..., Bench]) -> None:
    """A finish without a token among tokens: the columns must still belong together."""
    bench = make()
    plain, empty, scripted, failing, other = (
        bench.add(max_tokens=1),
        bench.add(script={"token_ids": []}),
        bench.add(script={"token_ids": [5, 6]}),
        bench.add(script={"fail_at": 0}),
        bench.add(max_tokens=2),
    )
    said = bench.step()
    assert [len(said[each][0]) for each in (plain, empty, scripted, failing, other)] == [
        1, 0, 1, 0, 1,
    ]  # fmt: skip
    ended = [request_id for request_id, (_, finish) in said.items() if finish is not None]
    assert ended == [plain, empty, failing]
    assert said[scripted][0] == [5]


def test_a_delay_does_not_hold_up_the_others(make: Callable[..., Bench]) -> None:
    bench = make(step_ms=10)
    late = bench.add(script={"token_ids": [5], "delay_ms": 35})
    other = bench.add(max_tokens=10)
    steps = [sorted(bench.step()) for _ in range(5)]
    assert steps == [[other]] * 3 + [[late, other], [other]]


def test_dying_by_an_exception_is_one(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.add(script={"die_at": 1, "die_by": "exception"})
    bench.step()
    with pytest.raises(RuntimeError, match="scripted"):
        bench.step()


@pytest.mark.parametrize(
    "script",
    [
        {"tokens": [1]},
        {"token_ids": [-1]},
        {"token_ids": [VOCAB_SIZE]},
        {"token_ids": [1.5]},
        {"logprobs": [[0.0, [[VOCAB_SIZE, 0.0]]]]},
        {"logprobs": [["nan", []]]},
        {"delay_ms": -0.1},
        {"hang_at": -1},
        {"die_by": "fright"},
    ],
    ids=str,
)
def test_what_is_no_script_is_refused(make: Callable[..., Bench], script: Any) -> None:
    bench = make()
    with pytest.raises(InvalidRequest, match=r"^sim: ") as caught:
        bench.add(script=script)
    assert caught.value.param == "sim"
    assert not bench.engine.has_work()


# ---- logprobs


def logprobs(bench: Bench) -> Any:
    step = bench.engine.step(bench.pump)
    [[entry]] = step.logprobs.values()
    return entry


@pytest.mark.parametrize(("asked", "told"), [(0, 0), (1, 1), (3, 3), (20, len(WORDS))])
def test_each_likeliest_word_is_half_as_likely_as_the_one_before(
    make: Callable[..., Bench], asked: int, told: int
) -> None:
    bench = make()
    bench.add(logprobs=asked)
    entry = logprobs(bench)
    assert entry.logprob == pytest.approx(math.log(0.5))
    assert [value for _, value in entry.top] == pytest.approx(
        [math.log(0.5**rank) for rank in range(1, told + 1)]
    )
    assert len({token for token, _ in entry.top}) == told


def test_scripted_logprobs_are_told_as_far_as_asked_for(make: Callable[..., Bench]) -> None:
    bench = make()
    script = {
        "token_ids": [5, 6, 7],
        "logprobs": [[-0.5, [[5, -0.5], [6, None]]], ["-inf", [[8, "inf"]]]],
    }
    bench.add(script=script, logprobs=1)
    first, second, third = (logprobs(bench) for _ in range(3))
    assert (first.logprob, first.top) == (-0.5, ((5, -0.5),))
    assert (second.logprob, second.top) == (-math.inf, ((8, math.inf),))
    assert third.top == ((7, pytest.approx(math.log(0.5))),)


def test_without_being_asked_for_no_logprobs_are_told(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.add(script={"token_ids": [5], "logprobs": [[-0.5, []]]})
    assert bench.engine.step(bench.pump).logprobs == {}


def test_a_null_is_not_a_number(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.add(script={"token_ids": [5], "logprobs": [[None, [[5, None]]]]}, logprobs=1)
    entry = logprobs(bench)
    assert math.isnan(entry.logprob)
    assert math.isnan(entry.top[0][1])


def test_a_closed_engine_has_no_work(make: Callable[..., Bench]) -> None:
    bench = make(max_batch_size=1)
    bench.add()
    bench.add()
    bench.step()
    bench.engine.close()
    assert not bench.engine.has_work()


def test_a_prompt_is_told_of_with_the_first_token(make: Callable[..., Bench]) -> None:
    bench = make()
    request_id = bench.add([1, 2, 3], prompt_logprobs=2, max_tokens=2)
    first, second = bench.engine.step(bench.pump), bench.engine.step(bench.pump)
    assert first.request_ids == second.request_ids == [request_id]
    assert second.prompt_logprobs == {}
    [told] = first.prompt_logprobs.values()
    assert [(one.logprob, one.top) for one in told] == [
        (-1 / 64, ((2, -1 / 64), (FIRST_WORD, -1 / 64 - 1))),
        (-2 / 64, ((3, -2 / 64), (FIRST_WORD, -2 / 64 - 1))),
    ]


def test_a_prompt_may_be_told_of_alone(make: Callable[..., Bench]) -> None:
    bench = make()
    script = {"prompt_logprobs": [[None, []], ["-inf", [[7, -1.5]]]]}
    request_id = bench.add([1, 2, 3, 4], script=script, prompt_logprobs=1, max_tokens=0)
    step = bench.engine.step(bench.pump)
    assert by_request(step)[request_id][0] == []
    assert step.finishes[0].reason is LENGTH
    told = step.prompt_logprobs[0]
    assert math.isnan(told[0].logprob)
    assert (told[1].logprob, told[1].top) == (-math.inf, ((7, -1.5),))
    assert told[2].logprob == -3 / 64, "where the script says nothing"
    assert not bench.engine.has_work()


def test_who_waits_is_served_by_priority(make: Callable[..., Bench]) -> None:
    bench = make(max_batch_size=1)
    ids = [bench.add(priority=priority, max_tokens=1) for priority in (3, 0, -1, 0)]
    served = [next(iter(bench.step())) for _ in ids]
    assert served == [ids[2], ids[1], ids[3], ids[0]]


def test_what_queues_is_what_the_next_step_has_no_place_for(make: Callable[..., Bench]) -> None:
    bench = make(max_batch_size=2)
    ids = [bench.add([1] * length, max_tokens=2) for length in (3, 4, 5, 6)]
    queued = Queue(num_places=0, num_requests=2, num_tokens=11)
    assert bench.engine.queue() == queued
    bench.step()
    assert bench.engine.queue() == queued
    bench.engine.abort([ids[2]])
    assert bench.engine.queue() == Queue(num_places=0, num_requests=1, num_tokens=6)
    bench.step()
    assert bench.engine.queue() == Queue(num_places=1), "two have ended"


def test_an_embedding_is_a_direction_that_the_prompt_decides(card: ModelCard) -> None:
    engine = SimEngine(
        describe=lambda: card,
        step_ms=0.0,
        prefill_tokens_per_s=0.0,
        max_batch_size=9,
        embedding_size=5,
    )
    assert engine.describe().embedding_size == 5
    engine.load(lambda share: None)
    for number, prompt in enumerate([[1, 2], [3], [1, 2]]):
        engine.add(
            Submit(
                request_id=RequestId(number),
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=0),
                embed=True,
            )
        )
    outputs = engine.step(lambda *, fd=None, timeout_s=0.0: True)
    assert (outputs.request_ids, outputs.token_ids, outputs.counts) == ([0, 1, 2], [], [0, 0, 0])
    first, second, third = (
        embedding_values(finish.embedding or "") for finish in outputs.finishes.values()
    )
    assert first == third != second
    assert len(first) == 5
    assert math.isclose(math.hypot(*first), 1, abs_tol=1e-6)
