"""The parts of a `tokenizer.json` for a GGUF file with a vocabulary of SentencePiece's.

llama.cpp merges the two neighbours that make the piece of the highest score, the leftmost of equal
ones, and takes any two; a tokenizer.json has a list of merges in order. One merge for each piece is
enough and exact: whatever happens within the span of a piece that comes about happens as if the
piece stood alone, so the last two parts it is made of are always the same. Pieces that do not come
about alone never do. What a list cannot say (equal scores of pieces that can meet) is refused, as
is what llama.cpp does to single models and what would make control tokens of plain text.

Knows nothing of files; metadata is a mapping (key to number, string or list).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fastserve.text.gguf_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    UnsupportedTokenizer,
    ids_of,
    is_special,
    special_id,
    token_types_of,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_SPACE = "▁"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")

# Isolated merging takes the square of a piece's length; SentencePiece's own limit is 16 characters,
# and runs of spaces or dashes that were put in by hand have 64 at most.
PIECE_CHARS_MAX = 512

# By these texts llama.cpp gives tokens another type, or takes it from others, whatever the file
# says: ways of models that have no such vocabulary.
_TEXTS_OF_OTHERS = frozenset(
    {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|return|>", "<|flush|>"}
    | {"<|tool_response>"}
)
# By these it finds the tokens for completing code, and makes them control, where the file does not
# name the role ("fim_pre_token_id", or the older "prefix_token_id").
_CODE_BY_TEXT = {
    ("fim_pre", "prefix"): (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>"),
        *("▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    ("fim_suf", "suffix"): (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>"),
        *("▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    ("fim_mid", "middle"): (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>"),
        *("▁<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    ("fim_pad",): ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("fim_rep",): ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("fim_sep",): ("<|file_sep|>",),
}


def sentencepiece_parts(metadata: Mapping[str, object]) -> dict[str, Any]:
    """`normalizer`, `pre_tokenizer`, `decoder` and `model` of the tokenizer.json.

    Takes about 20 us for a piece. Raises UnsupportedTokenizer for whatever would not be tokenized
    exactly as llama.cpp does.
    """
    tokens, types = tokens_of(metadata), token_types_of(metadata)
    ids = ids_of(tokens)
    _refuse_other_ways(metadata, ids, types)
    _refuse_odd_bytes(tokens, types, ids)
    _refuse_overlaps(tokens, types)
    merges = _merges(tokens, _scores(metadata, len(tokens)))
    _refuse_odd_merges(merges, ids, tokens, types)
    prefixes = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = {"type": "Prepend", "prepend": _SPACE}
    unescape = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        # To every text between two added tokens, as llama.cpp does.
        "normalizer": {"type": "Sequence", "normalizers": [prefix, escape]} if prefixes else escape,
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [unescape, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            # Other tokens (padding of the vocabulary) never come of text and are written as none.
            "vocab": {
                token: token_id
                for token, token_id in ids.items()
                if types[token_id] in (NORMAL, USER_DEFINED, BYTE)
                or is_special(token, types[token_id])
            },
            "merges": [[left, right] for _, left, right in merges],
        },
    }


def _scores(metadata: Mapping[str, object], count: int) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != count:
        raise UnsupportedTokenizer("tokenizer.ggml.scores: not one score for each token")
    if any(score != score for score in scores):  # noqa: PLR0124 (only NaN is not itself)
        raise UnsupportedTokenizer("tokenizer.ggml.scores: a score is not a number")
    return scores


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[float, str, str]]:
    """The last merge of each piece that comes about, with its score; the highest score first."""
    get = dict(zip(tokens, scores, strict=True)).get
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        if len(token) > PIECE_CHARS_MAX:
            raise UnsupportedTokenizer(
                f"tokenizer.ggml.tokens: a token has more than {PIECE_CHARS_MAX} characters"
            )
        last = _last_merge(token, get)
        if last is not None:
            merges.append((score, *last))
    # Longest first: see _refuse_ties.
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1] + merge[2])))
    return merges


def _last_merge(piece: str, score_of: Callable[[str], float | None]) -> tuple[str, str] | None:
    """The two parts that the piece is made of at last; None if it does not come about."""
    symbols = list(piece)
    while len(symbols) > 2:
        best, at = None, -1
        for index in range(len(symbols) - 1):
            score = score_of(symbols[index] + symbols[index + 1])
            if score is not None and (best is None or score > best):
                best, at = score, index
        if best is None:
            return None
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return (symbols[0], symbols[1]) if len(symbols) == 2 else None


def _refuse_odd_merges(
    merges: list[tuple[float, str, str]],
    ids: Mapping[str, int],
    tokens: list[str],
    types: list[int],
) -> None:
    """Raises UnsupportedTokenizer for what a list of merges cannot say, or should not do."""
    single = (token for token in tokens if len(token) == 1)
    for piece in (*single, *(left + right for _, left, right in merges)):
        token_type = types[ids[piece]]
        if token_type not in (NORMAL, USER_DEFINED) or is_special(piece, token_type):
            raise UnsupportedTokenizer(
                f"tokenizer.ggml.tokens: plain text becomes the token {piece!r}, "
                "whose type is not that of plain text"
            )
    # What is found as it is before anything is merged does not occur in what is merged. Spaces
    # are written as "▁" only in between, so that a token with that may.
    found = [
        re.escape(token)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == USER_DEFINED and _SPACE not in token
    ]
    never = re.compile("|".join(found) or r"(?!)")
    meeting = [merge for merge in merges if not never.search(merge[1] + merge[2])]
    _refuse_ties(meeting)
    for _, left, right in meeting:
        if left not in ids or right not in ids:
            raise UnsupportedTokenizer(
                f"tokenizer.ggml.tokens: {left + right!r} has a character that is no token"
            )


def _refuse_ties(merges: list[tuple[float, str, str]]) -> None:
    """Of equal scores the leftmost merges first, and in a list the earlier merge.

    This is the same for runs of one character if all have one score, as runs of spaces have, and
    the longest is the earliest: of single characters the two leftmost merge, and then what has
    begun to grow is both the leftmost and the longest until it can grow no more.
    """
    by_score: dict[float, list[str]] = {}
    for score, left, right in merges:
        by_score.setdefault(score, []).append(left + right)
    scores_of_runs: dict[str, set[float]] = {}
    for score, left, right in merges:
        if len(characters := set(left + right)) == 1:
            scores_of_runs.setdefault(characters.pop(), set()).add(score)
    for tied in by_score.values():
        characters = set("".join(tied))
        if len(tied) > 1 and (len(characters) > 1 or len(scores_of_runs[characters.pop()]) > 1):
            raise UnsupportedTokenizer(
                f"tokenizer.ggml.scores: {tied[0]!r} and {tied[1]!r} have the same score"
            )


def _refuse_odd_bytes(tokens: list[str], types: list[int], ids: Mapping[str, int]) -> None:
    for byte in range(0x100):
        if f"<0x{byte:02X}>" not in ids:
            raise UnsupportedTokenizer(f"tokenizer.ggml.tokens: no token for the byte {byte:#04x}")
    for token, token_type in zip(tokens, types, strict=True):
        if (token_type == BYTE) != bool(_BYTE_TOKEN.fullmatch(token)):
            raise UnsupportedTokenizer(
                f"tokenizer.ggml.token_type: {token!r} is of type {token_type}"
            )


def _refuse_overlaps(tokens: list[str], types: list[int]) -> None:
    """llama.cpp looks for the longest token in the whole text, then for the next; fastserve for the
    leftmost, and for control tokens first. It is the same where no two can overlap."""
    found = [
        (token, special)
        for token, token_type in zip(tokens, types, strict=True)
        if (special := is_special(token, token_type)) or token_type == USER_DEFINED
    ]
    beginnings: dict[str, list[str]] = {}
    for token, _ in found:
        for length in range(1, len(token)):
            beginnings.setdefault(token[:length], []).append(token)
    for token, _ in found:
        for length in range(1, len(token)):
            for other in beginnings.get(token[-length:], ()):
                # Of runs of one character, both take the longest from the left.
                if other != token and len(set(token + other)) > 1:
                    raise UnsupportedTokenizer(
                        f"tokenizer.ggml.tokens: {token!r} and {other!r} can overlap in a text"
                    )
    control = re.compile(
        "|".join(re.escape(token) for token, special in found if special) or r"(?!)"
    )
    for token, special in found:
        if not special and control.search(token):
            raise UnsupportedTokenizer(f"tokenizer.ggml.tokens: {token!r} holds a control token")


def _refuse_other_ways(
    metadata: Mapping[str, object], ids: Mapping[str, int], types: list[int]
) -> None:
    """Raises UnsupportedTokenizer for what the file, or llama.cpp for its sake, does besides."""
    name = metadata.get("general.name")
    if isinstance(name, str) and re.search("phi-?3", name, re.ASCII | re.IGNORECASE):
        raise UnsupportedTokenizer(
            f"general.name: {name!r}: llama.cpp strips spaces after control tokens of models with "
            "this name, which is not supported; give a model directory with a tokenizer.json"
        )
    for key in ("remove_extra_whitespaces", "precompiled_charsmap", "add_eos_token"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise UnsupportedTokenizer(f"tokenizer.ggml.{key}: not supported with this vocabulary")
    for text in sorted(_TEXTS_OF_OTHERS & ids.keys()):
        raise UnsupportedTokenizer(f"tokenizer.ggml.tokens: {text!r} is not known of such models")
    for roles, texts in _CODE_BY_TEXT.items():
        if any(special_id(metadata, role) is not None for role in roles):
            continue
        for text in _named_wrongly(texts, ids, types):
            raise UnsupportedTokenizer(
                f"tokenizer.ggml.token_type: {text!r} is not a control token, and "
                f"tokenizer.ggml.{roles[0]}_token_id does not name it"
            )
    bos = special_id(metadata, "bos")
    if metadata.get("tokenizer.ggml.add_bos_token", True) and (
        bos is None or types[bos] not in (CONTROL, UNKNOWN)
    ):
        raise UnsupportedTokenizer("tokenizer.ggml.bos_token_id: it is not a control token")


def _named_wrongly(texts: Iterable[str], ids: Mapping[str, int], types: list[int]) -> Iterable[str]:
    return (text for text in texts if text in ids and types[ids[text]] != CONTROL)
