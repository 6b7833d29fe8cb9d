"""What is done in a process of its own is done as it is done here."""

from __future__ import annotations

import os
import pickle
import signal
from array import array
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import orjson
import psutil
import pytest

from fastserve.errors import GenerationFailed, InvalidRequest
from fastserve.frontend import prepare, texts
from fastserve.frontend.model import Model
from fastserve.frontend.preparer import Preparer
from tests.frontend.stage import LENGTH, MAX_SEQ_LEN, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastserve.generation import ModelCard

TIMEOUT_S = 60.0
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
CHAT = {"messages": MESSAGES, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1}}
COMPLETION = {"prompt": ["ab", "c"], "n": 2, "echo": True, "logprobs": 2, "new": 1}


@pytest.fixture(scope="module")
def model(card: ModelCard) -> Model:
    return Model(card, template_bytes_max=1 << 20, names=(card.name, "also"))


@pytest.fixture(scope="module")
def preparer() -> Iterator[Preparer]:
    made = new_preparer()
    yield made
    made.close()


def new_preparer(*, waiting_bytes_max: int = 1 << 30) -> Preparer:
    return Preparer(
        name="preparer-0", title="preparer", log_level="error", log_format="text",
        waiting_bytes_max=waiting_bytes_max,
    )  # fmt: skip


def done(preparer: Preparer, work: Callable[[bytes, Model], Any], body: bytes, model: Model) -> Any:
    return preparer.submit(work, body, model, wanted=lambda: True).result(TIMEOUT_S)


def process_of(preparer: Preparer) -> psutil.Process:
    [child] = [
        child for child in psutil.Process().children() if child.name().startswith("preparer")
    ]
    return child


@pytest.mark.parametrize(
    ("work", "fields"),
    [
        pytest.param(prepare.prepare_completion, COMPLETION, id="completions"),
        pytest.param(prepare.prepare_chat, CHAT, id="chat"),
        pytest.param(prepare.prepare_chat, {"prompt_token_ids": [1, 2]}, id="chat of ids"),
        pytest.param(
            prepare.prepare_messages, {"messages": MESSAGES[:1], "max_tokens": 5}, id="messages"
        ),
    ],
)
def test_a_request_is_the_same_from_there(
    preparer: Preparer, model: Model, work: Any, fields: dict[str, Any]
) -> None:
    body = orjson.dumps(fields)
    there, here = done(preparer, work, body, model), work(body, model)
    assert there.request == here.request
    assert list(there.choices()) == list(here.choices())
    assert type(there.dialect) is type(here.dialect)
    told = {"completion_id": "c", "created": 1, "model": "m", "index": 0, "prompt_tokens": 3}
    assert there.dialect.chunks(**told).text("x") == here.dialect.chunks(**told).text("x")


@pytest.mark.parametrize(
    ("work", "fields"),
    [
        (texts.tokenize, {"prompt": "ab", "return_token_strs": True, "new": 1}),
        (texts.detokenize, {"tokens": [97, 98]}),
        (texts.count_tokens, {"messages": MESSAGES[:1]}),
    ],
)
def test_a_text_is_told_of_as_here(
    preparer: Preparer, model: Model, work: Any, fields: dict[str, Any]
) -> None:
    body = orjson.dumps(fields)
    assert done(preparer, work, body, model) == work(body, model)


def test_a_refusal_says_there_what_it_says_here(preparer: Preparer, model: Model) -> None:
    with pytest.raises(InvalidRequest) as caught:
        done(preparer, prepare.prepare_completion, b'{"prompt":"a","top_p":2}', model)
    error = caught.value
    assert (error.message, error.param) == ("'top_p' must be at most 1; it is 2.", "top_p")
    assert (error.status, error.code) == (400, "decimal_above_max_value")


def test_a_bug_there_is_a_bug_here(preparer: Preparer, model: Model) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        done(preparer, fails, b"", model)
    assert done(preparer, texts.detokenize, b'{"tokens":[97]}', model).body


def fails(body: bytes, model: Model) -> None:
    raise ZeroDivisionError


def test_what_nobody_waits_for_is_not_done(preparer: Preparer, model: Model) -> None:
    with pytest.raises(GenerationFailed, match="nobody waits"):
        preparer.submit(fails, b"", model, wanted=lambda: False).result(TIMEOUT_S)


def test_a_process_that_dies_is_followed_by_another(preparer: Preparer, model: Model) -> None:
    done(preparer, texts.detokenize, b'{"tokens":[97]}', model)
    first = process_of(preparer)
    with pytest.raises(GenerationFailed, match="died"):
        done(preparer, dies, b"", model)
    assert done(preparer, texts.detokenize, b'{"tokens":[97]}', model).body
    assert not first.is_running()
    assert process_of(preparer) != first


def dies(body: bytes, model: Model) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_no_more_wait_than_there_is_room_for(card: ModelCard, model: Model) -> None:
    full = new_preparer(waiting_bytes_max=100)
    try:
        stage = Stage(card, preparer=full, off_loop_bytes_min=10, off_process_bytes_min=10)
        assert stage.ask(prompt="x" * 200).status == 429
        # What was done, or given up, makes room.
        for _ in range(3):
            with pytest.raises(GenerationFailed):
                full.submit(fails, b"x" * 40, model, wanted=lambda: False).result(TIMEOUT_S)
    finally:
        full.close()


def test_what_has_state_of_ours_stays_here() -> None:
    assert Preparer.takes(prepare.prepare_chat)
    assert not Preparer.takes(Future().result)  # type: ignore[arg-type] # what it does is no matter


def test_many_ids_are_packed_and_come_back_packed(card: ModelCard) -> None:
    ids = [97] * prepare.PACKED_MIN
    long = Model(card, template_bytes_max=1 << 20)
    [prompt] = prepare.prepare_completion(orjson.dumps({"prompt": ids}), long).prompts
    assert prompt.token_ids == array("I", ids)
    assert pickle.loads(pickle.dumps(prompt)) == prompt
    [prompt] = prepare.prepare_completion(orjson.dumps({"prompt": ids[1:]}), long).prompts
    assert prompt.token_ids == ids[1:]


def test_a_large_body_is_answered_by_way_of_the_process(
    card: ModelCard, preparer: Preparer
) -> None:
    stage = Stage(
        card, preparer=preparer, off_loop_bytes_min=1 << 10, off_process_bytes_min=1 << 10
    )
    asked = stage.ask(prompt="x" * 5000 + "yz", truncate_prompt_tokens=2, user="u" * 5000)
    assert stage.inbox == []
    stage.run_call()
    assert list(stage.submits[0].prompt_token_ids) == [*b"yz"]
    stage.say(b"!", LENGTH)
    assert asked.json()["choices"][0]["text"] == "!"
    too_long = stage.ask(prompt="x" * 5000)
    stage.run_call()
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert MAX_SEQ_LEN < 5000
    gone = stage.ask(prompt="x" * 5000)
    gone.exchange.disconnect()
    stage.run_call()
    assert (len(stage.submits), stage.frontend.num_in_flight) == (1, 0)
