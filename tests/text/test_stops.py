from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.text.stops import StopMatcher

# Few letters, so that stops overlap with the text, with each other and with themselves.
letters = st.text(alphabet="abé", max_size=40)
stop_lists = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4)


def deltas(stops: tuple[str, ...], *texts: str, include: bool = False) -> list[str]:
    matcher = StopMatcher(stops, include=include)
    return [*(matcher.push(text) for text in texts), matcher.flush()]


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the first stop and that stop, by looking at each beginning of the text."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(letters, stop_lists, st.lists(st.integers(1, 6), min_size=1), st.booleans())
def test_the_result_is_that_of_the_whole_text_however_it_is_sliced(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    matcher = StopMatcher(tuple(stops), include=include)
    released, at, turn = "", 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        released += matcher.push(text[at : at + size])
        at, turn = at + size, turn + 1
    released += matcher.flush()
    before, stop = first_stop(text, tuple(stops))
    assert matcher.matched == stop
    assert released == before + (stop if include and stop else "")


@given(letters, stop_lists)
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    released = "".join(map(matcher.push, text))
    if matcher.matched is None:
        held = text[len(released) :]
        beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
        longest = max((b for b in beginnings if text.endswith(b)), key=len, default="")
        assert held == longest


@pytest.mark.parametrize(
    ("stops", "texts", "shown", "stop"),
    [
        pytest.param(
            ("DEFGHIJ",), ["ABC", "DEF", "GHIJ"], ["ABC", "", "", ""], "DEFGHIJ", id="A-08"
        ),
        pytest.param(
            ("\n\nUser:",),
            ["Hi.\n", "\nUs", "er", ":", " more"],
            ["Hi.", "", "", "", "", ""],
            "\n\nUser:",
            id="A-09",
        ),
        pytest.param(("abcd",), ["xab"], ["x", "ab"], None, id="A-10: flushed"),
        pytest.param(("abcd",), ["xab", "abx"], ["x", "ababx", ""], None, id="A-10: more"),
        pytest.param(("lo", "ell"), ["hello"], ["h", ""], "ell", id="A-12: text order"),
        pytest.param(
            (" a", "is"), [" The user is a"], [" The user ", ""], "is", id="A-12: of words"
        ),
        pytest.param(("bc", "abc"), ["xabc"], ["x", ""], "abc", id="a tie: the longer"),
        pytest.param(("aab",), ["aa", "ab"], ["", "a", ""], "aab", id="it overlaps itself"),
        pytest.param(("é",), ["caf", "é!"], ["caf", "", ""], "é", id="one character"),
        pytest.param(("ab", "abc"), ["abc"], ["", ""], "ab", id="the shorter is complete first"),
    ],
)
def test_stops(
    stops: tuple[str, ...], texts: list[str], shown: list[str], stop: str | None
) -> None:
    matcher = StopMatcher(stops)
    assert [*map(matcher.push, texts), matcher.flush()] == shown
    assert matcher.matched == stop


def test_the_stop_is_shown_if_wanted_and_nothing_after_it() -> None:
    assert deltas(("END",), "x E", "ND y", "z", include=True) == ["x ", "END", "", ""]


def test_an_empty_stop_is_never_accepted() -> None:
    with pytest.raises(AssertionError, match="empty stop"):
        StopMatcher(("a", ""))
