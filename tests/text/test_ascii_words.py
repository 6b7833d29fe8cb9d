"""Words that are looked up: the very tokens that the library makes of the same text."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastserve.text.ascii_words import WORD_CHARS_MAX, WORDS_MAX, AsciiWords
from fastserve.text.pre_tokenizers import PRE_TOKENIZERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.text.tokenizer import Tokenizer

RULES = sorted({rule: name for name, rule in PRE_TOKENIZERS.items() if name}.values())
# That cut by what this does not read; none so far.
LEFT_TO_THE_LIBRARY: set[str] = set()
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def split(pattern: str) -> dict[str, object]:
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip


def library(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer._first.encode(text, add_special_tokens=False).ids
    return ids


ASCII = "".join(map(chr, range(0x80)))
TEXTS = st.text(
    st.sampled_from(ASCII) | st.sampled_from("  \n\t'strelvdmSTRELVDM0123 .,!-_<|>aAbB")
)


@pytest.mark.parametrize("pre", RULES)
def test_the_tokens_are_those_of_the_library(
    pre: str, tokenizer_with: Callable[[str], Tokenizer], texts: list[str]
) -> None:
    tokenizer = tokenizer_with(pre)
    words = tokenizer._ascii_words
    assert (words is None) == (pre in LEFT_TO_THE_LIBRARY)
    assert words is not None
    looked_up = 0
    for text in [*texts, ASCII, *ASCII, "it's IT'S We'Ll 'sS", " a  b   c\n\n d\t", "1234567 89"]:
        ids = words.encode(text)
        if ids is not None:
            looked_up += 1
            assert ids == library(tokenizer, text), text
            assert ids == words.encode(text), "and again, from what was learnt"
    assert looked_up > 250

    @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
    @given(text=TEXTS)
    def any_text(text: str) -> None:
        ids = words.encode(text)
        assert ids is None or ids == library(tokenizer, text)

    any_text()


def test_what_is_not_all_ascii_is_left_to_the_library(tokenizer: Tokenizer) -> None:
    words = tokenizer._ascii_words
    assert words is not None
    assert words.encode("naïve") is None
    assert words.encode("") == []
    # This vocabulary has no token for some control characters, whose neighbours must not merge.
    assert words.encode("a\x04b") is None
    assert tokenizer.encode("a\x04b", parse_special=False) == library(tokenizer, "a\x04b")


def test_tokens_that_are_found_before_a_text_is_cut_are_left_to_the_library() -> None:
    words = AsciiWords.of(BYTE_LEVEL, lambda word: [len(word)], added=["<tool>", "a+b"])
    assert words is not None
    assert words.encode("a <tool") == [7]
    assert words.encode("a <tool>") is None
    assert words.encode("1a+b") is None
    assert words.encode("aab") == [3]


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        {},
        {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first"},
        BYTE_LEVEL | {"add_prefix_space": True},
        {"type": "Sequence", "pretokenizers": [split(r"\p{Han}+"), BYTE_LEVEL]},
        {"type": "Sequence", "pretokenizers": [split(r"\P{L}+"), BYTE_LEVEL]},
        {"type": "Sequence", "pretokenizers": [split(r"(a)|b"), BYTE_LEVEL]},
        {"type": "Sequence", "pretokenizers": [split(r"a$"), BYTE_LEVEL]},
        {"type": "Sequence", "pretokenizers": [split(r"[[a]&&[b]]"), BYTE_LEVEL]},
        {"type": "Sequence", "pretokenizers": [split("a") | {"invert": True}, BYTE_LEVEL]},
        {"type": "Sequence", "pretokenizers": [split("a") | {"behavior": "Removed"}, BYTE_LEVEL]},
        {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, split("a")]},
        {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, BYTE_LEVEL]},
    ],
    ids=str,
)
def test_who_cuts_in_another_way_is_left_to_the_library(pre_tokenizer: dict[str, object]) -> None:
    assert AsciiWords.of(pre_tokenizer, lambda _: []) is None


def test_digits_and_the_librarys_own_pattern_are_known() -> None:
    pre = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    state = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, BYTE_LEVEL | {"use_regex": True},
        ],
    }  # fmt: skip
    cut: list[str] = []

    def merge(word: str) -> list[int]:
        cut.append(word)
        return [1]

    for text in ("It's 12 o'clock,  isn't it?\n\n 3x", string.printable, "we'll  go"):
        words = AsciiWords.of(state, merge)
        assert words is not None
        cut.clear()
        assert words.encode(text) is not None
        # Each is asked for once.
        assert cut == list(dict.fromkeys(piece for piece, _ in pre.pre_tokenize_str(text)))


def test_what_is_kept_has_limits() -> None:
    asked: list[str] = []

    def merge(word: str) -> list[int]:
        asked.append(word)
        return [len(word)]

    words = AsciiWords.of(BYTE_LEVEL, merge)
    assert words is not None
    for length in (WORD_CHARS_MAX, WORD_CHARS_MAX + 1):
        for _ in range(2):
            assert words.encode("x" * length) == [length]
    assert len(asked) == 3
    for number in range(WORDS_MAX + 10):
        words.encode(str(number))
    assert len(words._ids) == WORDS_MAX
