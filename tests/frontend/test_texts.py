"""Tokenize, detokenize, and the routes that need a model and no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.frontend.stage import END, MAX_SEQ_LEN, USER, VOCAB_SIZE, Stage

if TYPE_CHECKING:
    from fastserve.generation import ModelCard

USER_SAYS_HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        pytest.param({"prompt": "ab"}, [97, 98], id="vLLM's text"),
        pytest.param({"content": "ab"}, [97, 98], id="llama.cpp's text"),
        pytest.param({"prompt": ""}, [], id="no text"),
        pytest.param({"content": "a<|end|>"}, [97, END], id="a control token"),
        pytest.param(
            {"content": "<|end|>", "parse_special": False}, [*b"<|end|>"], id="which is text"
        ),
        pytest.param({"messages": USER_SAYS_HI}, [USER, *b"hi"], id="a chat"),
    ],
)
def test_a_text_is_tokenized(stage: Stage, fields: dict[str, Any], tokens: list[int]) -> None:
    asked = stage.ask("/tokenize", **fields)
    assert asked.status == 200
    assert asked.json() == {
        "count": len(tokens), "max_model_len": MAX_SEQ_LEN, "tokens": tokens, "token_strs": None,
    }  # fmt: skip
    assert stage.inbox == []


def test_tokens_are_told_as_strings_and_as_pieces(stage: Stage) -> None:
    answer = stage.ask("/tokenize", prompt="aé", return_token_strs=True).json()
    assert answer["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    answer = stage.ask("/tokenize", content="aé", with_pieces=True).json()
    assert answer["tokens"] == [
        {"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]},
    ]  # fmt: skip


def test_a_bos_is_put_before_a_prompt_and_before_content_on_request(card: ModelCard) -> None:
    stage = Stage(card)
    assert stage.state.model is not None
    stage.state.model._bos_ids = [END]

    def tokens(**fields: Any) -> Any:
        return stage.ask("/tokenize", **fields).json()["tokens"]

    assert tokens(prompt="a") == [END, 97]
    assert tokens(prompt="a", add_special_tokens=False) == [97]
    assert tokens(content="a") == [97]
    assert tokens(content="a", add_special=True) == [END, 97]
    assert tokens(messages=USER_SAYS_HI) == [USER, *b"hi"]
    assert tokens(messages=USER_SAYS_HI, add_special_tokens=True) == [END, USER, *b"hi"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tokens": [104, 105]}, "hi"),
        ({"tokens": []}, ""),
        ({"tokens": [104, END]}, "h<|end|>"),
        ({"tokens": [104, END], "skip_special_tokens": True}, "h"),
        ({"tokens": [0xC3]}, "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_tokens_are_detokenized(stage: Stage, fields: dict[str, Any], text: str) -> None:
    asked = stage.ask("/detokenize", **fields)
    assert (asked.status, asked.json()) == (200, {"prompt": text, "content": text})


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, 400, "content"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": USER_SAYS_HI, "tools": [{}]}, 400, "tools[0].type"),
        ("/tokenize", {"prompt": "a" * 10_000}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_what_cannot_be_told_is_refused(
    stage: Stage, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    asked = stage.ask(path, **fields)
    assert asked.status == status
    assert asked.json()["error"]["param"] == param


def test_a_long_text_is_tokenized_in_a_thread(card: ModelCard) -> None:
    stage = Stage(card, off_loop_bytes_min=0)
    asked = stage.ask("/tokenize", prompt="ab")
    assert not asked.ended
    stage.run_call()
    assert asked.json()["tokens"] == [97, 98]


def test_tokenizing_needs_the_model_but_no_engine(stage: Stage) -> None:
    stage.frontend.on_engine_gone("lightning")
    assert stage.ask("/tokenize", prompt="a").status == 200
    stage.state.model = None
    assert stage.ask("/tokenize", prompt="a").json()["error"]["code"] == "engine_starting"


# ---- one model


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/bytes", 200),
        ("/v1/models/%62ytes", 200),
        ("/v1/models/other", 404),
        ("/v1/models/an/other", 404),
        ("/v1/models/", 404),
    ],
)
def test_one_model_is_told_by_its_name(stage: Stage, path: str, status: int) -> None:
    asked = stage.request("GET", path)
    assert asked.status == status
    if status == 200:
        assert asked.json() == stage.request("GET", "/v1/models").json()["data"][0]


def test_one_model_takes_get_alone(stage: Stage) -> None:
    assert stage.request("DELETE", "/v1/models/bytes").header("allow") == "OPTIONS, GET, HEAD"
