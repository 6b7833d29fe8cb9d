"""Which parts of a prompt are control tokens, and which only look like them.

A chat template writes "<|im_start|>" to open a turn. A user who writes the same characters must
not be able to: in what a user says they are text. But the template's output is one string, so
before rendering, every such look-alike in the messages is broken by a character that no text can
hold (a lone surrogate); in the output, control tokens are what is still whole, and the breaking
characters are taken out again.

Knows nothing of templates (chat_template.py) or vocabularies (tokenizer.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from fastserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

JSONT = TypeVar("JSONT")

_SPACES = re.compile(r"\s+")

# JSON parsers and UTF-8 refuse it, so it never comes from a client.
GUARD = "\udfff"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlToken:
    """An entry of `added_tokens` with `special`. The flags are those of `tokenizer.json`.

    `lstrip`, `rstrip`: spaces before or after it belong to it. `single_word`: not within a word.
    """

    token_id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class ControlTokens:
    """Finds control tokens in rendered prompts, and breaks them in what users say."""

    __slots__ = (
        "_beginnings",
        "_by_text",
        "_longest",
        "_lookalike",
        "_pattern",
        "_plain",
        "_suspicious",
    )

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        self._by_text = {token.text: token for token in tokens if token.text}
        texts = self._by_text.keys()
        # All of them are as plain as that in most vocabularies, and then splitting is simple.
        self._plain = not any(
            token.lstrip or token.rstrip or token.single_word for token in self._by_text.values()
        )
        any_token = _longest_of(texts) if texts else r"(?!)"
        # Most of what is said has none of the characters with which control tokens begin.
        firsts = "".join(re.escape(first) for first in {text[0] for text in texts})
        self._suspicious = re.compile(f"[{firsts}{GUARD}]")
        self._pattern = re.compile(f"(?:{any_token})(?!{GUARD})")
        self._lookalike = re.compile(f"(?={any_token})(.)", re.DOTALL)
        self._beginnings = frozenset(text[:n] for text in texts for n in range(1, len(text)))
        self._longest = max(map(len, texts), default=0)

    def split(self, text: str) -> list[str | int]:
        """The text as its control tokens (ids) and what lies between them (text, never empty).

        The leftmost match wins, then the longest. Guards are taken out of the text.
        """
        parts: list[str | int] = []
        end = 0
        for match in self._pattern.finditer(text):
            token = self._by_text[match[0]]
            start = match.start()
            if start < end or (token.single_word and _within_word(text, start, match.end())):
                continue
            between = text[end:start]
            if not self._plain and token.lstrip:
                between = between.rstrip()
            _append(parts, between)
            parts.append(token.token_id)
            end = match.end()
            if not self._plain and token.rstrip:
                end = _end_of_spaces(text, end)
        _append(parts, text[end:])
        return parts

    def guard(self, value: JSONT) -> JSONT:
        """A copy of a JSON value in which no string, alone or joined to others, reads as control.

        Raises InvalidRequest for a string with a lone surrogate, which is no Unicode text, and for
        a value that is nested deeper than Python recurses.
        """
        try:
            return cast("JSONT", self._guarded(value))
        except RecursionError as error:
            raise InvalidRequest("a message or a tool is nested too deeply") from error

    def _guarded(self, value: object) -> object:
        search = self._suspicious.search
        if isinstance(value, str):
            return value if search(value) is None else self._guard_text(value)
        if isinstance(value, dict):
            # Each message is one, and nearly all in it are strings that need nothing.
            return {
                key if search(key) is None else self._guard_text(key): (
                    item if type(item) is str and search(item) is None else self._guarded(item)
                )
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._guarded(item) for item in value]
        return value

    def _guard_text(self, text: str) -> str:
        if GUARD in text:
            raise InvalidRequest("a message contains a lone surrogate, which is not valid Unicode")
        guarded = self._lookalike.sub(rf"\1{GUARD}", text)
        # What ends as a control token begins may be completed by what the template puts next. The
        # template may also strip it first.
        bare = guarded.rstrip()
        tail = len(bare)
        for length in range(1, min(self._longest, tail + 1)):
            if bare[tail - length :] in self._beginnings:
                guarded = f"{guarded[: tail - length + 1]}{GUARD}{guarded[tail - length + 1 :]}"
        return guarded


def without_guards(text: str) -> str:
    """The text as the user and the template wrote it."""
    return text.replace(GUARD, "")


def _append(parts: list[str | int], text: str) -> None:
    if text:
        parts.append(without_guards(text))


def _within_word(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start], text[end : end + 1]
    return bool(re.match(r"\w", before) or re.match(r"\w", after))


def _end_of_spaces(text: str, start: int) -> int:
    spaces = _SPACES.match(text, start)
    return spaces.end() if spaces else start


def _longest_of(texts: Iterable[str]) -> str:
    """A pattern of alternatives, as a tree: the time for one position does not grow with them."""
    texts = list(texts)
    common = _common_beginning(min(texts), max(texts))
    branches: dict[str, list[str]] = {}
    for text in texts:
        rest = text[len(common) :]
        branches.setdefault(rest[:1], []).append(rest)
    ends_here = branches.pop("", None)
    if not branches:
        return re.escape(common)
    alternatives = "|".join(map(_longest_of, branches.values()))
    return f"{re.escape(common)}(?:{alternatives}){'?' if ends_here else ''}"


def _common_beginning(first: str, last: str) -> str:
    """What all texts of a sorted list begin with, by its first and its last."""
    length = 0
    for one, other in zip(first, last, strict=False):
        if one != other:
            break
        length += 1
    return first[:length]
