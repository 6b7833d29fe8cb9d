from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.text.detokenizer import Detokenizer, detokenize
from fastserve.text.token_table import TokenTable

if TYPE_CHECKING:
    from fastserve.text.tokenizer import Tokenizer

EVERY_BYTE = TokenTable([bytes([byte]) for byte in range(256)])
# Beginnings, middles and ends of characters, and bytes that are none of these.
AWKWARD_BYTES = b"a\xc3\xa9\xf0\x9f\x94\xa5\xed\xa0\x80\xe2\x82\xff\xc0\xf4\x90\x80"


def pushed(table: TokenTable, ids: list[int], sizes: list[int]) -> list[str]:
    """Each delta, the last that of the flush. The slices repeat `sizes`."""
    detokenizer = Detokenizer(table)
    deltas, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*deltas, detokenizer.flush()]


@given(
    st.lists(st.one_of(st.sampled_from(list(AWKWARD_BYTES)), st.integers(0, 255))),
    st.lists(st.integers(1, 5), min_size=1),
)
def test_any_bytes_in_any_slices_give_the_text_of_the_whole(
    ids: list[int], sizes: list[int]
) -> None:
    assert "".join(pushed(EVERY_BYTE, ids, sizes)) == bytes(ids).decode(errors="replace")
    assert detokenize(EVERY_BYTE, ids) == bytes(ids).decode(errors="replace")


@given(st.lists(st.binary(min_size=1, max_size=6), min_size=1, max_size=12), st.data())
def test_any_tokens_in_any_slices_give_the_text_of_the_whole(
    tokens: list[bytes], data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokens) - 1)))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1))
    whole = b"".join(tokens[i] for i in ids).decode(errors="replace")
    assert "".join(pushed(TokenTable(tokens), ids, sizes)) == whole


@given(st.text())
def test_whole_characters_never_wait_and_are_never_replaced(text: str) -> None:
    deltas = pushed(EVERY_BYTE, list(text.encode()), [1])
    assert "".join(deltas) == text
    assert [delta for delta in deltas if delta] == list(text)


# per-token decoding turns emoji into U+FFFD.
def test_an_emoji_in_four_tokens_comes_at_once_when_it_is_complete() -> None:
    assert pushed(EVERY_BYTE, list("\U0001f525".encode()), [1]) == ["", "", "", "\U0001f525", ""]


# Korean text has no U+FFFD at the borders of chunks.
def test_korean_text_is_whole_in_every_slicing(tokenizer: Tokenizer) -> None:
    text = "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. " * 5
    ids = tokenizer.encode(text, parse_special=False)
    for size in (1, 2, 3, 7, len(ids)):
        deltas = pushed(tokenizer.table, ids, [size])
        assert "".join(deltas) == text == tokenizer.decode(ids)
        assert not any("\ufffd" in delta for delta in deltas)


# an invalid sequence neither ends the stream nor reaches what comes after it.
@pytest.mark.parametrize(
    ("ids", "deltas"),
    [
        pytest.param([0x80, 0xFF, 0x61], ["\ufffd", "\ufffd", "a", ""], id="lone bytes"),
        pytest.param([0xC3, 0x61, 0x62], ["", "\ufffda", "b", ""], id="a broken beginning"),
        pytest.param([0xE2, 0x82], ["", "", "\ufffd"], id="never completed"),
        pytest.param([0xED, 0xA0, 0x80], ["", "", "\ufffd" * 3, ""], id="a surrogate"),
    ],
)
def test_bytes_that_are_no_character_become_replacements(ids: list[int], deltas: list[str]) -> None:
    assert pushed(EVERY_BYTE, ids, [1]) == deltas


# the first delta has nothing of the prompt, whatever the prompt ends with.
def test_a_generation_begins_without_a_past() -> None:
    assert pushed(EVERY_BYTE, [0xA9, 0x61], [1]) == ["\ufffd", "a", ""]


def test_special_tokens_are_skipped_or_shown_and_end_no_character() -> None:
    table = TokenTable([b"\xc3", b"</s>", b"\xa9", b"a"], special_ids=[1])
    ids = [3, 0, 1, 2, 1]
    assert detokenize(table, ids) == "aé"
    assert "".join(pushed(table, ids, [1])) == "aé"
    shown = Detokenizer(table, skip_special_tokens=False)
    assert [shown.push([i]) for i in ids] == ["a", "", "\ufffd</s>", "\ufffd", "</s>"]


def test_no_tokens_are_no_text() -> None:
    detokenizer = Detokenizer(EVERY_BYTE)
    assert (detokenizer.push([]), detokenizer.flush(), detokenizer.flush()) == ("", "", "")


def test_an_id_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(IndexError):
        Detokenizer(EVERY_BYTE).push([256])
