"""What a stored response was asked with, page by page (OpenAI API reference, "List input items").

The items are the turns of the conversation before the answer, as messages; each is named by its
place, so that a page can be asked for that begins after it.

Knows nothing of HTTP: the query comes as a mapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from fastserve.api.response_objects import conversation_of
from fastserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

# The API's.
LIMIT_MAX = 100
LIMIT_DEFAULT = 20


def input_items(record: bytes, *, response_id: str, query: Mapping[str, str]) -> bytes:
    """The list that answers a GET with this query: `limit`, `order` and `after`.

    Raises InvalidRequest.
    """
    turns = conversation_of(record)[:-1]
    items = [_item(turn, f"{response_id}_{place}") for place, turn in enumerate(turns)]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _invalid("order", "must be 'asc' or 'desc'")
    if order == "desc":
        items.reverse()
    limit = query.get("limit", str(LIMIT_DEFAULT))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= LIMIT_MAX):
        raise _invalid("limit", f"must be a number from 1 to {LIMIT_MAX}")
    if "after" in query:
        ids = [item["id"] for item in items]
        if query["after"] not in ids:
            raise _invalid("after", "is the id of no item of this response")
        items = items[ids.index(query["after"]) + 1 :]
    page = items[: int(limit)]
    return orjson.dumps(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(items),
        }
    )


def _item(turn: dict[str, object], item_id: str) -> dict[str, object]:
    role = turn["role"]
    answered = role == "assistant"
    text: dict[str, object] = {
        "type": "output_text" if answered else "input_text",
        "text": turn.get("content") or "",
    }
    if answered:
        text["annotations"] = []
    return {
        "id": item_id,
        "type": "message",
        "role": role,
        "status": "completed",
        "content": [text],
    }


def _invalid(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' {what}.", param=param, code="invalid_value")
