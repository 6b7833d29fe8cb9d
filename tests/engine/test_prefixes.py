"""Which kept beginning is found, and which are given up for room."""

from __future__ import annotations

import numpy as np
import pytest

from fastserve.engine.prefixes import PrefixCache, as_tokens, common_length

TEN_BYTES = 10


def cache(*texts: str, bytes_max: int = 100) -> PrefixCache:
    """States of ten bytes each, of these texts a token a character, in this order."""
    made = PrefixCache(bytes_max=bytes_max)
    for text in texts:
        put(made, text)
    return made


def put(made: PrefixCache, text: str, *, size: int = TEN_BYTES) -> None:
    made.put(tokens(text), np.zeros(size, np.uint8))


def tokens(text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return as_tokens([ord(character) for character in text])


def found(made: PrefixCache, text: str) -> tuple[str, int]:
    kept, length = made.longest(tokens(text))
    return ("".join(map(chr, kept.tokens)) if kept else "", length)


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [
        ("", "", 0),
        ("", "a", 0),
        ("a", "b", 0),
        ("abc", "abc", 3),
        ("abc", "abcd", 3),
        ("abcdefghijklmnopqrstuvw", "abcdefghijklmnopqrXtuvw", 18),
        ("abcdefghijklmnopqrstuvw", "abcXefghijklmnopqrstuvw", 3),
        ("abcdefghijklmnopX", "abcdefghijklmnopY", 16),
    ],
)
def test_the_common_length_ends_at_the_first_difference(one: str, other: str, length: int) -> None:
    assert common_length(tokens(one), tokens(other)) == length
    assert common_length(tokens(other), tokens(one)) == length


def test_the_longest_beginning_is_found() -> None:
    made = cache("system: hello", "system: help", "other")
    assert found(made, "system: help me") == ("system: help", 12)
    assert found(made, "system: hellish") == ("system: hello", 12)
    assert found(made, "nothing of the kind") == ("", 0)
    assert found(cache(), "anything") == ("", 0)


def test_what_goes_on_from_a_state_takes_its_place() -> None:
    made = cache("a turn", "another")
    put(made, "a turn and its answer")
    assert len(made) == 2
    assert made.bytes == 2 * TEN_BYTES
    assert found(made, "a turn") == ("a turn and its answer", 6)
    assert made.covers(tokens("a turn and"))
    assert not made.covers(tokens("a turn, and"))


def test_the_longest_unused_goes_first() -> None:
    made = cache("first", "second", "third", bytes_max=3 * TEN_BYTES)
    assert found(made, "first") == ("first", 5)
    put(made, "quite new")
    assert found(made, "second") == ("", 0)
    assert found(made, "first") == ("first", 5)
    assert made.bytes == 3 * TEN_BYTES


def test_what_is_too_large_is_not_kept_and_displaces_nothing() -> None:
    made = cache("first")
    put(made, "second", size=101)
    assert len(made) == 1
    put(made, "third", size=100)
    assert (len(made), made.bytes) == (1, 100)
    assert found(made, "third") == ("third", 5)
