"""BERT's tokenizer, WordPiece, from the metadata of a GGUF file.

A text is cleaned, cut at spaces and punctuation, and each word into the longest pieces that the
vocabulary has. In the file a piece that begins a word has a mark before it; in a `tokenizer.json`
it is the others that have one. Where llama.cpp's tables and BERT's own rules differ, which is over
combining marks of some scripts, characters newer than either and a few controls, these are BERT's.

Knows nothing of files; metadata is a mapping (key to number, string or list).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What `tokenizer.ggml.model` is called then.
MODEL = "bert"

# Before what begins a word, in the file; before what does not, in a `tokenizer.json`.
_BEGINS, CONTINUES = "▁", "##"

# Where BERT's first vocabulary has them, which a file need not say.
_DEFAULT_IDS = {"bos": 101, "eos": 102, "unknown": 100}
# The names that files have for them, in the order in which they count.
_ID_KEYS = {
    "bos": ("bos", "cls"),
    "eos": ("seperator", "eos"),  # spelled so
    "unknown": ("unknown",),
    "mask": ("mask",),
    "padding": ("padding",),
}
# BERT gives up on a word of more than 100 characters; llama.cpp on none, whatever its length.
_WORD_CHARS_MAX = 1 << 30


def special_id(metadata: Mapping[str, object], role: str) -> int | None:
    """The id of what begins a text ("bos"), ends it ("eos"), and so on; None: there is none."""
    for key in _ID_KEYS.get(role, ()):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int):
            return token_id
    return _DEFAULT_IDS.get(role)


def special_ids(metadata: Mapping[str, object]) -> set[int]:
    """The ids of all that have a role."""
    ids = {special_id(metadata, role) for role in _ID_KEYS}
    return {token_id for token_id in ids if token_id is not None}


def parts(metadata: Mapping[str, object], tokens: Sequence[str]) -> dict[str, Any]:
    """What of a `tokenizer.json` is WordPiece's; `tokens` are the file's."""
    special = special_ids(metadata)
    vocabulary = {
        token if token_id in special else _written(token): token_id
        for token_id, token in enumerate(tokens)
    }
    unknown = special_id(metadata, "unknown")
    lowercase = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": bool(
                metadata.get("tokenizer.ggml.normalizer.strip_accents", lowercase)
            ),
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": False},
        "model": {
            "type": "WordPiece",
            "unk_token": tokens[unknown] if unknown is not None and unknown < len(tokens) else "",
            "continuing_subword_prefix": CONTINUES,
            "max_input_chars_per_word": _WORD_CHARS_MAX,
            "vocab": vocabulary,
        },
    }


def _written(token: str) -> str:
    """A token of the file as a `tokenizer.json` has it."""
    if token.startswith(_BEGINS):
        return token.removeprefix(_BEGINS)
    # Those that stand for nothing that is written, which the file leaves alone.
    if token.startswith("[") and token.endswith("]") and len(token) > 1:
        return token
    return CONTINUES + token
