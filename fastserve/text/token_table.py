"""What each token is in bytes, and in text where its bytes are whole characters.

The one thing that detokenizing needs. A token's bytes may be half a character, so that only bytes
can be joined; but most tokens are whole characters, and for them the text is ready.

Knows nothing of how the table came to be (tokenizer.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class TokenTable:
    """`token_bytes[id]` and `token_texts[id]` (None: not whole characters), for every id."""

    __slots__ = ("_plain_bytes", "_plain_texts", "special_ids", "token_bytes", "token_texts")

    def __init__(self, token_bytes: list[bytes], *, special_ids: Collection[int] = ()) -> None:
        self.token_bytes = token_bytes
        self.special_ids = frozenset(special_ids)
        self.token_texts: list[str | None] = [_whole(token) for token in token_bytes]
        self._plain_bytes = list(token_bytes)
        self._plain_texts = list(self.token_texts)
        for special_id in self.special_ids:
            self._plain_bytes[special_id] = b""
            self._plain_texts[special_id] = ""

    def showing(self, token_ids: Collection[int]) -> TokenTable:
        """The table in which these are no control tokens, and so are shown."""
        if self.special_ids.isdisjoint(token_ids):
            return self
        return TokenTable(self.token_bytes, special_ids=self.special_ids.difference(token_ids))

    def bytes_shown(self, *, skip_special_tokens: bool) -> list[bytes]:
        """The bytes of each id; of special ones none, if they are skipped."""
        return self._plain_bytes if skip_special_tokens else self.token_bytes

    def texts_shown(self, *, skip_special_tokens: bool) -> list[str | None]:
        """The text of each id, or None; of special ones "", if they are skipped."""
        return self._plain_texts if skip_special_tokens else self.token_texts


def _whole(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None
