"""The chunks of a chat whose text is in parts: content, thoughts and calls of tools.

Thoughts are `reasoning_content`, as DeepSeek has it, and TensorRT-LLM. A call begins with its id
and name, and its arguments follow as pieces of JSON text (OpenAI API reference, "The chat
completion chunk object").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from fastserve.api.chunks import ChatChunks
from fastserve.api.responses import chat_finish_word

if TYPE_CHECKING:
    from fastserve.generation import FinishReason

_dumps = orjson.dumps


class ChatPartChunks(ChatChunks):
    """The chunks of one choice. `named`: the client named the function to call."""

    __slots__ = ("_calls", "_named")

    def __init__(
        self,
        *,
        completion_id: str,
        created: int,
        model: str,
        index: int,
        include_usage: bool = False,
        continuous_prompt_tokens: int | None = None,
        named: bool = False,
    ) -> None:
        super().__init__(
            completion_id=completion_id,
            created=created,
            model=model,
            index=index,
            include_usage=include_usage,
            continuous_prompt_tokens=continuous_prompt_tokens,
        )
        self._named = named
        self._calls = 0

    def reasoning(self, text: str, *, completion_tokens: int | None = None) -> bytes:
        """The event of a chunk that adds to the thoughts."""
        return self._delta(b'{"reasoning_content":%b}' % _dumps(text), completion_tokens)

    def call(self, call_id: str, name: str, *, completion_tokens: int | None = None) -> bytes:
        """The event of a chunk that begins a call."""
        self._calls += 1
        delta = (
            b'{"tool_calls":[{"index":%d,"id":%b,"type":"function",'
            b'"function":{"name":%b,"arguments":""}}]}'
        ) % (self._calls - 1, _dumps(call_id), _dumps(name))
        return self._delta(delta, completion_tokens)

    def arguments(self, piece: str, *, completion_tokens: int | None = None) -> bytes:
        """The event of a chunk that adds to the arguments of the call that has begun last."""
        delta = b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (
            self._calls - 1,
            _dumps(piece),
        )
        return self._delta(delta, completion_tokens)

    def end_call(self) -> bytes:
        """Nothing: clients see the end in what comes next."""
        return b""

    def _delta(self, delta: bytes, completion_tokens: int | None) -> bytes:
        return b'%b"delta":%b,"logprobs":null,"finish_reason":null}]%b}\n\n' % (
            self._open,
            delta,
            self._usage_so_far(completion_tokens),
        )

    def _finish_word(self, reason: FinishReason) -> str:
        return chat_finish_word(reason, called=self._calls > 0, named=self._named)
