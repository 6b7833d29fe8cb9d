"""Text of ASCII to token ids, ten times as fast as the library: words that were seen are looked up.

Byte-level BPE cuts a text into words and merges within each, so the tokens of a word depend on
nothing but the word. Cutting is done here by the tokenizer's own patterns, whose Unicode classes
are a few ranges where all is ASCII; merging is the library's, once for each word. Whoever cuts in
another way, or has tokens that are found before anything is cut, is left to the library.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fastserve.text.byte_level import BYTE_TO_CHARACTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# About 200 bytes each.
WORDS_MAX = 16_384
WORD_CHARS_MAX = 64

# What of each Unicode class is ASCII, as it stands within brackets.
_CLASSES = {
    "L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "N": "0-9",
    "P": r"!-#%-*,-/:;?@\[-\]_{}", "S": r"$+<=>\^`|~",
}  # fmt: skip
_CLASS = re.compile(r"\\p\{(\w+)\}")
# The library's own, where a tokenizer.json names no pattern (ByteLevel with use_regex).
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS = r"\p{N}"

_CHARACTERS = {byte: BYTE_TO_CHARACTER[byte] for byte in range(0x80)}


class AsciiWords:
    """Encodes what is all ASCII. `merge`: the library, for one word in its byte characters."""

    __slots__ = ("_added", "_cuts", "_ids", "_merge")

    def __init__(
        self,
        patterns: Iterable[re.Pattern[str]],
        merge: Callable[[str], Iterable[int]],
        *,
        added: Iterable[str] = (),
    ) -> None:
        self._cuts = [pattern.split for pattern in patterns]
        self._merge = merge
        self._ids: dict[str, tuple[int, ...]] = {}
        texts = [re.escape(text) for text in added]
        self._added = re.compile("|".join(texts)) if texts else None

    @classmethod
    def of(
        cls,
        pre_tokenizer: Mapping[str, Any],
        merge: Callable[[str], Iterable[int]],
        *,
        added: Iterable[str] = (),
    ) -> AsciiWords | None:
        """`pre_tokenizer` as in a tokenizer.json; None: it cuts in a way that is not known here.

        `added`: tokens that are found in a text before it is cut.
        """
        steps = list(pre_tokenizer.get("pretokenizers", [pre_tokenizer]))
        kinds = [step.get("type") for step in steps]
        if "ByteLevel" not in kinds:
            return None
        at = kinds.index("ByteLevel")
        cuts = [_cut_by(step) for step in steps[: at + 1]]
        lost = [_lost_by(step) for step in steps[at + 1 :]]
        patterns = [_compiled(text) for texts in cuts if texts is not None for text in texts]
        if None in cuts or None in lost or None in patterns:
            return None
        return cls(
            [each for each in patterns if each is not None],
            merge,
            # What has characters that vanish is better left to the library.
            added=[*added, *(each for characters in lost for each in characters or "")],
        )

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text; None where the library must be asked."""
        if not text.isascii() or (self._added is not None and self._added.search(text)):
            return None
        words = [text]
        for cut in self._cuts:
            # Of each: what lies between matches, and the matches, in turn; nothing between most.
            words = [word for piece in words for word in cut(piece) if word]
        known = self._ids
        ids: list[int] = []
        for word in words:
            ids += known.get(word) or self._learn(word)
        return ids

    def _learn(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._merge(word.translate(_CHARACTERS)))
        if len(word) <= WORD_CHARS_MAX and len(self._ids) < WORDS_MAX:
            self._ids[word] = ids
        return ids


def _cut_by(step: Mapping[str, Any]) -> list[str] | None:
    """The patterns, none or one, by which a step cuts; None if it does anything else."""
    match step:
        case {
            "type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated",
            "invert": False,
        }:  # fmt: skip
            return [pattern]
        case {"type": "Digits", "individual_digits": True}:
            return [_DIGITS]
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(by_pattern)}:
            return [_GPT_2] if by_pattern else []
        case _:
            return None


def _lost_by(step: Mapping[str, Any]) -> str | None:
    """The characters of ASCII that a step after the bytes takes away; None if it does more."""
    match step:
        case {
            "type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed",
            "invert": False,
        } if re.fullmatch(r"\[(\w|\\x\{[0-9a-f]+\})+\]", pattern):  # fmt: skip
            lost = {int(number, 16) for number in re.findall(r"\\x\{([0-9a-f]+)\}", pattern)}
            lost |= {ord(each) for each in re.sub(r"\\x\{[0-9a-f]+\}", "", pattern[1:-1])}
            return "".join(chr(byte) for byte, each in _CHARACTERS.items() if ord(each) in lost)
        case _:
            return None


def _compiled(pattern: str) -> re.Pattern[str] | None:
    """A pattern in Oniguruma's dialect for text of ASCII, in one group; None if that cannot be."""
    try:
        ascii_pattern = _in_ascii(pattern)
        # What `\\s` and case are is the same for both, of ASCII.
        if re.compile(ascii_pattern, re.ASCII).groups:
            return None
        return re.compile(f"({ascii_pattern})", re.ASCII)
    except (KeyError, re.error):
        return None


def _in_ascii(pattern: str) -> str:
    """Raises KeyError for what is not known here, or is not the same in both dialects."""
    if any(each in pattern for each in (r"\P", "[[", "[]", "[^]", "&&")):
        raise KeyError(pattern)
    made, within, at = "", False, 0
    while at < len(pattern):
        found = _CLASS.match(pattern, at)
        if found is not None:
            ranges = _CLASSES[found[1]]
            made += ranges if within else f"[{ranges}]" if ranges else "(?!)"
            at = found.end()
            continue
        character = pattern[at]
        length = 2 if character == "\\" else 1
        if length == 1:
            if character in "^$" and not within:
                raise KeyError(character)  # of a line there, of the text here
            within = character == "[" or (within and character != "]")
        made += pattern[at : at + length]
        at += length
    return made
