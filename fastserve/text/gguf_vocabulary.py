"""What every GGUF file says of its vocabulary: tokens, their types, and which of them have a role.

Metadata is a mapping (key to number, string or list). Knows nothing of how text is cut into tokens
(gguf_tokenizer.py, gguf_sentencepiece.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastserve.errors import StartError
from fastserve.text import wordpiece

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# gguf's token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# A GGUF file names one end; models use several. These are the texts by which llama.cpp finds the
# others (llama_vocab_is_eog), at the version whose library fastserve uses.
ENDS_BY_TEXT = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"}
    | {"<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"}
    | {"<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["}
    | {"<｜end▁of▁sentence｜>"}
)

# llama.cpp's, for files of SentencePiece that do not say (special_bos_id and special_eos_id).
_SENTENCEPIECE_ROLES = {"bos": 1, "eos": 2}


class UnsupportedTokenizer(StartError):
    """The file's tokenizer is one that fastserve does not know how to reproduce exactly."""


def is_sentencepiece(metadata: Mapping[str, object]) -> bool:
    """Whether the vocabulary is SentencePiece's, with scores and byte fallback."""
    return metadata.get("tokenizer.ggml.model") == "llama"


def is_wordpiece(metadata: Mapping[str, object]) -> bool:
    """Whether the vocabulary is WordPiece's, BERT's."""
    return metadata.get("tokenizer.ggml.model") == wordpiece.MODEL


def tokens_of(metadata: Mapping[str, object]) -> list[str]:
    """The text of each id. Raises UnsupportedTokenizer if there is none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise UnsupportedTokenizer("tokenizer.ggml.tokens: the file has no vocabulary")
    if "" in tokens:
        # An entry without text can neither be found nor written; llama.cpp names it so.
        return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    return tokens


def ids_of(tokens: list[str]) -> dict[str, int]:
    """The id of each text. Raises UnsupportedTokenizer if two are the same."""
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise UnsupportedTokenizer("tokenizer.ggml.tokens: the same token occurs twice")
    return vocabulary


def token_types_of(metadata: Mapping[str, object]) -> list[int]:
    """The type of each id; NORMAL for all where the file says nothing."""
    tokens = tokens_of(metadata)
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise UnsupportedTokenizer("tokenizer.ggml.token_type: not one type for each token")
    return types


def special_id(metadata: Mapping[str, object], role: str) -> int | None:
    """The id that the file gives a role ("bos", "eot"), or that its kind of vocabulary implies."""
    # The key of the format's specification, and what files have: "bos_token_id", "eot_token_id".
    token_id = (
        wordpiece.special_id(metadata, role)
        if is_wordpiece(metadata)
        else metadata.get(f"tokenizer.ggml.{role}_token_id")
    )
    size = len(tokens_of(metadata))
    if isinstance(token_id, int) and 0 <= token_id < size:
        return token_id
    implied = _SENTENCEPIECE_ROLES.get(role, size) if is_sentencepiece(metadata) else size
    return implied if implied < size else None


def is_special(token: str, token_type: int) -> bool:
    """Whether the token is control: by its type, or by a text that llama.cpp takes for an end."""
    return token_type in (CONTROL, UNKNOWN) or token in ENDS_BY_TEXT


def added_tokens(tokens: list[str], types: list[int]) -> Iterable[dict[str, Any]]:
    """`added_tokens` of a tokenizer.json: found in the text as they are, before it is cut."""
    for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        special = is_special(token, token_type)
        if special or token_type == USER_DEFINED:
            yield {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
