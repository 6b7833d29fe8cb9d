"""One step's outputs, parted by lane: pure columns in, pure columns out.

Hot path: every token of the server passes here, about 0.2 microseconds each. So it is flatter than
house style. Tokens of a request that nobody reads as they come are gathered here and leave with
its finish: a message costs far more than a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fastserve.lane.ids import LANE_SHIFT
from fastserve.lane.messages import Outputs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastserve.engine.interface import StepOutputs
    from fastserve.generation import Finish, TokenLogprob


class Fanout:
    """Parts steps by lane, and holds the tokens of gathered requests until they finish."""

    __slots__ = ("_gathered", "_gathered_logprobs", "_prompt_logprobs")

    def __init__(self) -> None:
        self._gathered: dict[int, list[int]] = {}
        self._gathered_logprobs: dict[int, list[TokenLogprob]] = {}
        # Of gathered requests, until they finish.
        self._prompt_logprobs: dict[int, list[TokenLogprob]] = {}

    def gather(self, request_id: int) -> None:
        """Hold this request's tokens until its finish."""
        self._gathered[request_id] = []

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop what is held of requests that were aborted."""
        for request_id in request_ids:
            self._gathered.pop(request_id, None)
            self._gathered_logprobs.pop(request_id, None)
            self._prompt_logprobs.pop(request_id, None)

    def part(self, step: StepOutputs) -> dict[int, Outputs]:
        """Return the step's outputs for each lane that has any."""
        if not self._gathered and (lane := _only_lane(step)) is not None:
            # As it is in benches and small servers: one lane, and nothing to hold.
            return {
                lane: Outputs(
                    request_ids=step.request_ids,
                    token_ids=step.token_ids,
                    counts=step.counts,
                    finishes=step.finishes,
                    logprobs=step.logprobs,
                    prompt_logprobs=step.prompt_logprobs,
                )
            }
        columns: dict[int, _Columns] = {}
        gathered = self._gathered
        token_ids, counts, finishes = step.token_ids, step.counts, step.finishes
        at = 0
        for index, request_id in enumerate(step.request_ids):
            count = 1 if counts is None else counts[index]
            tokens = token_ids[at : at + count]
            at += count
            finish = finishes.get(index)
            logprobs = step.logprobs.get(index) if step.logprobs else None
            if request_id in gathered:
                gathered[request_id] += tokens
                if logprobs:
                    self._gathered_logprobs.setdefault(request_id, []).extend(logprobs)
                if finish is None:
                    continue
                tokens = gathered.pop(request_id)
                logprobs = self._gathered_logprobs.pop(request_id, None)
            lane = request_id >> LANE_SHIFT
            column = columns.get(lane)
            if column is None:
                column = columns[lane] = _Columns([], [], [], {}, {}, {})
            column.request_ids.append(request_id)
            column.token_ids.extend(tokens)
            column.counts.append(len(tokens))
            if finish is not None:
                column.finishes[len(column.counts) - 1] = finish
            if logprobs is not None:
                column.logprobs[len(column.counts) - 1] = logprobs
        if step.prompt_logprobs or self._prompt_logprobs:
            self._part_prompt_logprobs(step, columns)
        return {lane: column.outputs() for lane, column in columns.items()}

    def _part_prompt_logprobs(self, step: StepOutputs, columns: dict[int, _Columns]) -> None:
        """Put these beside what leaves; few requests have any, so the loop does not look."""
        for index, row in step.prompt_logprobs.items():
            self._prompt_logprobs[step.request_ids[index]] = row
        for request_id in self._prompt_logprobs.keys() - self._gathered.keys():
            column = columns[request_id >> LANE_SHIFT]
            row = self._prompt_logprobs.pop(request_id)
            column.prompt_logprobs[column.request_ids.index(request_id)] = row


def _only_lane(step: StepOutputs) -> int | None:
    """The one lane of all the step's requests: lane is the high bits, so extremes decide."""
    if not step.request_ids:
        return None
    lane = min(step.request_ids) >> LANE_SHIFT
    return lane if max(step.request_ids) >> LANE_SHIFT == lane else None


class _Columns(NamedTuple):
    """One lane's outputs in the making."""

    request_ids: list[int]
    token_ids: list[int]
    counts: list[int]
    finishes: dict[int, Finish]
    logprobs: dict[int, list[TokenLogprob]]
    prompt_logprobs: dict[int, list[TokenLogprob]]

    def outputs(self) -> Outputs:
        one_each = self.counts.count(1) == len(self.counts)
        return Outputs(
            request_ids=self.request_ids,
            token_ids=self.token_ids,
            counts=None if one_each else self.counts,
            finishes=self.finishes,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
