"""BERT's tokenizer from a GGUF file, held against llama.cpp's."""

from __future__ import annotations

import string
import unicodedata
from typing import TYPE_CHECKING, Any

import gguf
import pytest

from fastserve.engine.llama import read_gguf_metadata
from fastserve.text.gguf_tokenizer import adds_bos, adds_eos, build_tokenizer_json, special_token
from fastserve.text.tokenizer import Tokenizer
from tests.text.conftest import LlamaVocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused1]"]
PAD, UNK, CLS, SEP, MASK, _ = range(len(SPECIAL))
# Some of what the texts have, so that many words are known, and some are not.
LETTERS = sorted(
    set(string.ascii_letters + string.digits + string.punctuation + "天地éñß你好üαωйÉ—“”…")
)
WORDS = ["hello", "world", "the", "fire", "naive", "naïve", "cafe", "Café", "un", "believ"]
PIECES = [*LETTERS, "ing", "able", "ness", "lo"]
TOKENS = [*SPECIAL, *(f"▁{word}" for word in [*LETTERS, *WORDS]), *PIECES]

TEXTS = [
    "Hello world!",
    "naïve CAFÉ unbelievable",
    "天地 你好",
    "Istanbul ẞ ÀÉ",
    "x" * 500,
    "a\u0301b",
    "\u200bzero\u00ad",
    " \t\n\u00a0a b\u3000c",
    "ΑΣ ς",
    "[CLS] is [unused1] ##ing ▁the",
]

Pair = tuple[Tokenizer, LlamaVocabulary, dict[str, object]]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """The same vocabulary in our hands and in llama.cpp's; keyword arguments are metadata."""
    opened: list[LlamaVocabulary] = []

    def make(**settings: bool | int) -> Pair:
        path = tmp_path / "vocabulary.gguf"
        writer = gguf.GGUFWriter(str(path), "bert")
        writer.add_tokenizer_model("bert")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
        ids = {"unknown": UNK, "cls": CLS, "bos": CLS, "seperator": SEP, "mask": MASK}
        for role, token_id in ids.items():
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token_id)
        for name, value in settings.items():
            writer.add_bool(f"tokenizer.ggml.normalizer.{name}", bool(value))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        metadata = read_gguf_metadata(str(path))
        (tmp_path / "tokenizer.json").write_text(build_tokenizer_json(metadata), encoding="utf-8")
        opened.append(LlamaVocabulary(path))
        return Tokenizer.from_file(str(tmp_path / "tokenizer.json")), opened[-1], metadata

    yield make
    for vocabulary in opened:
        vocabulary.close()


def is_settled(text: str) -> bool:
    """Whether BERT's own rules and llama.cpp's agree on every character of a text."""
    return not any(
        unicodedata.category(each) in ("Mc", "Me", "Cn")
        or each in "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
        or len(each.lower()) > 1  # İ, of which llama.cpp makes one character
        for each in text
    )


@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lowercase": False},
        {"lowercase": False, "strip_accents": True},
        {"strip_accents": False},
    ],
    ids=str,
)
def test_texts_are_tokenized_as_llama_cpp_does(
    settings: dict[str, bool], *, parse_special: bool, pair: Callable[..., Pair], texts: list[str]
) -> None:
    ours, llama, _ = pair(**settings)
    chosen = [text for text in TEXTS + texts if is_settled(text)]
    assert len(chosen) > 800
    for text in chosen:
        ids = ours.encode(text, parse_special=parse_special)
        assert ids == llama.tokenize(text, parse_special=parse_special), text


def test_tokens_stand_for_the_bytes_that_llama_cpp_gives_them(pair: Callable[..., Pair]) -> None:
    ours, llama, _ = pair()
    written = range(len(SPECIAL), len(TOKENS))
    assert [ours.token_bytes[each] for each in written] == [llama.piece(each) for each in written]


def test_what_is_around_a_text_is_around_it(pair: Callable[..., Pair], tmp_path: Path) -> None:
    ours, _, metadata = pair()
    assert adds_bos(metadata)
    assert adds_eos(metadata)
    begin, end = special_token(metadata, "bos"), special_token(metadata, "eos")
    assert (begin, end) == ("[CLS]", "[SEP]")
    assert ours.encode(begin + end, parse_special=True) == [CLS, SEP]


def test_a_file_need_not_say_what_is_where_bert_has_it() -> None:
    tokens = [*(f"[unused{n}]" for n in range(100)), "[UNK]", "[CLS]", "[SEP]", "▁a"]
    metadata: dict[str, Any] = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens}
    assert special_token(metadata, "bos") == "[CLS]"
    assert special_token(metadata, "eos") == "[SEP]"
