"""The JSON string of each token that is text by itself, made once for all streams.

Most tokens are whole characters, so what a plain stream's chunk says of one is always the same
bytes. They are made when a token is first seen; what is not here takes the way of any delta.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.api.chunks import json_string

if TYPE_CHECKING:
    from fastserve.text.token_table import TokenTable

# About 100 bytes each: nearly all that a language uses, and no more than 3 MB.
PIECES_MAX = 32_768
PIECE_BYTES_MAX = 256


class Pieces:
    """`ready[token_id]` is a token's text as a JSON string; only those that have been learnt."""

    __slots__ = ("_texts", "ready")

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool) -> None:
        self._texts = table.texts_shown(skip_special_tokens=skip_special_tokens)
        self.ready: dict[int, bytes] = {}

    def learn(self, token_id: int) -> None:
        """Have a token ready from now on, if it is text by itself."""
        text = self._texts[token_id]
        if text and len(self.ready) < PIECES_MAX:
            piece = json_string(text)
            if len(piece) <= PIECE_BYTES_MAX:
                self.ready[token_id] = piece
