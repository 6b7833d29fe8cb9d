"""Embeddings through openai's client, over real sockets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.harness import Server, wait_until
from tests.e2e.scripted import assert_settled, card, ids_of
from tests.e2e.wire import Wire
from tests.engine.embedding_models import EMBEDDING_SIZE, LAST, TRAINED_SEQ_LEN, write_decoder

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["Fire 🔥 and naïve", "天地", "a", "Fire 🔥 and naïve"]
SLOW = {"delay_ms": 600_000}


def embed(client: openai.OpenAI, texts: Any, **options: Any) -> Any:
    return client.embeddings.create(model=options.pop("model", card().name), input=texts, **options)


def test_texts_and_their_tokens_become_the_same(embedder: Server) -> None:
    with embedder.client() as client:
        answer = embed(client, TEXTS)
        vectors = [item.embedding for item in answer.data]
        assert [item.index for item in answer.data] == list(range(len(TEXTS)))
        tokens = [ids_of(text) for text in TEXTS]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
        assert vectors == [item.embedding for item in embed(client, tokens).data]
        for text, vector in zip(TEXTS, vectors, strict=True):
            # Alone, and in the numbers that the client does not ask for by itself.
            [alone] = embed(client, text, encoding_format="float").data
            assert alone.embedding == pytest.approx(vector)
            assert math.isclose(math.hypot(*vector), 1, abs_tol=1e-6)
    assert vectors[0] == vectors[3] != vectors[1]


def test_who_goes_is_forgotten_by_the_engine(embedder: Server) -> None:
    wire = Wire(embedder.port).post("/v1/embeddings", input=TEXTS, sim=SLOW)
    wait_until(lambda: embedder.num_in_engine() == len(TEXTS))
    wire.close()
    assert_settled(embedder)


def test_who_waits_too_long_is_told_so(embedder: Server) -> None:
    with Wire(embedder.port) as wire:
        wire.post("/v1/embeddings", input=TEXTS, sim=SLOW, timeout_ms=100).read_json()
        assert wire.status == 504
    assert_settled(embedder)


def test_a_model_that_embeds_generates_nothing(embedder: Server, sim: Server) -> None:
    with embedder.client() as client, pytest.raises(openai.NotFoundError, match="no text"):
        client.completions.create(model=card().name, prompt="a")
    with sim.client() as client, pytest.raises(openai.NotFoundError, match="no embeddings"):
        embed(client, "a")


def test_the_embedded_engine_embeds_where_its_model_does(tmp_path: Path) -> None:
    write_decoder(tmp_path / "small.gguf", pooling=LAST)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with Server("--model", str(tmp_path / "small.gguf"), environment=environment) as server:
        with server.client() as client:
            together = embed(client, TEXTS * 20, model="small").data
            assert {len(item.embedding) for item in together} == {EMBEDDING_SIZE}
            for item in together[:4]:
                [alone] = embed(client, TEXTS[item.index], model="small").data
                assert alone.embedding == pytest.approx(item.embedding, abs=1e-3)
            with pytest.raises(openai.BadRequestError) as caught:
                embed(client, "天" * TRAINED_SEQ_LEN, model="small")
            assert caught.value.code == "context_length_exceeded"
        assert_settled(server)


def test_whoever_waits_when_the_engine_dies_is_told_so() -> None:
    with Server("--engine", "sim", "--sim-embedding-size", "8") as server:
        with Wire(server.port) as wire:
            error = wire.post("/v1/embeddings", input="a", sim={"die_at": 0}).read_json()["error"]
            assert (wire.status, error["type"]) == (503, "engine_dead")
        assert server.wait_exit() == 70
