"""Text to token ids by a `tokenizer.json`, and the table for the way back.

Control tokens are found here and not by the library: what the library does with them is a switch
on a shared object, and a chat needs both ways in one prompt (control_tokens.py). The way back is
a table of bytes (token_table.py), because the library's own decoder works on text and cannot
hold back half a character.

The sole owner of the tokenizers library. One Tokenizer serves any number of threads.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

import tokenizers

from fastserve.errors import InvalidRequest, StartError
from fastserve.text.ascii_words import AsciiWords
from fastserve.text.byte_level import token_to_bytes
from fastserve.text.control_tokens import ControlToken, ControlTokens
from fastserve.text.detokenizer import detokenize
from fastserve.text.token_table import TokenTable
from fastserve.text.wordpiece import CONTINUES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastserve.text.control_tokens import JSONT

# SentencePiece's: a space, and how a byte is written that has no other token.
_SPACE = "▁"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


# What stands between two control tokens is tokenized by itself, so the pieces that prompts share (a
# system prompt, the turns of a chat so far) need tokenizing once: a look-up is 0.3 us, tokenizing a
# word 1.5. At most 1024 pieces of 2048 characters are kept, some 20 MB if all are that long.
CACHED_PIECES_MAX = 1024
CACHED_CHARS_MAX = 2048


class Tokenizer:
    """A vocabulary, and text to ids and back."""

    __slots__ = (
        "_ascii_words",
        "_cached_ids",
        "_continuation",
        "_first",
        "control",
        "table",
        "vocab_size",
    )

    def __init__(
        self, first: tokenizers.Tokenizer, continuation: tokenizers.Tokenizer, *, vocab_size: int
    ) -> None:
        self._first = first
        self._continuation = continuation
        added = first.get_added_tokens_decoder()
        # Added tokens may lie beyond a gap.
        named = max(first.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
        self.vocab_size = max(vocab_size, named)
        self.control = ControlTokens(
            ControlToken(
                token_id=token_id,
                text=token.content,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
            )
            for token_id, token in added.items()
            if token.special
        )
        self.table = _table(first, added, vocab_size=self.vocab_size)
        self._cached_ids = functools.lru_cache(maxsize=CACHED_PIECES_MAX)(self._remember)
        self._ascii_words = _ascii_words(first, added) if continuation is first else None

    @classmethod
    def from_file(cls, path: str, *, vocab_size: int = 0) -> Tokenizer:
        """Load a `tokenizer.json`. Raises StartError if it is none, or of a kind not known here.

        `vocab_size`: the model's, which may be more than the tokenizer has names for; the other
        ids are tokens without text.
        """
        try:
            first = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # The library raises plain Exception for whatever is wrong.
            raise StartError(f"{path}: not a tokenizer.json: {error}") from error
        # Added tokens that are special are then text like any other.
        first.encode_special_tokens = True
        first.no_truncation()
        first.no_padding()
        try:
            return cls(first, _for_continuation(first), vocab_size=vocab_size)
        except StartError as error:
            raise StartError(f"{path}: {error}") from error

    @property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id."""
        return self.table.token_bytes

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of control tokens."""
        return self.table.special_ids

    def token_id(self, token: str) -> int | None:
        """The id of one token by its entry in the vocabulary, such as "<|im_end|>"."""
        token_id: int | None = self._first.token_to_id(token)
        return token_id

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """The ids of a text, with nothing put before or after it.

        `parse_special`: control tokens written in the text are control, unless `guard` broke them;
        else they are text. Raises InvalidRequest for a string that is not Unicode text.
        """
        try:
            if not parse_special:
                return self._ids(self._first, text)
            ids: list[int] = []
            encoder = self._first
            for part in self.control.split(text):
                if isinstance(part, int):
                    ids.append(part)
                elif len(part) <= CACHED_CHARS_MAX:
                    ids += self._cached_ids(encoder is self._first, part)
                else:
                    ids += self._ids(encoder, part)
                encoder = self._continuation
            return ids
        except TypeError as error:  # All that the library says of a lone surrogate.
            raise InvalidRequest("the text is not valid Unicode: a lone surrogate") from error

    def guard(self, value: JSONT) -> JSONT:
        """A copy of what a user said (any JSON value), for a template to render.

        What reads as a control token in it will not be one: see control_tokens.py.
        """
        return self.control.guard(value)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these ids. What is not UTF-8 becomes U+FFFD."""
        return detokenize(self.table, token_ids, skip_special_tokens=skip_special_tokens)

    def _remember(self, is_first: bool, text: str) -> tuple[int, ...]:
        return tuple(self._ids(self._first if is_first else self._continuation, text))

    def _ids(self, encoder: tokenizers.Tokenizer, text: str) -> list[int]:
        if self._ascii_words is not None:
            known = self._ascii_words.encode(text)
            if known is not None:
                return known
        # The fast batch leaves out offsets, which nobody reads here, and lets other threads run.
        ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def _ascii_words(tokenizer: tokenizers.Tokenizer, added: dict[int, Any]) -> AsciiWords | None:
    """What tokenizes most texts faster than the library; None if that is not byte-level BPE."""
    if tokenizer.normalizer is not None or not isinstance(tokenizer.model, tokenizers.models.BPE):
        return None
    tokenize = tokenizer.model.tokenize
    return AsciiWords.of(
        _state(tokenizer.pre_tokenizer),
        lambda word: [token.id for token in tokenize(word)],
        added=[token.content for token in added.values() if not token.special],
    )


def _for_continuation(first: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer of text that does not begin a prompt.

    Some put a space before the first word of a prompt only, and take each text for a prompt.
    """
    once = '"prepend_scheme":"first"'
    if once not in json.dumps(_state(first.pre_tokenizer), separators=(",", ":")):
        return first
    never = '"prepend_scheme":"never"'
    continuation = tokenizers.Tokenizer.from_str(first.to_str().replace(once, never))
    continuation.encode_special_tokens = True
    return continuation


def _table(
    tokenizer: tokenizers.Tokenizer, added: dict[int, Any], *, vocab_size: int
) -> TokenTable:
    to_bytes = _bytes_by_decoder(tokenizer)
    names = map(tokenizer.id_to_token, range(vocab_size))
    token_bytes = [b"" if name is None else to_bytes(name) for name in names]
    for token_id, token in added.items():
        token_bytes[token_id] = token.content.encode()
    return TokenTable(
        token_bytes, special_ids=[token_id for token_id, token in added.items() if token.special]
    )


def _bytes_by_decoder(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How this tokenizer's vocabulary writes bytes. Raises StartError if it is not known here."""
    decoder = _state(tokenizer.decoder)
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    # One that cleans up takes spaces away that it was given: not a table of bytes.
    if decoder == {"type": "WordPiece", "prefix": CONTINUES, "cleanup": False}:
        return _wordpiece
    of_spaces = [step for step in steps if step["type"] in ("Metaspace", "Replace")]
    others = kinds - {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
    if of_spaces and not others and all(map(_writes_spaces, of_spaces)):
        return _sentencepiece_with_bytes if "ByteFallback" in kinds else _sentencepiece
    raise StartError(f"its decoder is not supported: {sorted(kinds) or 'none'}")


def _writes_spaces(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step["replacement"] == _SPACE)
    return bool(step["pattern"] == {"String": _SPACE} and step["content"] == " ")


def _byte_level(token: str) -> bytes:
    data = token_to_bytes(token)
    return token.encode() if data is None else data


def _wordpiece(token: str) -> bytes:
    continued = token.removeprefix(CONTINUES)
    return continued.encode() if continued != token else f" {token}".encode()


def _sentencepiece(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode()


def _sentencepiece_with_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else _sentencepiece(token)


def _state(part: Any) -> dict[str, Any]:  # noqa: ANN401 (a component of the library has no type)
    """What a component of a tokenizer is, as in `tokenizer.json`; empty for None."""
    return json.loads(part.__getstate__()) if part is not None else {}
