"""What the simulated engine is told to say, and what openai's client makes of the answer.

A script is token ids of the embedded model's vocabulary. An answer is reduced to what must be the
same whether it was streamed or not, and whether it was a chat or a completion.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve.engine.model_files import describe
from fastserve.text.tokenizer import Tokenizer
from tests.e2e.harness import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import openai

    from fastserve.generation import ModelCard
    from tests.e2e.harness import Server


@cache
def card() -> ModelCard:
    """The embedded model's, as the server has it."""
    with tempfile.TemporaryDirectory() as scratch:
        return describe(None, name=None, max_seq_len=None, fallback_directory=Path(scratch))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(card().tokenizer_path, vocab_size=card().vocab_size)


def ids_of(text: str) -> list[int]:
    """The token ids of a text."""
    return tokenizer().encode(text, parse_special=False)


def tokens(*pieces: str | bytes) -> list[int]:
    """The ids of the tokens that are exactly these pieces."""
    table = tokenizer().token_bytes
    return [table.index(p.encode() if isinstance(p, str) else p) for p in pieces]


@dataclass(slots=True)
class Said:
    """One choice, and its answer's usage. `pieces` are the texts of its chunks, none empty."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    completion_tokens: int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def same(self) -> tuple[object, ...]:
        """What does not depend on how the answer was sliced."""
        return self.text, self.finish_reason, self.stop_reason, self.completion_tokens


def say(
    client: openai.OpenAI,
    token_ids: Iterable[int] | None,
    *,
    stream: bool,
    chat: bool = False,
    **options: Any,
) -> list[Said]:
    """Have these tokens said, and return what each choice of the answer was.

    The rest of the script is the option `sim`. Checks, in passing, what holds for every stream.
    """
    script = options.pop("sim", {})
    if token_ids is not None:
        script = {"token_ids": list(token_ids)} | script
    extra = options.pop("extra_body", {}) | ({"sim": script} if script else {})
    asked: dict[str, Any] = {
        "model": card().name, "max_tokens": 1000, "stream": stream, "extra_body": extra,
    } | options  # fmt: skip
    if chat:
        create: Any = client.chat.completions.create
        asked.setdefault("messages", [{"role": "user", "content": "Speak."}])
    else:
        create = client.completions.create
        asked.setdefault("prompt", "Speak")
    if not stream:
        return _whole(create(**asked), chat=chat)
    options_asked = asked.pop("stream_options", {})
    return _streamed(
        list(create(**asked, stream_options={"include_usage": True} | options_asked)), chat=chat
    )


def _whole(answer: Any, *, chat: bool) -> list[Said]:
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    return [
        Said(
            [choice.message.content if chat else choice.text],
            choice.finish_reason,
            choice.stop_reason,
            answer.usage.completion_tokens,
        )
        for choice in answer.choices
    ]


def _streamed(chunks: Sequence[Any], *, chat: bool) -> list[Said]:
    *deltas, last = chunks
    assert last.choices == []
    assert len({chunk.id for chunk in chunks}) == 1
    said: dict[int, Said] = {}
    for chunk in deltas:
        [choice] = chunk.choices
        one = said.setdefault(choice.index, Said(completion_tokens=last.usage.completion_tokens))
        assert one.finish_reason is None, "nothing follows the end of a choice"
        if text := (choice.delta.content if chat else choice.text):
            one.pieces.append(text)
        one.finish_reason = choice.finish_reason
        if one.finish_reason is not None:
            one.stop_reason = choice.stop_reason
    return [said[index] for index in range(len(said))]


def assert_settled(server: Server) -> None:
    """Nothing is in flight any more, and nothing went wrong on the way."""
    wait_until(lambda: server.num_in_engine() == 0, deadline_s=10.0)
    assert server.get("/health")[0] == 200
    assert "raceback" not in server.log, server.log
    assert " ERROR " not in server.log, server.log
