"""OpenAI's requests and answers, as plain dicts, and the command line that all peers have."""

from __future__ import annotations

import argparse
import time
import uuid
from dataclasses import dataclass
from typing import Any

import orjson

MODEL = "simulated"
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]}
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a peer must know of a request, and the answers to it."""

    id: str
    created: int
    tokens: int
    stream: bool
    prompt_tokens: int

    @classmethod
    def parse(cls, body: bytes) -> Chat:
        """Raises ValueError or KeyError for a body that is no request."""
        fields = orjson.loads(body)
        words = sum(len(message["content"].split()) for message in fields["messages"])
        return cls(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            tokens=int(fields["max_tokens"]),
            stream=bool(fields.get("stream", False)),
            prompt_tokens=words,
        )

    def first(self) -> bytes:
        """The event that says who speaks."""
        return self._event({"role": "assistant", "content": ""}, None)

    def text(self, word: str) -> bytes:
        return self._event({"content": word}, None)

    def finish(self) -> bytes:
        return self._event({}, "length")

    def whole(self, text: str) -> bytes:
        """The answer that is not streamed."""
        message = {"role": "assistant", "content": text}
        return orjson.dumps(
            {
                "id": self.id,
                "object": "chat.completion",
                "created": self.created,
                "model": MODEL,
                "choices": [
                    {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
                ],
                "usage": {
                    "prompt_tokens": self.prompt_tokens,
                    "completion_tokens": self.tokens,
                    "total_tokens": self.prompt_tokens + self.tokens,
                },
            }
        )

    def _event(self, delta: dict[str, Any], reason: str | None) -> bytes:
        chunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": MODEL,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
        }
        return b"data: %b\n\n" % orjson.dumps(chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    port: int
    step_s: float


def parse_arguments() -> Arguments:
    """The command line of this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    options = parser.parse_args()
    return Arguments(port=options.port, step_s=options.step_ms / 1000)
