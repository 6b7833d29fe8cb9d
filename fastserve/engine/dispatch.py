"""Which rank a request goes to: by load, and by what the ranks have read before.

Load is what a rank has been given and has not finished, in tokens. A prompt that begins as one that
a rank has had lately goes there, since that rank may still have its beginning in the KV cache; but
not where others wait for much less. Prompts are compared in blocks, whose hashes are chained, so
that a block is equal only if everything before it is.

Pure: no socket, clock or process. Knows nothing of what a rank does with a request.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from fastserve.lane.ids import LANE_SHIFT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from fastserve.generation import RequestId

# Nobody knows how long an answer becomes, and most stop long before they must.
ANSWER_TOKENS_EXPECTED_MAX = 256

# A shared beginning shorter than a block is not worth a detour: most chats have one, by their
# template.
PREFIX_BLOCK_TOKENS = 64
# Of longer prompts only so much is compared, and of what a rank has read only so much is
# remembered: half a million tokens, which takes about 1 MB for each rank.
PREFIX_BLOCKS_MAX = 256
BLOCKS_REMEMBERED_MAX = 8192

# A prefix is followed to a rank that has at most so much more to do than the least loaded.
IMBALANCE_TOKENS_MAX = 2048


class _Given(NamedTuple):
    """A request that a rank has been given, and what it counts for."""

    rank: int
    tokens: int
    prompt_tokens: int


class GivenToRank(NamedTuple):
    """What a rank has been given and has not finished."""

    num_requests: int
    num_prompt_tokens: int


class Dispatcher:
    """Chooses among `num_ranks` ranks, and keeps account of what each has been given."""

    def __init__(self, num_ranks: int) -> None:
        self.loads = [0] * num_ranks
        """Of each rank, in tokens."""
        self._read: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_ranks)]
        self._given: dict[RequestId, _Given] = {}
        self._num_requests = [0] * num_ranks
        self._num_prompt_tokens = [0] * num_ranks
        self._last = num_ranks - 1

    def give(
        self,
        request_id: RequestId,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        full: Collection[int],
    ) -> int:
        """Choose a rank for a request, not one of the `full` if there are others; return it."""
        blocks = _blocks(prompt)
        rank = self._choose(blocks, full=full)
        tokens = len(prompt) + min(max_tokens, ANSWER_TOKENS_EXPECTED_MAX)
        self._given[request_id] = _Given(rank, tokens, len(prompt))
        self.loads[rank] += tokens
        self._num_requests[rank] += 1
        self._num_prompt_tokens[rank] += len(prompt)
        self._remember(rank, blocks)
        self._last = rank
        return rank

    def rank_of(self, request_id: RequestId) -> int | None:
        """The rank that has this request, or None if none has it any more."""
        given = self._given.get(request_id)
        return None if given is None else given.rank

    def given(self, rank: int) -> GivenToRank:
        """What that rank has now."""
        return GivenToRank(self._num_requests[rank], self._num_prompt_tokens[rank])

    def ended(self, request_ids: Iterable[int]) -> None:
        """Forget requests that have ended or were aborted; unknown ones are no error."""
        for request_id in request_ids:
            if given := self._given.pop(request_id, None):  # type: ignore[call-overload]  # any int
                self.loads[given.rank] -= given.tokens
                self._num_requests[given.rank] -= 1
                self._num_prompt_tokens[given.rank] -= given.prompt_tokens

    def forget_lane(self, lane: int) -> None:
        """Forget whatever came from that lane."""
        self.ended([one for one in self._given if one >> LANE_SHIFT == lane])

    def _choose(self, blocks: Sequence[int], *, full: Collection[int]) -> int:
        open_ranks = [rank for rank in self._in_turn() if rank not in full] or self._in_turn()
        least = min(self.loads[rank] for rank in open_ranks)
        matches = {
            rank: _matching(blocks, self._read[rank])
            for rank in open_ranks
            if self.loads[rank] - least <= IMBALANCE_TOKENS_MAX
        }
        # min() takes the first of equals, and so whoever's turn it is.
        return min(matches, key=lambda rank: (-matches[rank], self.loads[rank]))

    def _in_turn(self) -> list[int]:
        count = len(self.loads)
        return [(self._last + 1 + offset) % count for offset in range(count)]

    def _remember(self, rank: int, blocks: Sequence[int]) -> None:
        read = self._read[rank]
        for block in blocks:
            read[block] = None
            read.move_to_end(block)
        while len(read) > BLOCKS_REMEMBERED_MAX:
            read.popitem(last=False)


def _blocks(prompt: Sequence[int]) -> list[int]:
    """The hashes of the prompt's whole blocks, each of all that comes before it, too."""
    blocks: list[int] = []
    above = 0
    whole = min(len(prompt) // PREFIX_BLOCK_TOKENS, PREFIX_BLOCKS_MAX)
    for start in range(0, whole * PREFIX_BLOCK_TOKENS, PREFIX_BLOCK_TOKENS):
        above = hash((above, *prompt[start : start + PREFIX_BLOCK_TOKENS]))
        blocks.append(above)
    return blocks


def _matching(blocks: Sequence[int], read: Collection[int]) -> int:
    """How many blocks, from the first on, have been read."""
    count = 0
    for block in blocks:
        if block not in read:
            break
        count += 1
    return count
