"""The alphabet of byte-level BPE: one printable character for each of the 256 bytes.

GPT-2's: a byte that Latin-1 prints stands for itself, the others follow in order from U+0100, so
that no token holds a space or a control character. The vocabulary of a `tokenizer.json` and of a
GGUF file is written in it.
"""

from __future__ import annotations

import codecs

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(0x100) if byte not in set(_PRINTED))

BYTE_TO_CHARACTER: dict[int, str] = {byte: chr(byte) for byte in _PRINTED} | {
    byte: chr(0x100 + index) for index, byte in enumerate(_OTHERS)
}

# A charmap codec does a token in one call of C: the vocabularies are long, and an acceptor that
# has been respawned waits for this.
_ALPHABET = codecs.charmap_build("".join(BYTE_TO_CHARACTER[byte] for byte in range(0x100)))


def token_to_bytes(token: str) -> bytes | None:
    """The bytes that a vocabulary entry stands for; None if it is not written in the alphabet."""
    try:
        return codecs.charmap_encode(token, "strict", _ALPHABET)[0]
    except UnicodeEncodeError:
        return None
