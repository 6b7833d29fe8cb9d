from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastserve.text.stops import StopMatcher
from fastserve.text.stream import TextStream

if TYPE_CHECKING:
    from fastserve.text.tokenizer import Tokenizer


@given(
    ids=st.lists(st.integers(0, 300), max_size=40),
    stops=st.lists(st.sampled_from([" the", "\n", "e", "\ufffd", "ing a", ".."]), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_deltas_join_to_the_text_that_is_not_streamed(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], sizes: list[int]
) -> None:
    stream = TextStream(tokenizer, stops=tuple(stops))
    streamed, at, turn = "", 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        streamed += stream.push(ids[at : at + size])
        at, turn = at + size, turn + 1
    streamed += stream.finish()

    whole = StopMatcher(tuple(stops))
    assert streamed == whole.push(tokenizer.decode(ids)) + whole.flush()
    assert stream.stopped == whole.matched


def test_without_stops_each_token_is_shown_as_it_comes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello there, world", parse_special=False)
    stream = TextStream(tokenizer)
    assert [stream.push([i]) for i in ids] == [tokenizer.decode([i]) for i in ids]
    assert (stream.finish(), stream.stopped) == ("", None)


def test_a_stop_ends_the_text_and_what_comes_after_is_not_shown(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stops=(" there",))
    ids = tokenizer.encode("Hello there, world", parse_special=False)
    assert "".join(stream.push([i]) for i in ids) + stream.finish() == "Hello"
    assert stream.stopped == " there"


# the text of a stop token is in neither, or in both.
@pytest.mark.parametrize(("skip", "text"), [(True, "hi"), (False, "hi<|im_end|>")])
def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer, skip: bool, text: str) -> None:
    ids = tokenizer.encode("hi<|im_end|>", parse_special=True)
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    assert stream.push(ids) + stream.finish() == text
    assert tokenizer.decode(ids, skip_special_tokens=skip) == text


def test_some_special_tokens_are_shown_and_others_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", parse_special=True)
    table = tokenizer.table.showing([ids[0]])
    stream = TextStream(tokenizer, table=table)
    assert stream.push(ids) + stream.finish() == "<|im_start|>hi"
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.table.showing([]) is tokenizer.table


def test_the_stop_can_be_part_of_the_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stops=("lo w",), include_stop=True)
    assert stream.push(tokenizer.encode("Hello world", parse_special=False)) == "Hello w"
    assert (stream.finish(), stream.stopped) == ("", "lo w")
