"""A `tokenizer.json` from the metadata of a GGUF file.

The file carries vocabulary and merges, and of the rest only names. What those names mean is
written down here, in pre_tokenizers.py, gguf_sentencepiece.py and wordpiece.py, so that an acceptor
can tokenize without the weights and without the inference library. A name that is not known is
refused: text that is tokenized in nearly the right way gives nearly sensible answers, which is
worse than none.

Knows nothing of files; metadata is a mapping (key to number, string or list).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastserve.text import wordpiece
from fastserve.text.byte_level import BYTE_TO_CHARACTER
from fastserve.text.gguf_sentencepiece import sentencepiece_parts
from fastserve.text.gguf_vocabulary import (
    CONTROL,
    ENDS_BY_TEXT,
    UnsupportedTokenizer,
    added_tokens,
    ids_of,
    is_sentencepiece,
    is_wordpiece,
    special_id,
    token_types_of,
    tokens_of,
)
from fastserve.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

# To be raised when the same metadata would give another tokenizer.json: caches carry it.
BUILDER_VERSION = 1

# Never part of UTF-8, so that no text needs a token for them.
_BYTES_NOT_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})

# A model of code that goes on to the next file or repository has ended this one.
_CODE_ENDS_BY_TEXT = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}


def build_tokenizer_json(metadata: Mapping[str, object]) -> str:
    """The text of a `tokenizer.json` that tokenizes as llama.cpp does with the same file.

    Raises UnsupportedTokenizer for a model or pre-tokenizer that is not known here, and for
    vocabularies that contradict themselves.
    """
    tokens, types = tokens_of(metadata), token_types_of(metadata)
    ids_of(tokens)
    if is_wordpiece(metadata):
        parts = wordpiece.parts(metadata, tokens)
        # Files of the first converters call every token a normal one.
        special = wordpiece.special_ids(metadata)
        types = [CONTROL if at in special else each for at, each in enumerate(types)]
    elif is_sentencepiece(metadata):
        parts = sentencepiece_parts(metadata)
    else:
        parts = _byte_level_parts(metadata)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added_tokens(tokens, types)),
        "post_processor": None,
        **parts,
    }
    try:
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedTokenizer("tokenizer.ggml.tokens: a token is not UTF-8") from error
    return text


def vocabulary_size(metadata: Mapping[str, object]) -> int:
    """The number of tokens; ids run from 0 to one less."""
    return len(tokens_of(metadata))


def special_token(metadata: Mapping[str, object], role: str) -> str:
    """The text of the token that the file gives a role ("bos", "eos"); "" if it gives none."""
    token_id = special_id(metadata, role)
    return "" if token_id is None else tokens_of(metadata)[token_id]


def adds_eos(metadata: Mapping[str, object]) -> bool:
    """Whether the tokenizer puts the eos token behind a text that is to be embedded."""
    wanted = is_wordpiece(metadata) or bool(metadata.get("tokenizer.ggml.add_eos_token"))
    return wanted and special_id(metadata, "eos") is not None


def adds_bos(metadata: Mapping[str, object]) -> bool:
    """Whether the tokenizer puts the bos token before a plain prompt."""
    if is_wordpiece(metadata):
        return special_id(metadata, "bos") is not None
    said = metadata.get("tokenizer.ggml.add_bos_token")
    if said is None:
        # llama.cpp's default for vocabularies of SentencePiece's.
        said = is_sentencepiece(metadata) or _pre_tokenizer(metadata).add_bos
    return bool(said) and special_id(metadata, "bos") is not None


def end_of_generation_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Every id that ends a turn or a text, in order: llama.cpp's `llama_vocab_is_eog`."""
    ids = {token: token_id for token_id, token in enumerate(tokens_of(metadata))}
    ends: set[int | None] = {ids[text] for text in ENDS_BY_TEXT if text in ids}
    for role in ("eos", "eot", "eom"):
        ends.add(special_id(metadata, role))
    for role, texts in _CODE_ENDS_BY_TEXT.items():
        by_text = next((ids[text] for text in texts if text in ids), None)
        said = special_id(metadata, role)
        ends.add(by_text if said is None else said)
    # Where a turn ends with "<|return|>" and a call with "<|call|>", "<|end|>" only ends a message
    # within the turn; and where tools answer in "<|tool_response>", "</s>" is ordinary text.
    named = {text for text in ENDS_BY_TEXT if text in ids}
    if {"<|return|>", "<|flush|>"} & named and {"<|call|>", "<|calls|>"} & named:
        ends.discard(ids.get("<|end|>"))
    if "<|tool_response>" in named:
        ends.discard(ids.get("</s>"))
    return tuple(sorted(end for end in ends if end is not None))


def _byte_level_parts(metadata: Mapping[str, object]) -> dict[str, Any]:
    pre_tokenizer = _pre_tokenizer(metadata)
    vocabulary = ids_of(tokens_of(metadata))
    return {
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer_json(pre_tokenizer, vocabulary),
        "decoder": _byte_level_json(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer.ignore_merges,
            "vocab": vocabulary,
            "merges": _merges(metadata, vocabulary),
        },
    }


def _pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedTokenizer(
            f"tokenizer.ggml.model: {model!r} is not supported (only byte-level BPE, 'gpt2', "
            "SentencePiece's BPE, 'llama', and WordPiece, 'bert', are); "
            "give a model directory with a tokenizer.json instead"
        )
    name = metadata.get("tokenizer.ggml.pre", "")
    known = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if known is None:
        raise UnsupportedTokenizer(
            f"tokenizer.ggml.pre: {name!r} is not supported; known: "
            + ", ".join(sorted(filter(None, PRE_TOKENIZERS)))
        )
    return known


def _pre_tokenizer_json(
    pre_tokenizer: PreTokenizer, vocabulary: Mapping[str, int]
) -> dict[str, Any]:
    splits = [_split_json(pattern, "Isolated") for pattern in pre_tokenizer.patterns]
    byte_level = _byte_level_json() | {"use_regex": False}
    # A byte that has no token vanishes, but its neighbours must not merge across the gap.
    tokenless = "".join(
        rf"\x{{{ord(character):x}}}"
        for byte, character in BYTE_TO_CHARACTER.items()
        if byte not in _BYTES_NOT_IN_UTF8 and character not in vocabulary
    )
    gaps = [_split_json(f"[{tokenless}]", "Removed")] if tokenless else []
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level, *gaps]}


def _split_json(pattern: str, behavior: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": behavior,
        "invert": False,
    }


def _byte_level_json() -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }


def _merges(metadata: Mapping[str, object], vocabulary: Mapping[str, int]) -> list[list[str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise UnsupportedTokenizer("tokenizer.ggml.merges: the file has no merges")
    pairs = []
    for merge in merges:
        # The first character may itself be a space.
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in vocabulary or right not in vocabulary:
            raise UnsupportedTokenizer(f"tokenizer.ggml.merges: {merge!r} does not join two tokens")
        if left + right not in vocabulary:
            raise UnsupportedTokenizer(f"tokenizer.ggml.merges: {merge!r} makes no token")
        pairs.append([left, right])
    return pairs
