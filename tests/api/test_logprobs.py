"""Log probabilities as chats and completions show them."""

from __future__ import annotations

import math

import pytest

from fastserve.api.logprobs import (
    TokenText,
    chat_logprobs,
    completion_logprobs,
    count_characters,
    finite,
    token_string,
)
from fastserve.generation import LOGPROB_MIN

FLAME = "🔥".encode()


def token(raw: bytes, *, logprob: float = -0.5) -> TokenText:
    return TokenText(token=token_string(raw), raw=raw, logprob=logprob)


@pytest.mark.parametrize(
    ("logprob", "shown"),
    [
        (-0.5, -0.5),
        (0.0, 0.0),
        (LOGPROB_MIN, LOGPROB_MIN),
        (-1e30, LOGPROB_MIN),
        (-math.inf, LOGPROB_MIN),
        (math.inf, LOGPROB_MIN),
        (math.nan, LOGPROB_MIN),
    ],
)
def test_logprobs_are_finite(logprob: float, shown: float) -> None:
    assert finite(logprob) == shown
    texts = [TokenText(token="a", raw=b"a", logprob=logprob, top=(("b", b"b", logprob),))]
    assert chat_logprobs(texts)["content"] == [
        {
            "token": "a",
            "logprob": shown,
            "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": shown, "bytes": [98]}],
        }
    ]
    columns = completion_logprobs(texts, text_offset=0)
    assert columns["token_logprobs"] == [shown]
    assert columns["top_logprobs"] == [{"b": shown, "a": shown}]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b" hello", " hello"),
        ("é".encode(), "é"),
        (FLAME[:2], "bytes:\\xf0\\x9f"),
        (FLAME[2:], "bytes:\\x94\\xa5"),
        (b" " + FLAME[:1], "bytes: \\xf0"),
        (b"\xff", "bytes:\\xff"),
        ("\ufffd".encode(), "\ufffd"),
    ],
)
def test_a_token_has_a_text_whatever_its_bytes(raw: bytes, shown: str) -> None:
    assert token_string(raw) == shown


def test_a_part_of_a_character_has_its_true_bytes() -> None:
    texts = [
        TokenText(token="", raw=FLAME[:2], logprob=-1.0, top=(("", FLAME[:1], -2.0),)),
        TokenText(token="", raw=FLAME[2:], logprob=-1.0),
    ]
    assert chat_logprobs(texts) == {
        "content": [
            {
                "token": "bytes:\\xf0\\x9f",
                "logprob": -1.0,
                "bytes": [0xF0, 0x9F],
                "top_logprobs": [{"token": "bytes:\\xf0", "logprob": -2.0, "bytes": [0xF0]}],
            },
            {
                "token": "bytes:\\x94\\xa5",
                "logprob": -1.0,
                "bytes": [0x94, 0xA5],
                "top_logprobs": [],
            },
        ],
        "refusal": None,
    }


def test_offsets_count_characters_and_not_bytes_or_tokens() -> None:
    texts = [token(raw) for raw in (b"a", "é".encode(), FLAME[:2], FLAME[2:], b"", b"!")]
    columns = completion_logprobs(texts, text_offset=10)
    assert columns["text_offset"] == [10, 11, 12, 12, 13, 13]
    assert columns["tokens"] == ["a", "é", "bytes:\\xf0\\x9f", "bytes:\\x94\\xa5", "", "!"]


@pytest.mark.parametrize("text", ["", "abc", "é", "🔥🔥", "한국어 text"])
def test_characters_are_counted_however_their_bytes_are_cut(text: str) -> None:
    raw = text.encode()
    assert count_characters(raw) == len(text)
    assert sum(count_characters(raw[i : i + 1]) for i in range(len(raw))) == len(text)


def test_the_chosen_token_is_among_the_top_ones() -> None:
    unlikely = TokenText(
        token="z", raw=b"z", logprob=-9.0, top=(("a", b"a", -0.1), ("b", b"b", -2.0))
    )
    columns = completion_logprobs([unlikely], text_offset=0)
    assert columns["top_logprobs"] == [{"a": -0.1, "b": -2.0, "z": -9.0}]


def test_of_two_tokens_with_one_text_the_likelier_is_told() -> None:
    twins = TokenText(token="a", raw=b"a", logprob=-3.0, top=(("a", b"a", -0.1),))
    columns = completion_logprobs([twins], text_offset=0)
    assert columns["top_logprobs"] == [{"a": -0.1}]
    assert columns["token_logprobs"] == [-3.0]
