from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.errors import InvalidRequest
from fastserve.text.control_tokens import GUARD, ControlToken, ControlTokens, without_guards

TOKENS = ControlTokens(
    ControlToken(token_id=token_id, text=text)
    for token_id, text in enumerate(["<|im_start|>", "<|im_end|>", "<|im_", "[[", "[A", "]"])
)
# Strings that are much of what control tokens are made of.
fragments = st.lists(
    st.sampled_from(
        ["<|im_start|>", "<|im_", "end|>", "<", "|", "[", "[[", "A", "]", " ", "x", "é"]
    )
).map("".join)


def written(parts: list[str | int]) -> str:
    texts = ["<|im_start|>", "<|im_end|>", "<|im_", "[[", "[A", "]"]
    return "".join(part if isinstance(part, str) else texts[part] for part in parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("hello", ["hello"]),
        ("<|im_start|>", [0]),
        ("a<|im_start|>b<|im_end|>", ["a", 0, "b", 1]),
        ("<|im_<|im_end|>", [2, 1]),
        pytest.param("<|im_star", [2, "star"], id="the longest that is there"),
        pytest.param("[[A", [3, "A"], id="the leftmost first"),
        pytest.param("<|IM_START|>", ["<|IM_START|>"], id="to the letter"),
        pytest.param(f"<{GUARD}|im_start|>", ["<|im_start|>"], id="a broken one is text"),
    ],
)
def test_text_is_split_at_control_tokens(text: str, parts: list[str | int]) -> None:
    assert TOKENS.split(text) == parts


@pytest.mark.parametrize(
    ("flags", "text", "parts"),
    [
        ({}, "a <s> b", ["a ", 7, " b"]),
        ({"lstrip": True}, "a  <s> b", ["a", 7, " b"]),
        ({"rstrip": True}, "a <s> \n b", ["a ", 7, "b"]),
        ({"rstrip": True}, "<s>  <s>", [7, 7]),
        ({"lstrip": True, "rstrip": True}, " <s> ", [7]),
        ({"single_word": True}, "a<s> <s> <s>b", ["a<s> ", 7, " <s>b"]),
    ],
)
def test_the_flags_of_a_token_are_kept(
    flags: dict[str, bool], text: str, parts: list[str | int]
) -> None:
    tokens = ControlTokens([ControlToken(token_id=7, text="<s>", **flags)])
    assert tokens.split(text) == parts


@given(fragments)
def test_splitting_loses_nothing(text: str) -> None:
    assert written(TOKENS.split(text)) == text


@given(fragments)
def test_what_a_user_says_is_never_control(text: str) -> None:
    assert TOKENS.split(TOKENS.guard(text)) == ([text] if text else [])


@given(st.lists(fragments))
def test_not_even_when_a_template_joins_its_parts(parts: list[str]) -> None:
    joined = "".join(TOKENS.guard(parts))
    assert TOKENS.split(joined) == ([without_guards(joined)] if joined else [])
    assert without_guards(joined) == "".join(parts)


@given(fragments, fragments)
def test_what_the_template_writes_around_it_is_control(before: str, after: str) -> None:
    rendered = f"<|im_start|>{TOKENS.guard(before)}<|im_end|>{TOKENS.guard(after)}<|im_end|>"
    parts = TOKENS.split(rendered)
    assert parts == [0, *filter(None, [before]), 1, *filter(None, [after]), 1]


def test_a_stripped_end_completes_nothing_either() -> None:
    content = TOKENS.guard("<|im_end  ")
    assert TOKENS.split(content.strip() + "|>") == ["<|im_end|>"]


def test_text_without_lookalikes_is_left_as_it_is() -> None:
    text = "if a < b and c(0) == '|': # <im_start>"
    assert TOKENS.guard(text) == text


def test_guards_reach_into_any_json() -> None:
    value = {"role": "user", "n": 1, "parts": [{"text": "<|im_end|>", "<|im_end|>": None}, True]}
    guarded = TOKENS.guard(value)
    broken = f"<{GUARD}|im_end|>"
    assert guarded == {"role": "user", "n": 1, "parts": [{"text": broken, broken: None}, True]}
    assert value["parts"] == [{"text": "<|im_end|>", "<|im_end|>": None}, True]


def test_a_lone_surrogate_is_no_text() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        TOKENS.guard(f"a{GUARD}")


def test_a_value_nested_without_end_is_refused() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        TOKENS.guard(value)


def test_a_token_may_be_longer_than_python_recurses() -> None:
    long = "<" + "x" * 5000
    tokens = ControlTokens(
        ControlToken(token_id=i, text=text) for i, text in enumerate([long, long + "y", long[:-1]])
    )
    assert tokens.split(f"a{long}y{long}{long[:-1]}") == ["a", 1, 0, 2]
    assert tokens.split(tokens.guard(long)) == [long]


def test_without_control_tokens_all_is_text() -> None:
    assert ControlTokens([]).split("<s>") == ["<s>"]
    assert ControlTokens([]).guard("<s>") == "<s>"


def test_many_tokens_do_not_make_long_text_slow() -> None:
    many = ControlTokens(
        ControlToken(token_id=i, text=f"<|reserved_special_token_{i}|>") for i in range(1000)
    )
    text = "<|reserved_special_token" * 20_000
    stripping = ControlTokens([ControlToken(token_id=0, text="<s>", lstrip=True, rstrip=True)])
    begun_s = time.process_time()
    assert stripping.split("<s> " * 100_000) == [0] * 100_000
    assert many.split(many.guard(text)) == [text]
    # Trying each token at each place would take ten seconds.
    assert time.process_time() - begun_s < 2
