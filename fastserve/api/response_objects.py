"""The dialect of OpenAI's Responses API: response objects, and streams of numbered events.

A response has an item for each part of its answer, mostly one: a message of one text. A record is
what is stored: the object, and the conversation up to its end. Streams are in response_chunks.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import orjson

from fastserve.api import responses
from fastserve.api.dialect import COMMENT
from fastserve.api.response_chunks import ResponseChunks, ResponsePartChunks
from fastserve.api.response_items import items_of, told_logprobs, turn_of
from fastserve.api.structured import text_as_told
from fastserve.generation import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastserve.api.dialect import Chunks, PartChunks
    from fastserve.api.requests import ChatRequest
    from fastserve.api.response_requests import ResponseRequest
    from fastserve.api.responses import Choice, Usage
    from fastserve.api.tools import Part
    from fastserve.errors import FastserveError

_dumps = orjson.dumps


def record_of(response: dict[str, object], conversation: list[dict[str, object]]) -> bytes:
    """What is stored of a response: two lines, for few ask for both."""
    return _dumps(response) + b"\n" + _dumps(conversation)


def response_of(record: bytes) -> bytes:
    """The response object of a record, as it was answered."""
    return record.partition(b"\n")[0]


def conversation_of(record: bytes) -> list[dict[str, object]]:
    """The turns of a record's conversation, its own answer included."""
    turns: list[dict[str, object]] = orjson.loads(record.partition(b"\n")[2])
    return turns


def deleted(response_id: str) -> bytes:
    """The answer of DELETE /v1/responses/{id}."""
    return _dumps({"id": response_id, "object": "response", "deleted": True})


class ResponseDialect:
    """One response. `keep` stores its record if it can; None: it is not to be stored."""

    __slots__ = ("_chat", "_chunks", "_keep", "_request", "_response_id")

    call_prefix: ClassVar[str] = "call_"
    ping: ClassVar[bytes] = COMMENT
    done: ClassVar[bytes] = b""

    def __init__(
        self,
        request: ResponseRequest,
        chat: ChatRequest,
        *,
        response_id: str,
        keep: Callable[[str, bytes], bool] | None,
    ) -> None:
        self._request = request
        self._chat = chat
        self._response_id = response_id
        self._keep = keep
        self._chunks: ResponseChunks | None = None

    def answer_id(self, request_id: str) -> str:
        """Its own: a client may choose a request's id, and so could not be told apart by it."""
        assert request_id
        return self._response_id

    def chunks(
        self, *, completion_id: str, created: int, model: str, index: int, prompt_tokens: int
    ) -> Chunks:
        assert (completion_id, index) == (self._response_id, 0), "a response is one choice"
        self._chunks = ResponseChunks(
            self, created=created, model=model, prompt_tokens=prompt_tokens
        )
        return self._chunks

    def part_chunks(
        self, *, completion_id: str, created: int, model: str, index: int, prompt_tokens: int
    ) -> PartChunks:
        assert (completion_id, index) == (self._response_id, 0), "a response is one choice"
        chunks = ResponsePartChunks(self, created=created, model=model, prompt_tokens=prompt_tokens)
        self._chunks = chunks
        return chunks

    def whole(
        self,
        choices: Sequence[Choice],
        *,
        completion_id: str,
        created: int,
        model: str,
        usage: Usage,
    ) -> bytes:
        [choice] = choices
        assert completion_id == self._response_id
        told = [] if choice.logprobs is None else told_logprobs(choice.logprobs)
        response = self.finished(
            choice.parts or [choice.text],
            choice.finish_reason,
            logprobs=told,
            usage=usage,
            created=created,
            model=model,
        )
        return _dumps(response)

    def error_body(self, error: FastserveError) -> bytes:
        return responses.error_body(error)

    def error_event(self, error: FastserveError) -> bytes:
        assert self._chunks is not None, "a stream has chunks"
        return self._chunks.failure(error)

    # The rest is for the chunks.

    def begun(self, *, created: int, model: str) -> dict[str, object]:
        """The object of a response that is in progress."""
        asked, chat = self._request.fields, self._chat
        return {
            "id": self._response_id,
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": model,
            "output": [],
            "parallel_tool_calls": chat.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "store": self._keep is not None,
            "temperature": chat.temperature,
            "text": text_as_told(asked.text),
            "tool_choice": asked.tool_choice,
            "tools": asked.tools,
            "top_logprobs": asked.top_logprobs,
            "top_p": chat.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def finished(
        self,
        parts: Sequence[Part],
        reason: FinishReason,
        *,
        logprobs: list[object],
        usage: Usage,
        created: int,
        model: str,
    ) -> dict[str, object]:
        """The object of a response that has ended, which is stored first if it is to be."""
        cut = reason is FinishReason.LENGTH
        status = "incomplete" if cut else "completed"
        items = items_of(parts, response_id=self._response_id, status=status, logprobs=logprobs)
        response = self.begun(created=created, model=model) | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": _usage(usage),
        }
        if self._keep is not None:
            # Instructions are of one response alone, so they are no part of the conversation.
            turns = self._chat.messages[self._request.fields.instructions is not None :]
            record = record_of(response, [*turns, turn_of(parts)])
            response["store"] = self._keep(self._response_id, record)
        return response

    @property
    def response_id(self) -> str:
        return self._response_id


def input_token_count(input_tokens: int) -> bytes:
    """The answer of POST /v1/responses/input_tokens."""
    return _dumps({"object": "response.input_tokens", "input_tokens": input_tokens})


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
