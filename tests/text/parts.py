"""An answer's parts, as a test writes them down: neighbours joined, calls with their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastserve.text.answer import AnswerParser, Part
from fastserve.text.tool_calls.formats import TOOL_FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fastserve.text.reasoning import Thinking

SCHEMAS: dict[str, Any] = {
    "f": {
        "properties": {
            "a": {"type": "string"}, "n": {"type": "integer"}, "o": {"anyOf": [{"type": "object"}]},
        }
    },
    "get_weather": None,
    "g": None,
}  # fmt: skip

# A text, ("thought", text), or a call: (name, arguments).
Said = list[Any]


def read(parser: AnswerParser, pieces: Iterable[str]) -> Said:
    """Texts are strings, thoughts ("thought", text) and calls (name, arguments).

    Checks, in passing, that the events of calls come in order.
    """
    said: Said = []
    part: Part | None = None
    for event in [*(e for piece in pieces for e in parser.push(piece)), *parser.finish()]:
        kind, text = event
        if kind is Part.CALL_END:
            assert part in (Part.CALL, Part.ARGUMENTS)
        elif kind is Part.CALL:
            assert part not in (Part.CALL, Part.ARGUMENTS), "the one before has not ended"
            said.append((text, ""))
        elif kind is Part.ARGUMENTS:
            assert part in (Part.CALL, Part.ARGUMENTS)
            name, before = said[-1]
            said[-1] = (name, before + text)
        elif kind is part:
            last = said[-1]
            said[-1] = last + text if isinstance(last, str) else (last[0], last[1] + text)
        else:
            said.append(("thought", text) if kind is Part.REASONING else text)
        part = kind
    assert part not in (Part.CALL, Part.ARGUMENTS), "every call ends"
    return said


def of_format(name: str, *, thinking: Thinking | None = None) -> Callable[[], AnswerParser]:
    """What makes a parser for answers in that format."""

    def make() -> AnswerParser:
        return AnswerParser.of_model(tools=TOOL_FORMATS[name], schemas=SCHEMAS, thinking=thinking)

    return make


def however_sliced(make: Callable[[], AnswerParser], text: str) -> Said:
    """What is said of a text, having checked that slicing does not change it."""
    whole = read(make(), [text])
    assert read(make(), text) == whole
    for size in (2, 3, 7):
        assert read(make(), sliced(text, size)) == whole
    return whole


def sliced(text: str, size: int) -> Sequence[str]:
    """The text in pieces of that many characters."""
    return [text[at : at + size] for at in range(0, len(text), size)]
