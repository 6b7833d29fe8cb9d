"""Vocabularies of SentencePiece's from a GGUF file, held against llama.cpp's own tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastserve.engine.llama import read_gguf_metadata
from fastserve.text.gguf_sentencepiece import PIECE_CHARS_MAX
from fastserve.text.gguf_tokenizer import (
    adds_bos,
    adds_eos,
    build_tokenizer_json,
    end_of_generation_ids,
    special_token,
)
from fastserve.text.gguf_vocabulary import UnsupportedTokenizer
from fastserve.text.stream import TextStream
from fastserve.text.tokenizer import Tokenizer
from tests.text.conftest import LlamaVocabulary
from tests.text.sentencepiece_vocabulary import (
    BYTE,
    CONTROL,
    INST,
    NORMAL,
    TOOL,
    USER_DEFINED,
    add_to,
    metadata,
    vocabulary,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TEXTS = [
    "Hello world!",
    " leading and trailing ",
    "  two   three    ",
    "▁ is written for a space",
    "\n\n\n\n\n and\n\n\n\n",
    "<tool>a<tool> <tool>",
    "[INST] hi [/INST]</s><s>",
    "<0x41> is no byte; <unk> is no text",
    "def f(self):\n        return None",
    "天地 🔥\U0001f469\u200d\U0001f4bb é",
]
PARSE_SPECIAL = pytest.mark.parametrize("parse_special", [False, True])
PREFIX = pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no prefix"])

Pair = tuple[Tokenizer, LlamaVocabulary, dict[str, object]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    """The same vocabulary in our hands and in llama.cpp's."""
    made: dict[bool, Pair] = {}

    def make(*, prefix: bool = True) -> Pair:
        if prefix not in made:
            directory = tmp_path_factory.mktemp("sentencepiece")
            path = directory / "vocabulary.gguf"
            writer = gguf.GGUFWriter(str(path), "llama")
            add_to(writer)
            writer.add_add_space_prefix(prefix)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.close()
            said = read_gguf_metadata(str(path))
            json_path = directory / "tokenizer.json"
            json_path.write_text(build_tokenizer_json(said), encoding="utf-8")
            made[prefix] = Tokenizer.from_file(str(json_path)), LlamaVocabulary(path), said
        return made[prefix]

    yield make
    for _, llama, _ in made.values():
        llama.close()


# ---- there


@PREFIX
@PARSE_SPECIAL
def test_texts_are_tokenized_as_llama_cpp_does(
    pair: Callable[..., Pair], texts: list[str], *, prefix: bool, parse_special: bool
) -> None:
    ours, llama, _ = pair(prefix=prefix)
    for text in TEXTS + texts:
        ids = ours.encode(text, parse_special=parse_special)
        assert ids == llama.tokenize(text, parse_special=parse_special), text


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(
        st.sampled_from(" \n\t▁abcdefst<>[]INST/tool0x4🔥é天") | st.characters(codec="utf-8")
    ),
    prefix=st.booleans(),
    parse_special=st.booleans(),
)
def test_any_text_is_tokenized_as_llama_cpp_does(
    pair: Callable[..., Pair], text: str, *, prefix: bool, parse_special: bool
) -> None:
    if "\0" in text:
        return
    ours, llama, _ = pair(prefix=prefix)
    ids = ours.encode(text, parse_special=parse_special)
    assert ids == llama.tokenize(text, parse_special=parse_special)


def test_control_tokens_in_what_a_user_said_are_text(pair: Callable[..., Pair]) -> None:
    ours, _, _ = pair()
    for text in ("[INST]", "</s> [INST", "<s>x"):
        ids = ours.encode(f"[INST]{ours.guard(text)}</s>", parse_special=True)
        assert ids[0] == INST
        assert ours.special_ids.isdisjoint(ids[1:-1])
        assert ours.decode(ids[1:-1]) in (text, f" {text}")


# ---- and back


def test_tokens_stand_for_the_bytes_that_llama_cpp_gives_them(pair: Callable[..., Pair]) -> None:
    ours, llama, _ = pair()
    tokens, _, _ = vocabulary()
    assert ours.token_bytes == [llama.piece(each) for each in range(len(tokens))]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stream_of_tokens_is_the_whole_text(
    pair: Callable[..., Pair], texts: list[str], size: int
) -> None:
    """Characters that have no token come as bytes, in tokens of their own."""
    ours, _, _ = pair()
    for text in TEXTS + texts[:200]:
        ids = ours.encode(text, parse_special=False)
        stream = TextStream(ours)
        pieces = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join([*pieces, stream.finish()]) == ours.decode(ids)
        if not any(token in text for token in ("<tool>", "\n\n\n")):
            # The space before it is the tokenizer's.
            assert ours.decode(ids) == (f" {text.replace('▁', ' ')}" if text else "")


def test_a_stop_string_is_found_in_bytes_and_across_spaces(pair: Callable[..., Pair]) -> None:
    ours, _, _ = pair()
    for stop in ("🔥", "k 🔥 m", " more"):
        stream = TextStream(ours, stops=(stop,))
        said = "".join(
            stream.push([each]) for each in ours.encode("ask 🔥 more", parse_special=False)
        )
        assert stream.stopped == stop
        assert said == " ask 🔥 more".partition(stop)[0]


# ---- what else the file says


def test_a_prompt_begins_as_llama_cpp_begins_it(pair: Callable[..., Pair]) -> None:
    _, llama, said = pair()
    assert adds_bos(said)  # unless the file says otherwise
    assert not adds_bos(said | {"tokenizer.ggml.add_bos_token": False})
    assert not adds_eos(said)
    assert (special_token(said, "bos"), special_token(said, "eos")) == ("<s>", "</s>")
    tokens, _, _ = vocabulary()
    assert end_of_generation_ids(said) == tuple(
        each for each in range(len(tokens)) if llama.is_end(each)
    )


def test_what_a_file_need_not_say() -> None:
    said = metadata(bos_token_id=None, eos_token_id=None)
    assert (special_token(said, "bos"), special_token(said, "eos")) == ("<s>", "</s>")


def small(pieces: dict[str, float], **changes: Any) -> dict[str, object]:
    """A vocabulary of few pieces and their scores; `types` are of some of them."""
    types = changes.pop("types", {})
    tokens, scores, kinds = (column[:262] for column in vocabulary())
    columns = {
        "tokens": [*tokens, *pieces],
        "scores": [*scores, *pieces.values()],
        "token_type": [*kinds, *(types.get(piece, NORMAL) for piece in pieces)],
    }
    return metadata(**columns | changes)


LETTERS = {"a": -9.0, "b": -8.0, "c": -7.0}


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (small(LETTERS, scores=None), "scores: not one score for each token"),
        (small(LETTERS | {"ab": float("nan")}), "a score is not a number"),
        (small(LETTERS | {"ab": -1.0, "bc": -1.0}), "'ab' and 'bc' have the same score"),
        (small(LETTERS | {"ad": -1.0}), "'ad' has a character that is no token"),
        (small(LETTERS | {"ab": -1.0}, types={"ab": CONTROL}), "becomes the token 'ab'"),
        (small(LETTERS, types={"a": 5}), "plain text becomes the token 'a'"),
        (small(LETTERS | {"a" * (PIECE_CHARS_MAX + 1): 0.0}), "more than 512 characters"),
        (small(LETTERS, types={"b": BYTE}), "'b' is of type 6"),
        (small({"<x": 0.0, "x>": 0.0}, types={"<x": CONTROL, "x>": USER_DEFINED}), "can overlap"),
        (small({"a</s>": 0.0}, types={"a</s>": USER_DEFINED}), "'a</s>' holds a control token"),
        (small(LETTERS, tokens=["a"] * 300, token_type=None, scores=[0.0] * 300), "occurs twice"),
        (small(LETTERS) | {"general.name": "Phi-3 mini"}, "strips spaces after control tokens"),
        (small(LETTERS, add_eos_token=True), "add_eos_token: not supported"),
        (small(LETTERS, precompiled_charsmap=[1]), "precompiled_charsmap: not supported"),
        (small(LETTERS | {"<|channel|>": 0.0}), "is not known of such models"),
        (small(LETTERS | {"<PRE>": 0.0}), "'<PRE>' is not a control token"),
        (small(LETTERS, bos_token_id=TOOL), "bos_token_id: it is not a control token"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_reproduced_exactly_is_refused(
    said: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UnsupportedTokenizer, match=complaint):
        build_tokenizer_json(said)


def test_a_file_without_a_byte_is_refused() -> None:
    said = small(LETTERS)
    said["tokenizer.ggml.tokens"] = [
        "<other>" if token == "<0x00>" else token
        for token in said["tokenizer.ggml.tokens"]  # type: ignore[attr-defined] # a list
    ]
    with pytest.raises(UnsupportedTokenizer, match="no token for the byte 0x00"):
        build_tokenizer_json(said)
