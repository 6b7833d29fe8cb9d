"""A model with a vocabulary of SentencePiece's: from its GGUF file to openai's client and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.e2e.harness import Server
from tests.e2e.wire import Wire
from tests.engine.embedding_models import write_decoder
from tests.text.sentencepiece_vocabulary import BOS, INST, add_to, vocabulary

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[INST] {{ message.content }} [/INST]{% endfor %}"
)
# Random weights say all sorts of pieces: bytes of half a character among them.
ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 2.0, "extra_body": {"ignore_eos": True}}


def test_it_is_asked_and_answers(tmp_path: Path) -> None:
    def add(writer: Any) -> int:
        writer.add_chat_template(TEMPLATE)
        return add_to(writer)

    write_decoder(tmp_path / "small.gguf", pooling=None, add_vocabulary=add)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with Server("--model", str(tmp_path / "small.gguf"), environment=environment) as server:
        with Wire(server.port) as wire:
            messages = [{"role": "user", "content": "[INST] hi <s> ☃"}]
            told = wire.post("/tokenize", messages=messages).read_json()["tokens"]
        tokens, _, _ = vocabulary()
        # One of the template's, and none of the user's; what has no token is bytes.
        assert told[:2] == [BOS, INST]
        assert BOS not in told[1:]
        assert INST not in told[2:]
        snowman = [tokens.index(f"<0x{byte:02X}>") for byte in "☃".encode()]
        assert any(told[at : at + 3] == snowman for at in range(len(told)))
        with server.client() as client:
            for seed in range(20):
                ask: Any = {"model": "small", "messages": messages, "seed": seed} | ASKED
                whole = client.chat.completions.create(**ask)
                stream = client.chat.completions.create(stream=True, **ask)
                said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                assert said == whole.choices[0].message.content
                assert whole.usage is not None
                assert whole.usage.prompt_tokens == len(told)
                assert whole.usage.completion_tokens == ASKED["max_tokens"]
