"""The events of a response's stream, numbered from 0 without a gap.

What is complete is told again as a whole, the innermost first (API reference, "Streaming events").
A plain response is one message, which begins at once. One in parts has an item for each thought,
text and call, which begins when it is known what it is, and is complete when another begins.

Hot path: `ResponseChunks.text` is one JSON string and one join, like those of chats (chunks.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from fastserve.api import responses
from fastserve.api.response_items import (
    begun_item,
    content_of,
    item_of,
    message_item,
    part_id,
    text_part,
    told_logprobs,
)
from fastserve.api.tools import Call, Part, Thought
from fastserve.generation import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.api.logprobs import TokenText
    from fastserve.api.response_objects import ResponseDialect
    from fastserve.api.responses import Ending, Usage
    from fastserve.errors import FastserveError

_dumps = orjson.dumps


class ResponseChunks:
    """The events of a response, numbered."""

    __slots__ = (
        "_created",
        "_dialect",
        "_item_id",
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
        self._item_id = part_id("", response_id=dialect.response_id, index=0)
        self._where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._text_head = (
            b"event: response.output_text.delta\n"
            b'data: {"type":"response.output_text.delta","item_id":%b,"output_index":0,'
            b'"content_index":0,"delta":' % _dumps(self._item_id)
        )

    def first(self, *, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The events before the first text."""
        assert prompt_token_ids is None, "this dialect cannot ask for them"
        begun = self._dialect.begun(created=self._created, model=self._model)
        item = message_item(self._item_id, "in_progress")
        return b"".join(
            (
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._where, part=text_part("", [])),
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

    def frame(self) -> None:
        """None: each event has its number, and the whole text is told again in the end."""

    def text_with(
        self, text: str, *, logprobs: Sequence[TokenText] | None = None, **_: object
    ) -> bytes:
        """The event that adds `text` and tells the logprobs of its tokens."""
        told = told_logprobs(logprobs or ())
        self._parts.append(text)
        self._logprobs += told
        return self._event("response.output_text.delta", **self._where, delta=text, logprobs=told)

    def finish(self, ending: Ending, /) -> bytes:
        """The events after the last text: each thing that is complete, the innermost first."""
        text = "".join(self._parts)
        response = self._dialect.finished(
            [text],
            ending.reason,
            logprobs=self._logprobs,
            usage=ending.usage(prompt_tokens=self._prompt_tokens),
            created=self._created,
            model=self._model,
        )
        status = str(response["status"])
        whole = text_part(text, self._logprobs)
        item = message_item(self._item_id, status, whole)
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


class ResponsePartChunks(ResponseChunks):
    """The events of a response in parts. There are no logprobs: not every token is text.

    `_open` is the part whose item has begun and is not complete, as far as it was known when it
    began; `_parts` is the text that it has since; `_done` are the parts before it.
    """

    __slots__ = ("_done", "_open")

    def __init__(
        self, dialect: ResponseDialect, *, created: int, model: str, prompt_tokens: int
    ) -> None:
        super().__init__(dialect, created=created, model=model, prompt_tokens=prompt_tokens)
        self._done: list[Part] = []
        self._open: Part | None = None

    def first(self, *, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The events before the first item."""
        assert prompt_token_ids is None, "this dialect cannot ask for them"
        begun = self._dialect.begun(created=self._created, model=self._model)
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def text(self, text: str) -> bytes:
        """The events that add `text`."""
        begun = b"" if isinstance(self._open, str) else self._begin("")
        self._parts.append(text)
        delta = self._event(
            "response.output_text.delta", **self._place, content_index=0, delta=text, logprobs=[]
        )
        return begun + delta

    def text_with(self, text: str, **_: object) -> bytes:
        """The same: there is no more to tell."""
        return self.text(text)

    def reasoning(self, text: str, *, completion_tokens: int | None = None) -> bytes:
        """The events that add to thoughts."""
        assert completion_tokens is None, "this dialect cannot ask for them"
        begun = b"" if isinstance(self._open, Thought) else self._begin(Thought(""))
        self._parts.append(text)
        delta = self._event(
            "response.reasoning_text.delta", **self._place, content_index=0, delta=text
        )
        return begun + delta

    def call(self, call_id: str, name: str, *, completion_tokens: int | None = None) -> bytes:
        """The events that begin a call."""
        assert completion_tokens is None, "this dialect cannot ask for them"
        return self._begin(Call(id=call_id, name=name, arguments=""))

    def arguments(self, piece: str, *, completion_tokens: int | None = None) -> bytes:
        """The event that adds to a call's arguments."""
        assert completion_tokens is None, "this dialect cannot ask for them"
        self._parts.append(piece)
        return self._event("response.function_call_arguments.delta", **self._place, delta=piece)

    def end_call(self) -> bytes:
        """Nothing: whether a call is complete is only known from what follows it."""
        return b""

    def finish(self, ending: Ending, /) -> bytes:
        """The events after the last part."""
        begun = b"" if self._open is not None else self._begin("")
        status = "incomplete" if ending.reason is FinishReason.LENGTH else "completed"
        ended = self._end(status)
        response = self._dialect.finished(
            self._done,
            ending.reason,
            logprobs=[],
            usage=ending.usage(prompt_tokens=self._prompt_tokens),
            created=self._created,
            model=self._model,
        )
        return begun + ended + self._event(f"response.{status}", response=response)

    @property
    def _place(self) -> dict[str, object]:
        """Where in the response the open item is."""
        index = len(self._done)
        assert self._open is not None, "an item has begun"
        return {
            "item_id": part_id(self._open, response_id=self._dialect.response_id, index=index),
            "output_index": index,
        }

    def _begin(self, part: Part) -> bytes:
        """The events after which the item of `part` is the open one."""
        ended = self._end("completed")
        self._open = part
        place = self._place
        item = begun_item(part, str(place["item_id"]))
        added = self._event(
            "response.output_item.added", output_index=place["output_index"], item=item
        )
        inner = content_of(part)
        if inner is not None:
            added += self._event(
                "response.content_part.added", **place, content_index=0, part=inner
            )
        return ended + added

    def _end(self, status: str) -> bytes:
        """The events after which no item is open."""
        if self._open is None:
            return b""
        place = self._place
        part, done = self._told(self._open, "".join(self._parts), place)
        inner = content_of(part)
        if inner is not None:
            done += self._event("response.content_part.done", **place, content_index=0, part=inner)
        item = item_of(part, str(place["item_id"]), status)
        self._parts = []
        self._open = None
        self._done.append(part)
        return done + self._event(
            "response.output_item.done", output_index=place["output_index"], item=item
        )

    def _told(self, part: Part, text: str, place: dict[str, object]) -> tuple[Part, bytes]:
        """The part with its text, and the event that tells it as a whole."""
        match part:
            case Thought():
                kind = "response.reasoning_text.done"
                return Thought(text), self._event(kind, **place, content_index=0, text=text)
            case Call(id=call_id, name=name):
                kind = "response.function_call_arguments.done"
                call = Call(id=call_id, name=name, arguments=text)
                return call, self._event(kind, **place, name=name, arguments=text)
            case str():
                kind = "response.output_text.done"
                return text, self._event(kind, **place, content_index=0, text=text, logprobs=[])
