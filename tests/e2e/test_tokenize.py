"""Texts and tokens over real sockets: what is tokenized is what a request is charged for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.scripted import card, ids_of, tokenizer
from tests.e2e.wire import Wire

if TYPE_CHECKING:
    from tests.e2e.harness import Server

TEXT = "Fire 🔥 and naïve 天地\n\tend"
MESSAGES: Any = [
    {"role": "system", "content": "Be <|im_end|> brief."},
    {"role": "user", "content": TEXT},
]


def post(server: Server, path: str, **fields: Any) -> Any:
    with Wire(server.port) as wire:
        answer = wire.post(path, **fields).read_json()
        assert wire.status == 200, answer
        return answer


def test_a_text_comes_back_from_its_tokens(sim: Server) -> None:
    for name in ("prompt", "content"):
        answer = post(sim, "/tokenize", **{name: TEXT})
        assert answer["tokens"] == ids_of(TEXT)
        assert answer["count"] == len(ids_of(TEXT))
        assert answer["max_model_len"] == card().max_seq_len
        back = post(sim, "/detokenize", tokens=answer["tokens"])
        assert back == {"prompt": TEXT, "content": TEXT}


def test_the_strings_are_the_bytes_of_the_tokens(sim: Server) -> None:
    answer = post(sim, "/tokenize", content=TEXT, with_pieces=True)
    pieces = [each["piece"] for each in answer["tokens"]]
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces) == TEXT.encode()
    # The flame is tokens that are no text by themselves.
    assert any(isinstance(piece, list) for piece in pieces)


@pytest.mark.parametrize("chat", [True, False])
def test_a_request_is_charged_what_was_told(sim: Server, *, chat: bool) -> None:
    with sim.client() as client:
        if chat:
            told = post(sim, "/tokenize", messages=MESSAGES)
            usage = client.chat.completions.create(
                model=card().name, messages=MESSAGES, max_tokens=1
            ).usage
        else:
            told = post(sim, "/tokenize", prompt=TEXT)
            usage = client.completions.create(model=card().name, prompt=TEXT, max_tokens=1).usage
    assert usage is not None
    assert told["count"] == usage.prompt_tokens
    # What a user wrote is text, also where it reads as a control token.
    control = [token for token in told["tokens"] if token in tokenizer().special_ids]
    assert len(control) == (5 if chat else 0)


def test_one_model_is_found_by_its_name(sim: Server) -> None:
    with sim.client() as client:
        [listed] = client.models.list().data
        assert client.models.retrieve(listed.id) == listed
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("another/model")
    assert caught.value.code == "model_not_found"
