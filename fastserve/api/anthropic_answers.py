"""Anthropic's dialect: messages, their streams, and errors (Anthropic API reference).

A stream is one message, of one block of text or of a block for each of its parts: message_start,
content_block_start, deltas, content_block_stop, message_delta, message_stop. Each event is named,
and has its name as its type.

Hot path: `MessageChunks.text` is one JSON string and one join, like OpenAI's (chunks.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import orjson

from fastserve.api.responses import Ending, Usage, said
from fastserve.api.tools import Call, Thought
from fastserve.errors import EngineDead
from fastserve.generation import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.api.dialect import Chunks, PartChunks
    from fastserve.api.responses import Choice
    from fastserve.api.tools import Part
    from fastserve.errors import FastserveError

_dumps = orjson.dumps

# The API's word for a status. 529 is its own for "overloaded"; ours are HTTP's 429 and 503.
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_TEXT_HEAD = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
_TEXT_TAIL = b"}}\n\n"


def error_body(error: FastserveError) -> bytes:
    """The body that tells of `error`. Our code for it is where clients look for a code."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = default if isinstance(error, EngineDead) else _ERROR_TYPES.get(error.status, default)
    told: dict[str, object] = {"type": kind, "message": said(error)}
    if error.code is not None:
        told["details"] = {"error_code": error.code}
    return _dumps({"type": "error", "error": told})


def token_count(input_tokens: int) -> bytes:
    """The answer of POST /v1/messages/count_tokens."""
    return _dumps({"input_tokens": input_tokens})


class MessagesDialect:
    """POST /v1/messages. `max_tokens`: what the client allowed, were there room for it."""

    __slots__ = ("_max_tokens",)

    call_prefix: ClassVar[str] = "toolu_"
    ping: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'
    done: ClassVar[bytes] = b""

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def answer_id(self, request_id: str) -> str:
        return "msg_" + request_id

    def chunks(
        self, *, completion_id: str, created: int, model: str, index: int, prompt_tokens: int
    ) -> Chunks:
        assert index == 0, f"a message is one choice, made at {created}"
        return MessageChunks(
            message_id=completion_id,
            model=model,
            prompt_tokens=prompt_tokens,
            max_tokens=self._max_tokens,
        )

    def part_chunks(
        self, *, completion_id: str, created: int, model: str, index: int, prompt_tokens: int
    ) -> PartChunks:
        assert index == 0, f"a message is one choice, made at {created}"
        return MessagePartChunks(
            message_id=completion_id,
            model=model,
            prompt_tokens=prompt_tokens,
            max_tokens=self._max_tokens,
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
        [choice] = choices
        assert created
        ending = Ending(choice.finish_reason, choice.stop_reason, usage.completion_tokens)
        stop = _stop(ending, max_tokens=self._max_tokens, called=bool(choice.calls))
        message = _message(completion_id, model=model, prompt_tokens=usage.prompt_tokens)
        message["content"] = _blocks(choice)
        message["usage"] = _usage(usage)
        return _dumps(message | stop)

    def error_body(self, error: FastserveError) -> bytes:
        return error_body(error)

    def error_event(self, error: FastserveError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(error)


class MessageChunks:
    """The events of one message."""

    __slots__ = ("_max_tokens", "_message_id", "_model", "_prompt_tokens")

    def __init__(self, *, message_id: str, model: str, prompt_tokens: int, max_tokens: int) -> None:
        self._message_id = message_id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens

    def first(self, *, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The events before the first text: the message begins, and its one block."""
        assert prompt_token_ids is None, "this dialect cannot ask for them"
        message = _message(self._message_id, model=self._model, prompt_tokens=self._prompt_tokens)
        return _event("message_start", message=message) + _event(
            "content_block_start", index=0, content_block={"type": "text", "text": ""}
        )

    def text(self, text: str) -> bytes:
        """The event that adds `text`."""
        return b"".join((_TEXT_HEAD, _dumps(text), _TEXT_TAIL))

    def frame(self) -> tuple[bytes, bytes] | None:
        """What is before and behind the text, a JSON string, in each event of `text`."""
        return _TEXT_HEAD, _TEXT_TAIL

    def text_with(self, text: str, **_: object) -> bytes:
        """The same: this dialect cannot ask for more."""
        return self.text(text)

    def finish(self, ending: Ending, /) -> bytes:
        """The events after the last text: the block ends, why, the message ends."""
        stop = _stop(ending, max_tokens=self._max_tokens)
        usage = _usage(ending.usage(prompt_tokens=self._prompt_tokens))
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=stop, usage=usage)
            + _event("message_stop")
        )

    def usage(self, _: Usage, /) -> bytes:
        """Nothing: the finish has told it."""
        return b""


class MessagePartChunks(MessageChunks):
    """The events of a message in parts: a block begins when it is known of what type it is.

    At most one is open: the one of `_kind` and `_index`.
    """

    __slots__ = ("_called", "_index", "_kind")

    def __init__(self, *, message_id: str, model: str, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(
            message_id=message_id, model=model, prompt_tokens=prompt_tokens, max_tokens=max_tokens
        )
        self._kind = ""
        self._index = -1
        self._called = False

    def first(self, *, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The event before the first block."""
        assert prompt_token_ids is None, "this dialect cannot ask for them"
        message = _message(self._message_id, model=self._model, prompt_tokens=self._prompt_tokens)
        return _event("message_start", message=message)

    def text(self, text: str) -> bytes:
        """The events that add `text`."""
        begun = self._in_block("text", text="")
        return begun + self._delta({"type": "text_delta", "text": text})

    def frame(self) -> None:
        """None: a text may begin a block."""

    def reasoning(self, text: str, *, completion_tokens: int | None = None) -> bytes:
        """The events that add to a thought, which nobody has signed."""
        assert completion_tokens is None, "this dialect cannot ask for them"
        begun = self._in_block("thinking", thinking="", signature="")
        return begun + self._delta({"type": "thinking_delta", "thinking": text})

    def call(self, call_id: str, name: str, *, completion_tokens: int | None = None) -> bytes:
        """The events that begin a call."""
        assert completion_tokens is None, "this dialect cannot ask for them"
        self._called = True
        return self._end_block() + self._in_block("tool_use", id=call_id, name=name, input={})

    def arguments(self, piece: str, *, completion_tokens: int | None = None) -> bytes:
        """The event that adds to a call's arguments."""
        assert completion_tokens is None, "this dialect cannot ask for them"
        return self._delta({"type": "input_json_delta", "partial_json": piece})

    def end_call(self) -> bytes:
        """The event that ends a call."""
        return self._end_block()

    def finish(self, ending: Ending, /) -> bytes:
        """The events after the last part: the block ends, why, the message ends."""
        stop = _stop(ending, max_tokens=self._max_tokens, called=self._called)
        usage = _usage(ending.usage(prompt_tokens=self._prompt_tokens))
        begun = self._in_block("text", text="") if self._index < 0 else b""
        return (
            begun
            + self._end_block()
            + _event("message_delta", delta=stop, usage=usage)
            + _event("message_stop")
        )

    def _in_block(self, kind: str, **block: object) -> bytes:
        """The events after which a block of that kind is open."""
        if self._kind == kind:
            return b""
        ended = self._end_block()
        self._kind = kind
        self._index += 1
        return ended + _event(
            "content_block_start", index=self._index, content_block={"type": kind} | block
        )

    def _end_block(self) -> bytes:
        if not self._kind:
            return b""
        # The API ends a thought with its signature, and clients may wait for one.
        thought = self._kind == "thinking"
        signed = self._delta({"type": "signature_delta", "signature": ""}) if thought else b""
        self._kind = ""
        return signed + _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, object]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _blocks(choice: Choice) -> list[dict[str, object]]:
    """The content of a message: its parts in their order, or the one text that it is."""
    return [_block(part) for part in choice.parts or [choice.text]]


def _block(part: Part) -> dict[str, object]:
    match part:
        case Thought(text):
            return {"type": "thinking", "thinking": text, "signature": ""}
        case Call(id=call_id, name=name, arguments=arguments):
            return {"type": "tool_use", "id": call_id, "name": name, "input": _input(arguments)}
        case str():
            return {"type": "text", "text": part}


def _input(arguments: str) -> dict[str, object]:
    """A call's arguments as the object that they must be here; what is none becomes a member."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _dumps({"type": kind} | fields))


def _message(message_id: str, *, model: str, prompt_tokens: int) -> dict[str, object]:
    """A message as it begins: without content or end."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(Usage(prompt_tokens=prompt_tokens, completion_tokens=0)),
    }


def _usage(usage: Usage) -> dict[str, object]:
    # Clients add the four up: what was cached is not input besides. Nobody pays for keeping it.
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _stop(ending: Ending, *, max_tokens: int, called: bool = False) -> dict[str, object]:
    """Why a message ended, in the API's words."""
    if isinstance(ending.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop_reason}
    if ending.reason is FinishReason.LENGTH:
        full = ending.completion_tokens < max_tokens
        word = "model_context_window_exceeded" if full else "max_tokens"
        return {"stop_reason": word, "stop_sequence": None}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}
