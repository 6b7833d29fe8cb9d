from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Any

import pytest

from fastserve.errors import StartError
from fastserve.text.gguf_tokenizer import (
    adds_bos,
    build_tokenizer_json,
    end_of_generation_ids,
    special_token,
    vocabulary_size,
)
from fastserve.text.gguf_vocabulary import UnsupportedTokenizer
from fastserve.text.pre_tokenizers import PRE_TOKENIZERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.text.tokenizer import Tokenizer

# One name for each rule.
RULES = sorted({rule: name for name, rule in PRE_TOKENIZERS.items() if name}.values())


def small(**changes: object) -> dict[str, object]:
    """A vocabulary that fits on a line."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "</s>", "<tool>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 4,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


@pytest.mark.parametrize("parse_special", [False, True])
def test_the_default_model_is_tokenized_as_llama_cpp_does(
    parse_special: bool,
    tokenizer: Tokenizer,
    llama_vocabulary: Callable[[str], Any],
    texts: list[str],
) -> None:
    llama = llama_vocabulary("smollm")
    assert len(texts) > 1000
    for text in texts:
        ours = tokenizer.encode(text, parse_special=parse_special)
        assert ours == llama.tokenize(text, parse_special=parse_special), text


@pytest.mark.parametrize("pre", RULES)
def test_every_known_pre_tokenizer_cuts_as_llama_cpp_does(
    pre: str,
    tokenizer_with: Callable[[str], Tokenizer],
    llama_vocabulary: Callable[[str], Any],
    texts: list[str],
) -> None:
    tokenizer, llama = tokenizer_with(pre), llama_vocabulary(pre)
    chosen = texts[:30] + texts[30::3]
    if PRE_TOKENIZERS[pre] in (PRE_TOKENIZERS["tekken"], PRE_TOKENIZERS["gpt-4o"]):
        # llama.cpp cuts words at combining marks there, the models' own tokenizers do not.
        chosen = [text for text in chosen if not any(map(is_mark, text))]
        assert len(chosen) > 150
    for text in chosen:
        ours = tokenizer.encode(text, parse_special=False)
        assert ours == llama.tokenize(text, parse_special=False), text


def test_every_name_is_one_that_llama_cpp_knows(llama_vocabulary: Callable[[str], Any]) -> None:
    by_rule: dict[int, list[list[int]]] = {}
    text = "It's 12345 naïve-café\n\n  DON'T camelCase <= 3.14  x"
    for name, rule in PRE_TOKENIZERS.items():
        if name:
            ids = llama_vocabulary(name).tokenize(text, parse_special=False)
            by_rule.setdefault(id(rule), []).append(ids)
    assert all(ids == same[0] for same in by_rule.values() for ids in same)


def test_tokens_stand_for_the_bytes_that_llama_cpp_gives_them(
    tokenizer: Tokenizer, llama_vocabulary: Callable[[str], Any]
) -> None:
    llama = llama_vocabulary("smollm")
    assert tokenizer.token_bytes == [llama.piece(i) for i in range(tokenizer.vocab_size)]


def test_ends_of_generation_are_those_of_llama_cpp(
    metadata: dict[str, object], llama_vocabulary: Callable[[str], Any]
) -> None:
    llama = llama_vocabulary("smollm")
    ends = tuple(i for i in range(vocabulary_size(metadata)) if llama.is_end(i))
    assert end_of_generation_ids(metadata) == ends


def test_ends_are_found_by_role_and_by_text() -> None:
    tokens = ["a", "<|eot_id|>", "<|endoftext|>", "<|fim_pad|>", "stop", "<s>"]
    metadata = small(tokens=tokens, eos_token_id=4, eom_token_id=0)
    assert end_of_generation_ids(metadata) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        pytest.param(["a", "<|end|>"], (1,), id="a turn"),
        pytest.param(["<|call|>", "<|end|>", "<|return|>"], (0, 2), id="a message in a turn"),
        pytest.param(["<|tool_response>", "</s>", "<eos>"], (0, 2), id="text among tools"),
    ],
)
def test_what_ends_a_turn_depends_on_the_other_ends(
    tokens: list[str], ends: tuple[int, ...]
) -> None:
    assert end_of_generation_ids(small(tokens=tokens, eos_token_id=None)) == ends


def test_special_tokens_are_looked_up_by_role() -> None:
    assert (special_token(small(), "bos"), special_token(small(), "eos")) == ("<s>", "</s>")
    assert special_token(small(bos_token_id=99), "bos") == ""
    assert special_token({**small(), "tokenizer.ggml.bos_token_id": None}, "bos") == ""


@pytest.mark.parametrize(
    ("changes", "adds"),
    [
        pytest.param({}, False, id="gpt-2 does not"),
        pytest.param({"pre": "llama-bpe"}, True, id="llama does"),
        pytest.param({"pre": "llama-bpe", "add_bos_token": False}, False, id="the file says no"),
        pytest.param({"add_bos_token": True}, True, id="the file says yes"),
        pytest.param({"add_bos_token": True, "bos_token_id": None}, False, id="there is none"),
    ],
)
def test_bos_is_added_where_the_file_or_its_kind_says_so(
    changes: dict[str, object], adds: bool
) -> None:
    assert adds_bos(small(**changes)) is adds


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    added = json.loads(build_tokenizer_json(small()))["added_tokens"]
    assert [(token["id"], token["special"]) for token in added] == [
        (3, True),
        (4, True),
        (5, False),
    ]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model: 't5'"),
        ({"model": None}, "tokenizer.ggml.model: None"),
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre: 'kimi-k2'"),
        ({"tokens": None}, "no vocabulary"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "the same token occurs twice"),
        ({"tokens": ["a", "b", "\udc80"], "token_type": None, "merges": []}, "not UTF-8"),
        ({"token_type": [1]}, "not one type for each token"),
        ({"merges": None}, "no merges"),
        ({"merges": ["ab"]}, "'ab' does not join two tokens"),
        ({"merges": ["b a"]}, "'b a' makes no token"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_by_name(
    changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UnsupportedTokenizer, match=complaint) as refusal:
        build_tokenizer_json(small(**changes))
    assert isinstance(refusal.value, StartError)


def test_an_entry_without_text_is_kept_in_its_place() -> None:
    vocabulary = json.loads(
        build_tokenizer_json(small(tokens=["a", "b", "ab", "", "</s>", "<tool>"]))
    )["model"]["vocab"]
    assert vocabulary["[EMPTY_3]"] == 3
