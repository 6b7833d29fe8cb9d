"""The dialect of OpenAI's Responses API: response objects, and streams of numbered events.

A response here has one output item, a message of one text. Every event of a stream carries a
number, from 0 and without a gap, and what is complete is told again as a whole (API reference,
"Streaming events"). A record is what is stored: the object, and the conversation up to its end.

Hot path: `ResponseChunks.text` is one JSON string and one join, like those of chats (chunks.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import orjson

from fastserve.api import responses
from fastserve.api.dialect import COMMENT
from fastserve.api.logprobs import chat_logprobs
from fastserve.generation import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastserve.api.dialect import Chunks
    from fastserve.api.logprobs import TokenText
    from fastserve.api.requests import ChatRequest
    from fastserve.api.response_requests import ResponseRequest
    from fastserve.api.responses import Choice, Usage
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

    __slots__ = ("_chat", "_chunks", "_item_id", "_keep", "_request", "_response_id")

    ping: ClassVar[bytes] = COMMENT
    done: ClassVar[bytes] = b""

    def __init__(
        self,
        request: ResponseRequest,
        chat: ChatRequest,
        *,
        response_id: str,
        item_id: str,
        keep: Callable[[str, bytes], bool] | None,
    ) -> None:
        self._request = request
        self._chat = chat
        self._response_id = response_id
        self._item_id = item_id
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
        told = [] if choice.logprobs is None else _logprobs(choice.logprobs)
        response = self.finished(
            choice.text,
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
            "parallel_tool_calls": True,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "store": self._keep is not None,
            "temperature": chat.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": asked.top_logprobs,
            "top_p": chat.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def finished(
        self,
        text: str,
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
        response = self.begun(created=created, model=model) | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self.item(status, part(text, logprobs))],
            "usage": _usage(usage),
        }
        if self._keep is not None:
            # Instructions are of one response alone, so they are no part of the conversation.
            turns = self._chat.messages[self._request.fields.instructions is not None :]
            answer: dict[str, object] = {"role": "assistant", "content": text}
            record = record_of(response, [*turns, answer])
            response["store"] = self._keep(self._response_id, record)
        return response

    def item(self, status: str, *content: dict[str, object]) -> dict[str, object]:
        """The message that is the response's one output."""
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": list(content),
        }

    @property
    def item_id(self) -> str:
        return self._item_id


class ResponseChunks:
    """The events of a response, numbered."""

    __slots__ = (
        "_created",
        "_dialect",
        "_logprobs",
        "_model",
        "_next",
        "_parts",
        "_prompt_tokens",
        "_text_head",
        "_where",
    )

    def __init__(
        self, dialect: ResponseDialect, *, created: int, model: str, prompt_tokens: int
    ) -> None:
        self._dialect = dialect
        self._created = created
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._next = 0
        self._parts: list[str] = []
        self._logprobs: list[object] = []
        self._where = {"item_id": dialect.item_id, "output_index": 0, "content_index": 0}
        self._text_head = (
            b"event: response.output_text.delta\n"
            b'data: {"type":"response.output_text.delta","item_id":%b,"output_index":0,'
            b'"content_index":0,"delta":' % _dumps(dialect.item_id)
        )

    def first(self, *, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The events before the first text."""
        assert prompt_token_ids is None, "this dialect cannot ask for them"
        begun = self._dialect.begun(created=self._created, model=self._model)
        item = self._dialect.item("in_progress")
        return b"".join(
            (
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._where, part=part("", [])),
            )
        )

    def text(self, text: str) -> bytes:
        """The event that adds `text`."""
        number = self._next
        self._next = number + 1
        self._parts.append(text)
        return b'%b%b,"logprobs":[],"sequence_number":%d}\n\n' % (
            self._text_head,
            _dumps(text),
            number,
        )

    def text_with(
        self, text: str, *, logprobs: Sequence[TokenText] | None = None, **_: object
    ) -> bytes:
        """The event that adds `text` and tells the logprobs of its tokens."""
        told = _logprobs(logprobs or ())
        self._parts.append(text)
        self._logprobs += told
        return self._event("response.output_text.delta", **self._where, delta=text, logprobs=told)

    def finish(
        self,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        completion_tokens: int | None = None,
        cached_tokens: int | None = None,
    ) -> bytes:
        """The events after the last text: each thing that is complete, the innermost first."""
        assert completion_tokens is not None, f"ended by {stop_reason}"
        text = "".join(self._parts)
        usage = responses.Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
        )
        response = self._dialect.finished(
            text,
            reason,
            logprobs=self._logprobs,
            usage=usage,
            created=self._created,
            model=self._model,
        )
        status = str(response["status"])
        whole = part(text, self._logprobs)
        item = self._dialect.item(status, whole)
        return b"".join(
            (
                self._event(
                    "response.output_text.done", **self._where, text=text, logprobs=self._logprobs
                ),
                self._event("response.content_part.done", **self._where, part=whole),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{status}", response=response),
            )
        )

    def usage(self, _: Usage, /) -> bytes:
        """Nothing: the finish has told it."""
        return b""

    def failure(self, error: FastserveError) -> bytes:
        """The last two events of a stream that fails: the error, and what has become of it all."""
        message = responses.said(error)
        code = "invalid_prompt" if error.status == 400 else "server_error"
        failed = self._dialect.begun(created=self._created, model=self._model) | {
            "status": "failed",
            "error": {"code": code, "message": message},
            "store": False,
        }
        return self._event(
            "error", code=error.code or error.type, message=message, param=error.param
        ) + self._event("response.failed", response=failed)

    def _event(self, kind: str, **fields: object) -> bytes:
        number = self._next
        self._next = number + 1
        data = _dumps({"type": kind} | fields | {"sequence_number": number})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def part(text: str, logprobs: list[object]) -> dict[str, object]:
    """A message's one part."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(tokens: Sequence[TokenText]) -> list[object]:
    content = chat_logprobs(tokens)["content"]
    assert isinstance(content, list)
    return content


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
