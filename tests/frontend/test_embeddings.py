"""A request for embeddings, from its bytes to the bytes of its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from fastserve.generation import Finish, FinishReason, packed_embedding
from tests.frontend.stage import FAILED, MAX_SEQ_LEN, Stage

if TYPE_CHECKING:
    from fastserve.generation import ModelCard

SIZE = 3
VECTORS = [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]
EMBEDDED = [Finish(reason=FinishReason.STOP, embedding=packed_embedding(v)) for v in VECTORS]


@pytest.fixture
def embedder(card: ModelCard) -> Stage:
    return Stage(replace(card, embedding_size=SIZE))


def ask(stage: Stage, text: Any, **fields: Any) -> Any:
    return stage.ask("/v1/embeddings", input=text, **fields)


def test_each_text_is_one_request_and_the_answer_has_them_in_order(embedder: Stage) -> None:
    asked = ask(embedder, ["ab", [7, 8, 9]])
    assert [list(submit.prompt_token_ids) for submit in embedder.submits] == [[97, 98], [7, 8, 9]]
    assert all(submit.embed for submit in embedder.submits)
    embedder.say(finish=EMBEDDED[1], request=1)
    assert not asked.ended
    embedder.say(finish=EMBEDDED[0], request=0)
    answer = asked.json()
    assert [item["embedding"] for item in answer["data"]] == VECTORS
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert embedder.frontend.num_in_flight == 0


def test_what_begins_and_ends_a_text_is_put_around_it_but_not_around_tokens(
    card: ModelCard,
) -> None:
    ends = replace(card, add_bos=True, bos_token="<|user|>", add_eos=True, embedding_size=SIZE)
    stage = Stage(ends)
    ask(stage, ["a", [97]])
    text, ids = (list(submit.prompt_token_ids) for submit in stage.submits)
    special = sorted(stage.tokenizer.special_ids, reverse=True)
    assert text == [special[0], 97, special[1]]
    assert ids == [97]


@pytest.mark.parametrize("text", ["a" * (MAX_SEQ_LEN + 1), [5] * (MAX_SEQ_LEN + 1), "a" * 10_000])
def test_a_text_that_is_too_long_is_refused(embedder: Stage, text: object) -> None:
    error = ask(embedder, ["a", text] if isinstance(text, str) else [text]).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert not embedder.submits
    ask(embedder, "a" * MAX_SEQ_LEN)
    assert embedder.submits


def test_a_failure_is_that_of_the_whole_request_and_aborts_the_rest(embedder: Stage) -> None:
    asked = ask(embedder, ["a", "b"])
    embedder.say(finish=FAILED, request=0)
    assert asked.status == 500
    assert embedder.submits[1].request_id in embedder.aborted


def test_whoever_goes_is_forgotten(embedder: Stage) -> None:
    asked = ask(embedder, ["a", "b"])
    assert asked.exchange.on_disconnect is not None
    asked.exchange.on_disconnect()
    assert embedder.aborted == [submit.request_id for submit in embedder.submits]
    assert embedder.frontend.num_in_flight == 0


def test_a_dead_engine_is_told_of(embedder: Stage) -> None:
    asked = ask(embedder, "a")
    embedder.frontend.on_engine_gone("lightning")
    for told in (asked, ask(embedder, "a")):
        assert (told.status, told.json()["error"]["type"]) == (503, "engine_dead")


def test_a_long_text_is_tokenized_in_a_thread(card: ModelCard) -> None:
    stage = Stage(replace(card, embedding_size=SIZE), off_loop_bytes_min=0)
    asked = ask(stage, "ab", encoding_format="base64")
    assert not stage.submits
    stage.run_call()
    stage.say(finish=EMBEDDED[0])
    assert asked.json()["data"][0]["embedding"] == EMBEDDED[0].embedding


def test_another_model_is_not_here(embedder: Stage) -> None:
    assert ask(embedder, "a", model="other").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ],
)
def test_a_model_that_embeds_generates_nothing(
    embedder: Stage, path: str, fields: dict[str, Any]
) -> None:
    asked = embedder.ask(path, **fields)
    assert asked.status == 404
    assert "generates no text" in asked.json()["error"]["message"]
    assert not embedder.submits


def test_a_model_that_generates_embeds_nothing(stage: Stage) -> None:
    asked = ask(stage, "a")
    assert asked.status == 404
    assert "makes no embeddings" in asked.json()["error"]["message"]
    assert not stage.submits
