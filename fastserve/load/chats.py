"""Chats to send: small ones, many, no two alike, and the same in every run."""

from __future__ import annotations

import json
import random

# Enough that a server which remembers what it has tokenized does not meet a message again soon:
# real users rarely say the same twice. The system message is the same in all, as it is in life.
NUM_REQUESTS = 4096

_SYSTEM = "You are a helpful assistant. Answer in one short paragraph."
# Common English words: a token each, more or less.
_WORDS = tuple(
    # A list literal, as the linter would have it, is a page.
    """
    about above across after again always animal answer around before began below between book boy
    carry change children city close country cut different does earth eat enough every example eye
    face family far father feet few find food form found four girl give good great group grow hand
    hard head hear help here high home house idea important keep kind land large
    """.split()  # noqa: SIM905
)
_WORDS_PER_MESSAGE = 20


def chat_bodies(
    *, model: str, tokens: int, stream: bool, number: int = NUM_REQUESTS
) -> list[bytes]:
    """Chats of two messages, about 50 tokens of prompt, no two alike. The same in every run."""
    chance = random.Random(0)
    fields = {"model": model, "max_tokens": tokens, "temperature": 0.7, "stream": stream}
    return [json.dumps({**fields, "messages": _messages(chance)}).encode() for _ in range(number)]


def _messages(chance: random.Random) -> list[dict[str, str]]:
    said = " ".join(chance.choices(_WORDS, k=_WORDS_PER_MESSAGE))
    return [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"Tell me: {said}?"},
    ]
