"""Everything that is answered whole: completions, models, the version, and errors.

Answers are OpenAI's objects with vLLM's extensions `stop_reason`, `token_ids` and
`prompt_token_ids` where they were asked for. Errors are always nested in "error", also within a
stream: openai's clients recognize no other form.

Knows nothing of HTTP: the status of an error is its `status`, and the caller sends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import orjson

from fastserve.api.logprobs import TokenText, chat_logprobs, completion_logprobs
from fastserve.api.tools import Call, Thought
from fastserve.generation import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fastserve.api.tools import Part
    from fastserve.errors import FastserveError

_OWNER = "fastserve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The tokens of an exchange. `completion_tokens` is of all choices together.

    `cached_tokens` of the prompt were computed for an earlier request; None: the engine does not
    say. `reasoning_tokens` of the completion were thoughts; None: nobody looks for them.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    def as_json(self) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class Ending(NamedTuple):
    """How a choice ended, and its own numbers, which are told as in Usage.

    `reason` is STOP or LENGTH: who was aborted hears nothing, and a failure is an error event.
    `stop_reason` (vLLM's extension) is the stop string or the stop token id that ended it.
    """

    reason: FinishReason
    stop_reason: str | int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    def usage(self, *, prompt_tokens: int) -> Usage:
        """That of an exchange with this choice alone."""
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=self.reasoning_tokens,
        )


def cached_of_all(by_choice: Sequence[int | None], *, n: int) -> int | None:
    """The `cached_tokens` of an exchange, from those of its choices: n of each prompt, in order.

    The choices of a prompt find that of each other computed too, so the least of them counts.
    None: some choice ended before the engine could tell.
    """
    if len(by_choice) == 1:
        return by_choice[0]
    told = [tokens for tokens in by_choice if tokens is not None]
    if len(told) < len(by_choice):
        return None
    return sum(min(told[first : first + n]) for first in range(0, len(told), n))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished text. Choices are rendered in the order given, numbered from 0.

    `stop_reason` is the stop string or the stop token id that ended it. `token_ids` and
    `prompt_token_ids` are shown if given; in a chat all choices have the same prompt. A chat
    may have `parts` besides text: thoughts, and calls of tools. `embedding` is there instead of a
    text where that was asked for, packed.
    """

    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: Sequence[TokenText] | None = None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    parts: Sequence[Part] = ()
    embedding: str | None = None

    @property
    def reasoning(self) -> str:
        """The thoughts among the parts."""
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> list[Call]:
        """The calls among the parts."""
        return [part for part in self.parts if isinstance(part, Call)]


def chat_completion(
    choices: Sequence[Choice],
    *,
    completion_id: str,
    created: int,
    model: str,
    usage: Usage,
    named: bool = False,
) -> bytes:
    """A `chat.completion` object. `created` is in seconds since 1970.

    `named`: the client named the function to call, so that its call is no news.
    """
    answer: dict[str, object] = {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            _chat_choice(choice, index, named=named) for index, choice in enumerate(choices)
        ],
        "usage": usage.as_json(),
    }
    if choices and choices[0].prompt_token_ids is not None:
        answer["prompt_token_ids"] = list(choices[0].prompt_token_ids)
    return orjson.dumps(answer)


def completion(
    choices: Sequence[Choice], *, completion_id: str, created: int, model: str, usage: Usage
) -> bytes:
    """A `text_completion` object. `created` is in seconds since 1970."""
    return orjson.dumps(
        {
            "id": completion_id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [_completion_choice(choice, index) for index, choice in enumerate(choices)],
            "usage": usage.as_json(),
        }
    )


def finish_word(reason: FinishReason) -> str:
    """OpenAI's word for how an answer ended.

    Only STOP and LENGTH end an answer. ABORT and ERROR never come here: whoever aborted is gone,
    and a failure is an error, with its status or as an event.
    """
    assert reason in (FinishReason.STOP, FinishReason.LENGTH), reason
    return reason.value


def chat_finish_word(reason: FinishReason, *, called: bool, named: bool) -> str:
    """OpenAI's word for how a chat's answer ended.

    Calls end one with "tool_calls"; but "stop" where the function was named (as OpenAI answers, and
    so vLLM), and "length" where the answer was cut, since the last call may be, too.
    """
    calls = called and not named and reason is FinishReason.STOP
    return "tool_calls" if calls else finish_word(reason)


def models(names: Iterable[str], *, created: int, max_seq_len: int) -> bytes:
    """The one page of GET /v1/models. `max_model_len` is vLLM's name for the context, in tokens."""
    data = [_model(name, created=created, max_seq_len=max_seq_len) for name in names]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
    return orjson.dumps({"object": "list", "data": data} | ends)


def model(name: str, *, created: int, max_seq_len: int) -> bytes:
    """The object of GET /v1/models/{name}."""
    return orjson.dumps(_model(name, created=created, max_seq_len=max_seq_len))


def version(version_text: str) -> bytes:
    """The object of GET /version."""
    return orjson.dumps({"version": version_text})


def said(error: FastserveError) -> str:
    """The message of `error`, as text that JSON can carry.

    It may quote a file name or an environment that is no UTF-8, and must reach the client.
    """
    return error.message.encode(errors="replace").decode()


def error_body(error: FastserveError) -> bytes:
    """The body that tells of `error` (OpenAI API reference, "Errors")."""
    return orjson.dumps(
        {
            "error": {
                "message": said(error),
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_event(error: FastserveError) -> bytes:
    """The event that tells of `error` within a stream; nothing but its end follows."""
    return b"data: %b\n\n" % error_body(error)


def _chat_choice(choice: Choice, index: int, *, named: bool) -> dict[str, object]:
    logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs)
    rendered: dict[str, object] = {
        "index": index,
        "message": _message(choice),
        "logprobs": logprobs,
        "finish_reason": chat_finish_word(
            choice.finish_reason, called=bool(choice.calls), named=named
        ),
        "stop_reason": choice.stop_reason,
    }
    if choice.token_ids is not None:
        rendered["token_ids"] = list(choice.token_ids)
    return rendered


def _message(choice: Choice) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": choice.text, "refusal": None}
    reasoning, calls = choice.reasoning, choice.calls
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    if (reasoning or calls) and not choice.text:
        message["content"] = None
    return message


def _completion_choice(choice: Choice, index: int) -> dict[str, object]:
    logprobs = None
    if choice.logprobs is not None:
        logprobs = completion_logprobs(choice.logprobs, text_offset=0)
    rendered: dict[str, object] = {
        "index": index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": finish_word(choice.finish_reason),
        "stop_reason": choice.stop_reason,
    }
    if choice.token_ids is not None:
        rendered["token_ids"] = list(choice.token_ids)
    if choice.prompt_token_ids is not None:
        rendered["prompt_token_ids"] = list(choice.prompt_token_ids)
    return rendered


def _model(name: str, *, created: int, max_seq_len: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": _OWNER,
        "max_model_len": max_seq_len,
        # What Anthropic's clients read of a model.
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "max_input_tokens": max_seq_len,
    }
