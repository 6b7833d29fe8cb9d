"""Grammars in the embedded engine with its real model, beside requests that have none."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from fastserve.engine.adapters.llamacpp import LlamaCppEngine
from fastserve.engine.guidance import Grammars, Guide
from fastserve.generation import FinishReason, Grammar, GrammarKind, RequestId, SamplingParams
from fastserve.lane.messages import Submit
from fastserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastserve.engine.interface import StepOutputs
    from fastserve.generation import Finish, ModelCard, TokenLogprob

# Read by OpenMP when the library loads: its threads otherwise spin between decodes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

DEADLINE_S = 60.0
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = "<|im_start|>user\nName a person.<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def reason(self) -> FinishReason:
        assert self.finish is not None
        return self.finish.reason


class Driver:
    """An engine, and the answers to what it was asked."""

    def __init__(self) -> None:
        self.engine = LlamaCppEngine(max_seq_len=512, max_num_seqs=4)
        self.card: ModelCard = self.engine.describe()
        self.engine.load(lambda share: None)
        self.tokenizer = Tokenizer.from_file(self.card.tokenizer_path)
        self.answers: dict[int, Answer] = {}

    def ask(self, kind: str | None = None, source: object = "", **params: Any) -> Answer:
        number = len(self.answers)
        grammar = None
        if kind is not None:
            text = source if isinstance(source, str) else json.dumps(source)
            grammar = Grammar(kind=GrammarKind(kind), source=text, param="regex")
        params.setdefault("max_tokens", 100)
        self.engine.add(
            Submit(
                request_id=RequestId(number),
                prompt_token_ids=self.tokenizer.encode(ASK, parse_special=True),
                sampling=SamplingParams(grammar=grammar, **params),
            )
        )
        self.answers[number] = Answer()
        return self.answers[number]

    def step(self) -> None:
        self._note(self.engine.step(pump))

    def run(self) -> None:
        give_up_s = time.monotonic() + DEADLINE_S
        while self.engine.has_work():
            assert time.monotonic() < give_up_s
            self.step()

    def text(self, answer: Answer) -> str:
        return self.tokenizer.decode(answer.token_ids)

    def _note(self, outputs: StepOutputs) -> None:
        start = 0
        counts = outputs.counts or [1] * len(outputs.request_ids)
        for index, (request_id, count) in enumerate(zip(outputs.request_ids, counts, strict=True)):
            answer = self.answers[request_id]
            answer.token_ids += outputs.token_ids[start : start + count]
            start += count
            answer.logprobs += outputs.logprobs.get(index, [])
            answer.finish = outputs.finishes.get(index, answer.finish)


def pump(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
    return bool(select.select(() if fd is None else (fd,), (), (), timeout_s)[0])


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        one = Driver()
        yield one
        assert not one.engine.has_work()
        one.engine.close()


def test_every_kind_is_announced(driver: Driver) -> None:
    assert set(driver.card.grammar_kinds) == set(GrammarKind)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_answer_matches_its_own_grammar(driver: Driver, temperature: float) -> None:
    params: dict[str, Any] = {"temperature": temperature, "seed": 1}
    person = driver.ask("json_schema", PERSON, **params)
    code = driver.ask("regex", "[A-Z]{3}-[0-9]{2}", **params)
    free = driver.ask(**params, max_tokens=8)
    names = driver.ask("ebnf", 'root ::= "<" name ">"\nname ::= "Ann" | "Bob"', **params)
    driver.run()
    said = json.loads(driver.text(person))
    assert list(said) == ["name", "age"]
    assert isinstance(said["age"], int)
    assert driver.text(code)[3] == "-"
    assert driver.text(names) in ("<Ann>", "<Bob>")
    assert {one.reason for one in (person, code, names)} == {FinishReason.STOP}
    assert len(free.token_ids) == 8 or free.reason is FinishReason.STOP


def test_a_neighbour_with_a_grammar_changes_nothing(driver: Driver) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    alone = driver.ask(**params)
    driver.run()
    beside = driver.ask(**params)
    driver.ask("json_schema", PERSON)
    driver.run()
    assert beside.token_ids == alone.token_ids


def test_what_is_complete_ends_without_an_end_token(driver: Driver) -> None:
    answer = driver.ask("regex", "(yes|no)", ignore_eos=True)
    driver.run()
    assert driver.text(answer) in ("yes", "no")
    assert answer.reason is FinishReason.STOP
    assert answer.token_ids[-1] not in driver.card.eos_token_ids


def test_a_limit_still_cuts(driver: Driver) -> None:
    answer = driver.ask("regex", "[0-9]{9}", max_tokens=3)
    complete = driver.ask("regex", "[0-9]{3}", max_tokens=3)
    driver.run()
    assert (len(answer.token_ids), answer.reason) == (3, FinishReason.LENGTH)
    assert (len(complete.token_ids), complete.reason) == (3, FinishReason.STOP)


def test_an_answer_that_matches_and_may_not_end_ends_all_the_same(driver: Driver) -> None:
    # All that may follow the digit is another, of which each is a stop id; and it is too early.
    digits = tuple(driver.tokenizer.encode("5", parse_special=False))
    answer = driver.ask("regex", "(a|a5)", min_tokens=4, stop_token_ids=digits)
    driver.run()
    assert driver.text(answer) == "a"
    assert answer.reason is FinishReason.STOP


def test_logprobs_are_the_models_own(driver: Driver) -> None:
    [digit] = driver.tokenizer.encode("7", parse_special=False)
    answer = driver.ask("regex", "7", temperature=0.0, logprobs=3)
    driver.run()
    assert answer.token_ids == [digit]
    [told] = answer.logprobs
    # Nothing else was allowed, but the model would have said something else.
    assert told.logprob < -1.0
    assert digit not in [token_id for token_id, _ in told.top]


@pytest.mark.parametrize("source", ["(", "a(?!b)", "\x04", "(a{1000}){1000}"])
def test_what_cannot_be_followed_ends_before_the_first_token(driver: Driver, source: str) -> None:
    free = driver.ask(max_tokens=4, ignore_eos=True)
    answer = driver.ask("regex", source)
    driver.run()
    assert answer.token_ids == []
    assert answer.finish is not None
    assert (answer.finish.reason, answer.finish.invalid) == (FinishReason.ERROR, True)
    assert answer.finish.param == "regex"
    assert len(free.token_ids) == 4


def test_a_dead_end_is_one_requests_error(driver: Driver) -> None:
    free = driver.ask(max_tokens=6, ignore_eos=True)
    answer = driver.ask("regex", "ab?\x04")
    driver.run()
    assert answer.reason is FinishReason.ERROR
    assert answer.finish is not None
    assert "nothing may follow" in str(answer.finish.error)
    assert len(free.token_ids) == 6


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No grammar is compiled until the event is set."""
    release = threading.Event()
    real = Grammars.compile

    def waiting(self: Grammars, grammar: Grammar) -> Guide:
        assert release.wait(DEADLINE_S)
        return real(self, grammar)

    monkeypatch.setattr(Grammars, "compile", waiting)
    yield release
    release.set()


def test_nobody_waits_for_anothers_grammar(driver: Driver, held: threading.Event) -> None:
    answer = driver.ask("regex", "a")
    free = driver.ask(max_tokens=5, ignore_eos=True)
    while free.finish is None:
        driver.step()
    assert answer.finish is None
    assert driver.engine.stats().num_waiting == 1
    held.set()
    driver.run()
    assert driver.text(answer) == "a"


def test_an_engine_that_only_waits_for_grammars_does_not_spin(
    driver: Driver, held: threading.Event
) -> None:
    answer = driver.ask("regex", "a")
    began_s = time.monotonic()
    driver.step()
    assert time.monotonic() - began_s >= 0.9
    held.set()
    driver.run()
    assert answer.reason is FinishReason.STOP


def test_an_abort_while_its_grammar_is_compiled(driver: Driver, held: threading.Event) -> None:
    answer = driver.ask("regex", "a")
    driver.engine.abort([RequestId(len(driver.answers) - 1)])
    assert not driver.engine.has_work()
    held.set()
    other = driver.ask("regex", "b")
    driver.run()
    assert (answer.token_ids, answer.finish) == ([], None)
    assert driver.text(other) == "b"


def test_more_than_fit_wait_for_a_slot(driver: Driver) -> None:
    answers = [driver.ask("regex", f"n{number}[a-z]{{9}}") for number in range(9)]
    driver.run()
    assert [driver.text(answer)[:2] for answer in answers] == [f"n{n}" for n in range(9)]
