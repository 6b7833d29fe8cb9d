"""What earlier requests left computed: the longest beginning that a new prompt shares with any.

A state is a sequence's share of the KV cache, copied out of it. The ones longest unused go first
when they weigh too much together. Whole arrays are compared, as fast as memory is read: of a
thousand tokens in a microsecond or two, and there are a few hundred states at most.

Knows nothing of slots, of requests, or of what is in a state.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Tokens = NDArray[np.int32]
    State = NDArray[np.uint8]

# Fewer tokens are computed sooner than a state is copied.
PREFIX_TOKENS_MIN = 16


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A state, and the tokens that it is the state of."""

    tokens: Tokens
    state: State


class PrefixCache:
    """States by their tokens, of `bytes_max` together, the most recently used last."""

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._next_key = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, tokens: Tokens) -> tuple[Kept | None, int]:
        """The state that begins like `tokens` for longest, and how long; it counts as used."""
        best, best_length = None, 0
        for key, kept in self._kept.items():
            length = common_length(kept.tokens, tokens)
            # Of equals the newest, which the others' going does not take along.
            if length and length >= best_length:
                best, best_length = key, length
        if best is None:
            return None, 0
        self._kept.move_to_end(best)
        return self._kept[best], best_length

    def covers(self, tokens: Tokens) -> bool:
        """Whether a state here begins with all of `tokens`."""
        return self.longest(tokens)[1] == len(tokens)

    def put(self, tokens: Tokens, state: State) -> None:
        """Keep a state, in place of those that it goes on from. Too large a one is not kept."""
        if state.nbytes > self._bytes_max:
            return
        for key, kept in list(self._kept.items()):
            if common_length(kept.tokens, tokens) == len(kept.tokens):
                self._drop(key)
        self._kept[self._next_key] = Kept(tokens, state)
        self._next_key += 1
        self.bytes += state.nbytes
        while self.bytes > self._bytes_max:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: int) -> None:
        self.bytes -= self._kept.pop(key).state.nbytes


def as_tokens(token_ids: Sequence[int]) -> Tokens:
    """Token ids as they are compared here."""
    return np.asarray(token_ids, np.int32)


def common_length(one: Tokens, other: Tokens) -> int:
    """How many tokens the two have in common from their first on."""
    length = min(len(one), len(other))
    # Most have nothing in common, which the first few tell without reading on.
    head = min(length, PREFIX_TOKENS_MIN)
    if not np.array_equal(one[:head], other[:head]):
        length = head
    unequal = one[:length] != other[:length]
    first = int(unequal.argmax()) if length else 0
    return first if length and unequal[first] else length
