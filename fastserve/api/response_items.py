"""The items of the Responses API's output: messages, thoughts, and calls of functions.

Also the turns of a conversation that they stand for (API reference, "The response object").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.api.logprobs import chat_logprobs
from fastserve.api.tools import Call, Thought

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.api.logprobs import TokenText
    from fastserve.api.tools import Part


def part_id(part: Part, *, response_id: str, index: int) -> str:
    """The id of the item of `part`, which has that place in a response's output."""
    kind = {str: "msg", Thought: "rs", Call: "fc"}[type(part)]
    rest = response_id.removeprefix("resp_")
    return f"{kind}_{rest}{index:02x}" if index else f"{kind}_{rest}"


def begun_item(part: Part, item_id: str) -> dict[str, object]:
    """The item of a part of which there is no text yet."""
    item = item_of(part, item_id, "in_progress")
    return item if isinstance(part, Call) else item | {"content": []}


def item_of(part: Part, item_id: str, status: str) -> dict[str, object]:
    """The item of a part. Thoughts are told as they are: nobody has made a summary of them."""
    match part:
        case Thought():
            return {
                "id": item_id,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": [content_of(part)],
            }
        case Call():
            return {
                "id": item_id,
                "type": "function_call",
                "status": status,
                "call_id": part.id,
                "name": part.name,
                "arguments": part.arguments,
            }
        case str():
            return message_item(item_id, status, text_part(part, []))


def content_of(part: Part) -> dict[str, object] | None:
    """The one content of a part's item; a call has none."""
    match part:
        case Thought(text):
            return {"type": "reasoning_text", "text": text}
        case str():
            return text_part(part, [])
        case Call():
            return None


def message_item(item_id: str, status: str, *content: dict[str, object]) -> dict[str, object]:
    """A message."""
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": list(content),
    }


def text_part(text: str, logprobs: list[object]) -> dict[str, object]:
    """A message's one part."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def items_of(
    parts: Sequence[Part], *, response_id: str, status: str, logprobs: list[object]
) -> list[dict[str, object]]:
    """The items of an answer. There are `logprobs` only where it is one text.

    `status` is that of the last: what comes before it is complete.
    """
    last = len(parts) - 1
    items = [
        item_of(
            part,
            part_id(part, response_id=response_id, index=index),
            status if index == last else "completed",
        )
        for index, part in enumerate(parts)
    ]
    if logprobs:
        [text] = parts
        assert isinstance(text, str), "only text has logprobs"
        items[0]["content"] = [text_part(text, logprobs)]
    return items


def turn_of(parts: Sequence[Part]) -> dict[str, object]:
    """The answer as a turn of its conversation, as a template wants it."""
    turn: dict[str, object] = {
        "role": "assistant",
        "content": "".join(part for part in parts if isinstance(part, str)),
    }
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    if thoughts:
        turn["reasoning_content"] = thoughts
    calls = [part for part in parts if isinstance(part, Call)]
    if calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return turn


def told_logprobs(tokens: Sequence[TokenText]) -> list[object]:
    """The logprobs of tokens, as in a chat."""
    content = chat_logprobs(tokens)["content"]
    assert isinstance(content, list)
    return content
