"""The formats of tool calls by their names, and what each needs of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastserve.text.tool_calls.hermes import CLOSE, OPEN, hermes
from fastserve.text.tool_calls.llama3_json import PYTHON_TAG, llama3_json
from fastserve.text.tool_calls.mistral import ARGS, CALL_ID, TOOL_CALLS, mistral
from fastserve.text.tool_calls.pythonic import END, START, pythonic
from fastserve.text.tool_calls.qwen3_coder import qwen3_coder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from fastserve.text.tool_calls.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes calls. `read` reads an answer, given the tools: their schemas by name.

    `shown`: the tokens that it goes by, which a vocabulary may count as control tokens, and hide.
    `id_chars`: how long the ids of calls are in prompts, where templates insist on it.
    """

    read: Callable[[Source, Mapping[str, Any]], Generator[None]]
    shown: tuple[str, ...] = ()
    id_chars: int | None = None


_HERMES = ToolFormat(read=hermes, shown=(OPEN, CLOSE))

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _HERMES,
    "llama3_json": ToolFormat(read=llama3_json, shown=(PYTHON_TAG,)),
    "mistral": ToolFormat(read=mistral, shown=(TOOL_CALLS, CALL_ID, ARGS), id_chars=9),
    "pythonic": ToolFormat(read=pythonic, shown=(START, END)),
    "qwen": _HERMES,
    "qwen3_coder": ToolFormat(read=qwen3_coder, shown=(OPEN, CLOSE)),
}
