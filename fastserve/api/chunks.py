"""The events of a stream: `data: {...}` and a blank line each, as OpenAI streams them.

Hot path. Everything that is the same in all chunks of a choice is rendered when its stream begins,
so that `text` costs one JSON string and one join, about 0.2 us, where dumping the whole object
costs ten times that. What few requests ask for (logprobs, token ids, running usage) goes through
`text_with`.

Knows nothing of sockets or of what HTTP puts around an event (RFC 9112, 7.1).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

import orjson

from fastserve.api.logprobs import chat_logprobs, completion_logprobs
from fastserve.api.responses import Usage, finish_word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.api.logprobs import TokenText
    from fastserve.api.responses import Ending
    from fastserve.generation import FinishReason

DONE = b"data: [DONE]\n\n"

_dumps = orjson.dumps


def json_string(text: str) -> bytes:
    """`text` as it stands in an event."""
    return _dumps(text)


class _Chunks:
    """The chunks of one choice, as far as both dialects have them in common.

    Events of one choice are made in the order first, text..., finish; `usage` is of the exchange,
    and any choice can make it.
    """

    __slots__ = (
        "_prefix_bytes",
        "_prompt_tokens",
        "_text_head",
        "_text_offset",
        "_text_tail",
        "_usage",
    )

    # The object's name; what begins a text, ends it, and stands for none.
    _OBJECT: ClassVar[bytes]
    _TEXT: ClassVar[bytes]
    _TEXT_END: ClassVar[bytes]
    _NO_TEXT: ClassVar[bytes]

    def __init__(
        self,
        *,
        completion_id: str,
        created: int,
        model: str,
        index: int,
        include_usage: bool = False,
        continuous_prompt_tokens: int | None = None,
    ) -> None:
        """`created` is in seconds since 1970; `index` numbers the choice within the exchange.

        `continuous_prompt_tokens` is the length of the prompt if every chunk shall carry the usage
        so far. Then `text` is not for it, and the others want `completion_tokens`.
        """
        prefix = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            _dumps(completion_id),
            self._OBJECT,
            created,
            _dumps(model),
        )
        self._prefix_bytes = len(prefix)
        self._prompt_tokens = continuous_prompt_tokens
        self._usage = b',"usage":null' if include_usage else b""
        self._text_head = b'%b{"index":%d,%b' % (prefix, index, self._TEXT)
        self._text_tail = _text_tail(self._TEXT_END, self._usage)
        # The characters whose logprobs have been told: where the next token begins.
        self._text_offset = 0

    # Thousands of streams are in flight: what begins every event is kept once.

    @property
    def _prefix(self) -> bytes:
        return self._text_head[: self._prefix_bytes]

    @property
    def _open(self) -> bytes:
        return self._text_head.removesuffix(self._TEXT)

    def text(self, text: str) -> bytes:
        """The event of a chunk that adds `text`."""
        return b"".join((self._text_head, _dumps(text), self._text_tail))

    def frame(self) -> tuple[bytes, bytes] | None:
        """What is before and behind the text, a JSON string, in each event of `text`."""
        return self._text_head, self._text_tail

    def text_with(
        self,
        text: str,
        *,
        logprobs: Sequence[TokenText] | None = None,
        token_ids: Sequence[int] | None = None,
        completion_tokens: int | None = None,
    ) -> bytes:
        """The event of a chunk that adds `text`, and tells what else was asked for.

        `logprobs` and `token_ids` are of the tokens of this chunk; `completion_tokens` counts all
        tokens of the choice up to the end of this chunk.
        """
        shown = b"null" if logprobs is None else _dumps(self._logprobs(logprobs))
        ids = b"" if token_ids is None else b',"token_ids":' + _dumps(list(token_ids))
        return b'%b%b%b,"logprobs":%b,"finish_reason":null%b}]%b}\n\n' % (
            self._text_head,
            _dumps(text),
            self._TEXT_END,
            shown,
            ids,
            self._usage_so_far(completion_tokens),
        )

    def finish(self, ending: Ending, /) -> bytes:
        """The event of the choice's last chunk, which adds no text."""
        return b'%b%b,"logprobs":null,"finish_reason":"%b","stop_reason":%b}]%b}\n\n' % (
            self._open,
            self._NO_TEXT,
            self._finish_word(ending.reason).encode(),
            _dumps(ending.stop_reason),
            self._usage_so_far(ending.completion_tokens),
        )

    def usage(self, usage: Usage) -> bytes:
        """The event of an exchange's last chunk: no choices, and the usage of them all."""
        return b'%b],"usage":%b}\n\n' % (self._prefix, _dumps(usage.as_json()))

    def _finish_word(self, reason: FinishReason) -> str:
        return finish_word(reason)

    def _usage_so_far(self, completion_tokens: int | None) -> bytes:
        if self._prompt_tokens is None:
            return self._usage
        assert completion_tokens is not None, "every chunk of this stream carries the usage so far"
        usage = Usage(prompt_tokens=self._prompt_tokens, completion_tokens=completion_tokens)
        return b',"usage":' + _dumps(usage.as_json())

    if TYPE_CHECKING:  # each dialect has its own

        def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]: ...


class ChatChunks(_Chunks):
    """The chunks of one choice of a chat (`chat.completion.chunk`)."""

    __slots__ = ()

    _OBJECT = b"chat.completion.chunk"
    _TEXT = b'"delta":{"content":'
    _TEXT_END = b"}"
    _NO_TEXT = b'"delta":{}'

    def first(self, *, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The event of the choice's first chunk: who speaks, and no text yet."""
        return (
            b'%b"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            b"%b%b}\n\n"
        ) % (self._open, self._usage_so_far(0), _prompt_token_ids(prompt_token_ids))

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]:
        return chat_logprobs(tokens)


class CompletionChunks(_Chunks):
    """The chunks of one choice of a completion (`text_completion`)."""

    __slots__ = ()

    _OBJECT = b"text_completion"
    _TEXT = b'"text":'
    _TEXT_END = b""
    _NO_TEXT = b'"text":""'

    def first(self, *, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The event of a chunk that tells the prompt's token ids, if that was asked for."""
        if prompt_token_ids is None:
            return b""
        return b'%b%b,"logprobs":null,"finish_reason":null%b}]%b}\n\n' % (
            self._open,
            self._NO_TEXT,
            _prompt_token_ids(prompt_token_ids),
            self._usage_so_far(0),
        )

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]:
        offset = self._text_offset
        self._text_offset += sum(token.num_characters for token in tokens)
        return completion_logprobs(tokens, text_offset=offset)


@functools.cache
def _text_tail(text_end: bytes, usage: bytes) -> bytes:
    return b'%b,"logprobs":null,"finish_reason":null}]%b}\n\n' % (text_end, usage)


def _prompt_token_ids(ids: Sequence[int] | None) -> bytes:
    return b"" if ids is None else b',"prompt_token_ids":' + _dumps(list(ids))
