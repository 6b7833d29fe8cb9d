"""What a dialect is: how the answers to one request look, and OpenAI's two oldest.

A dialect is made for each request, of what the request asked for, and is then told of the answer:
by `whole` at its end, or by the `chunks` of each choice as it comes. So the path of a token knows
no dialect: it calls `Chunks.text`, whosever that is.

Pure: ids, times and counts are passed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from fastserve.api import responses
from fastserve.api.chat_parts import ChatPartChunks
from fastserve.api.chunks import DONE, ChatChunks, CompletionChunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.api.logprobs import TokenText
    from fastserve.api.requests import ChatRequest, GenerationRequest
    from fastserve.api.responses import Choice, Ending, Usage
    from fastserve.errors import FastserveError

# A comment (WHATWG HTML 9.2): keeps a stream open, and means nothing to any client.
COMMENT = b": ping\n\n"


class Chunks(Protocol):
    """The events of one choice, made in the order first, text..., finish; bytes may be empty."""

    def first(self, *, prompt_token_ids: Sequence[int] | None = None) -> bytes: ...

    def text(self, text: str) -> bytes: ...

    def frame(self) -> tuple[bytes, bytes] | None:
        """What is before and behind the text, a JSON string, in each event of `text`.

        None where no two are alike.
        """

    def text_with(
        self,
        text: str,
        *,
        logprobs: Sequence[TokenText] | None = None,
        token_ids: Sequence[int] | None = None,
        completion_tokens: int | None = None,
    ) -> bytes: ...

    def finish(self, ending: Ending, /) -> bytes: ...

    def usage(self, usage: Usage, /) -> bytes: ...


class PartChunks(Chunks, Protocol):
    """The events of one choice whose text is in parts: thoughts, content, and calls of tools.

    A call is made in the order call, arguments..., end_call. `completion_tokens` as in `text_with`.
    """

    def reasoning(self, text: str, *, completion_tokens: int | None = None) -> bytes: ...

    def call(self, call_id: str, name: str, *, completion_tokens: int | None = None) -> bytes: ...

    def arguments(self, piece: str, *, completion_tokens: int | None = None) -> bytes: ...

    def end_call(self) -> bytes: ...


class Dialect(Protocol):
    """How the answers to one request look.

    `ping` keeps a stream open that has begun; `done` follows the last event of all choices.
    """

    ping: ClassVar[bytes]
    done: ClassVar[bytes]

    def answer_id(self, request_id: str) -> str:
        """The id of the answer to the exchange of that id."""

    def chunks(
        self, *, completion_id: str, created: int, model: str, index: int, prompt_tokens: int
    ) -> Chunks:
        """What renders choice `index`, whose own prompt has that many tokens."""

    def whole(
        self,
        choices: Sequence[Choice],
        *,
        completion_id: str,
        created: int,
        model: str,
        usage: Usage,
    ) -> bytes:
        """The body of an answer that is not streamed."""

    def error_body(self, error: FastserveError) -> bytes:
        """The body that tells of `error`, where nothing has been said yet."""

    def error_event(self, error: FastserveError) -> bytes:
        """The event that tells of `error` within a stream, of which it is the last."""


class PartDialect(Dialect, Protocol):
    """A dialect whose answers can be in parts. `call_prefix` begins the ids of calls."""

    call_prefix: ClassVar[str]

    def part_chunks(
        self, *, completion_id: str, created: int, model: str, index: int, prompt_tokens: int
    ) -> PartChunks:
        """What renders choice `index`, as `chunks` does, if it is in parts."""


class _OpenAI:
    """What chats and completions have in common."""

    __slots__ = ("_request",)

    ping: ClassVar[bytes] = COMMENT
    done: ClassVar[bytes] = DONE
    _PREFIX: ClassVar[str]

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request

    def answer_id(self, request_id: str) -> str:
        return self._PREFIX + request_id

    def error_body(self, error: FastserveError) -> bytes:
        return responses.error_body(error)

    def error_event(self, error: FastserveError) -> bytes:
        return responses.error_event(error)


class ChatDialect(_OpenAI):
    """POST /v1/chat/completions."""

    __slots__ = ("_named",)

    call_prefix: ClassVar[str] = "call_"
    _PREFIX = "chatcmpl-"

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request)
        self._named = request.tool_choice.mode == "named"

    def chunks(
        self, *, completion_id: str, created: int, model: str, index: int, prompt_tokens: int
    ) -> Chunks:
        return ChatChunks(
            completion_id=completion_id,
            created=created,
            model=model,
            index=index,
            include_usage=self._request.include_usage,
            continuous_prompt_tokens=prompt_tokens if self._request.continuous_usage else None,
        )

    def part_chunks(
        self, *, completion_id: str, created: int, model: str, index: int, prompt_tokens: int
    ) -> PartChunks:
        return ChatPartChunks(
            completion_id=completion_id,
            created=created,
            model=model,
            index=index,
            include_usage=self._request.include_usage,
            continuous_prompt_tokens=prompt_tokens if self._request.continuous_usage else None,
            named=self._named,
        )

    def whole(
        self,
        choices: Sequence[Choice],
        *,
        completion_id: str,
        created: int,
        model: str,
        usage: Usage,
    ) -> bytes:
        return responses.chat_completion(
            choices,
            completion_id=completion_id,
            created=created,
            model=model,
            usage=usage,
            named=self._named,
        )


class CompletionDialect(_OpenAI):
    """POST /v1/completions."""

    __slots__ = ()

    _PREFIX = "cmpl-"

    def chunks(
        self, *, completion_id: str, created: int, model: str, index: int, prompt_tokens: int
    ) -> Chunks:
        return CompletionChunks(
            completion_id=completion_id,
            created=created,
            model=model,
            index=index,
            include_usage=self._request.include_usage,
            continuous_prompt_tokens=prompt_tokens if self._request.continuous_usage else None,
        )

    def whole(
        self,
        choices: Sequence[Choice],
        *,
        completion_id: str,
        created: int,
        model: str,
        usage: Usage,
    ) -> bytes:
        return responses.completion(
            choices, completion_id=completion_id, created=created, model=model, usage=usage
        )
