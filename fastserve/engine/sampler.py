"""From a row of logits to the next token of one request.

In order: logit bias, the ban on endings before `min_tokens`, penalties (repetition over prompt and
answer, presence and frequency over the answer, as OpenAI's), what a grammar allows, temperature,
min_p, top_k, top_p, and the draw. A vocabulary has 50,000 to 250,000 entries and this runs for each
token, so nothing here sorts or accumulates over all of it: thresholds that provably keep too much
leave a few hundred.

Knows nothing of libraries or schedules. The same seed and logits give the same token everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastserve.errors import GenerationFailed
from fastserve.generation import LOGPROB_MIN, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from fastserve.engine.guidance import Guide
    from fastserve.generation import SamplingParams

    Floats = NDArray[np.float32]
    Ids = NDArray[np.intp]

# Below this the quotients overflow, and the answer is the greedy one anyway (vLLM's value).
_TEMPERATURE_MIN = 1e-5

# Entries whose sums or maxima are taken at once; about the square root of a vocabulary.
_BLOCK = 256


class GrammarEnded(Exception):
    """The text matches its grammar, and whatever else may follow is banned: it ends here."""


class Sampler:
    """The sampling state of one request: its penalties so far, and its random numbers."""

    complete = False
    """Whether the answer is at its end, whatever the last token was."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        prompt_token_ids: Sequence[int],
        ending_token_ids: Collection[int],
    ) -> None:
        """`ending_token_ids`: EOS and stop ids, impossible for the first `min_tokens` tokens."""
        self._params = params
        self._num_tokens = 0
        self._greedy = params.temperature < _TEMPERATURE_MIN
        # Clients send any 64-bit seed; the generator takes none below 0.
        seed = None if params.seed is None else params.seed % 2**64
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._ending = np.fromiter(ending_token_ids, np.intp)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp)
        self._bias = np.fromiter(params.logit_bias.values(), np.float32)
        self._answered: set[int] = set()
        self._subtrahend: Floats | None = None
        if params.presence_penalty or params.frequency_penalty:
            self._subtrahend = np.zeros(vocab_size, np.float32)
        self._seen: NDArray[np.bool_] | None = None
        if params.repetition_penalty != 1.0:
            self._seen = np.zeros(vocab_size, np.bool_)
            self._seen[np.asarray(prompt_token_ids, np.intp)] = True

    def sample(self, logits: Floats, *, best: int) -> int:
        """The next token. `best`: the argmax of `logits`, which is cheapest taken for all rows.

        `logits` is left as it is. Raises GenerationFailed for logits that are no numbers.
        """
        _require_finite(logits[best])
        adjusted = self._adjusted(logits)
        if adjusted is not logits:
            best = int(adjusted.argmax())
            _require_finite(adjusted[best])
        token_id = best if self._greedy else self._draw(adjusted, peak=adjusted[best])
        self._record(token_id)
        return token_id

    def _adjusted(self, logits: Floats) -> Floats:
        """`logits` with bias, ban and penalties; itself where there are none."""
        params = self._params
        banned = self._ending_is_banned()
        if not (self._bias_ids.size or banned or self._subtrahend is not None) and (
            self._seen is None
        ):
            return logits
        logits = logits.copy()
        logits[self._bias_ids] += self._bias
        if banned:
            logits[self._ending] = -np.inf
        if self._seen is not None:
            # CTRL (arXiv 1909.05858), in the form in use everywhere: a penalty above 1 makes a
            # token less likely whatever the sign of its logit.
            ids = np.flatnonzero(self._seen)
            seen = logits[ids]
            penalty = np.float32(params.repetition_penalty)
            logits[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._subtrahend is not None:
            logits -= self._subtrahend
        return logits

    def _ending_is_banned(self) -> bool:
        return self._num_tokens < self._params.min_tokens and self._ending.size > 0

    def _record(self, token_id: int) -> None:
        self._num_tokens += 1
        if self._subtrahend is not None:
            if token_id not in self._answered:
                self._answered.add(token_id)
                self._subtrahend[token_id] += self._params.presence_penalty
            self._subtrahend[token_id] += self._params.frequency_penalty
        if self._seen is not None:
            self._seen[token_id] = True

    def _draw(self, logits: Floats, *, peak: np.float32) -> int:
        params = self._params
        weights = np.exp((logits - peak) * np.float32(1.0 / params.temperature))
        point = self._random.random()
        if params.min_p <= 0.0 and params.top_k <= 0 and params.top_p >= 1.0:
            return _draw_from_all(weights, point=point)
        ids = likeliest(weights, min_p=params.min_p, top_k=params.top_k, top_p=params.top_p)
        return int(ids[_index_at(weights[ids], point=point)])


class GuidedSampler(Sampler):
    """A sampler whose tokens together match a grammar."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        guide: Guide,
        vocab_size: int,
        prompt_token_ids: Sequence[int],
        ending_token_ids: Collection[int],
        banned_token_ids: Collection[int],
    ) -> None:
        """`banned_token_ids`: never to be chosen; EOS, where it does not end the answer."""
        super().__init__(
            params,
            vocab_size=vocab_size,
            prompt_token_ids=prompt_token_ids,
            ending_token_ids=ending_token_ids,
        )
        self._guide = guide
        self._banned = np.fromiter(banned_token_ids, np.intp)

    @property
    def complete(self) -> bool:  # type: ignore[override] # it changes here, and nowhere else
        return self._guide.complete

    def _adjusted(self, logits: Floats) -> Floats:
        """Raises GrammarEnded, and InvalidRequest where the grammar leads nowhere."""
        allowed = self._guide.allowed()
        allowed[self._banned] = False
        if self._ending_is_banned():
            allowed[self._ending] = False
        if not allowed.any():
            if self._guide.accepting:
                raise GrammarEnded
            raise self._guide.dead_end()
        return np.where(allowed, super()._adjusted(logits), np.float32(-np.inf))

    def _record(self, token_id: int) -> None:
        super()._record(token_id)
        self._guide.accept(token_id)


def sampler_for(
    params: SamplingParams,
    *,
    vocab_size: int,
    prompt_token_ids: Sequence[int],
    eos_token_ids: frozenset[int],
    guide: Guide | None = None,
) -> Sampler:
    """The sampler of a request, which follows `guide` if there is one."""
    stops = frozenset(params.stop_token_ids)
    if guide is None:
        return Sampler(
            params,
            vocab_size=vocab_size,
            prompt_token_ids=prompt_token_ids,
            ending_token_ids=eos_token_ids | stops,
        )
    return GuidedSampler(
        params,
        guide=guide,
        vocab_size=vocab_size,
        prompt_token_ids=prompt_token_ids,
        ending_token_ids=eos_token_ids | stops,
        # To go on after an end that a grammar allows is to leave the grammar.
        banned_token_ids=eos_token_ids - stops if params.ignore_eos else (),
    )


def likeliest(weights: Floats, *, min_p: float, top_k: int, top_p: float) -> Ids:
    """The ids that survive min_p, then top_k, then top_p of what is left; most likely first.

    `weights` are proportional to the probabilities, the greatest being 1. Equal ones go by id.
    At least one survives. `min_p` 0, `top_k` 0 and `top_p` 1 are off.
    """
    floor = np.float32(min_p)
    if 0 < top_k < weights.size:
        floor = max(floor, _kth_at_least(weights, top_k))
    # What top_p keeps is a share of what min_p and top_k left, which is everything without them.
    if min_p > 0.0 or top_k > 0 or top_p >= 1.0:
        ids = _sorted_ids(weights, floor=floor)[: top_k or None]
        total = weights[ids].sum(dtype=np.float64)
    else:
        total = weights.sum(dtype=np.float64)
        ids = _sorted_ids(weights, floor=_nucleus_floor(weights, top_p=top_p, total=total))
    if top_p < 1.0:
        reached = np.cumsum(weights[ids].astype(np.float64))
        ids = ids[: int(np.searchsorted(reached, top_p * total)) + 1]
    return ids


def token_logprob(logits: Floats, token_id: int, *, best: int, num_top: int) -> TokenLogprob:
    """The logprobs of `token_id` and of the `num_top` likeliest, over the whole vocabulary.

    `logits` are the model's own and `best` their argmax. Equal ones go by id. No value is below
    LOGPROB_MIN.
    """
    peak = logits[best]
    norm = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    num_top = min(num_top, logits.size)
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        ids = _sorted_ids(logits, floor=_kth_at_least(logits, num_top))[:num_top]
        top = tuple((int(i), max(float(logits[i]) - norm, LOGPROB_MIN)) for i in ids)
    return TokenLogprob(logprob=max(float(logits[token_id]) - norm, LOGPROB_MIN), top=top)


def _require_finite(peak: np.float32) -> None:
    # argmax prefers a NaN to any number, so the peak tells of one anywhere in the row.
    if not np.isfinite(peak):
        raise GenerationFailed(f"the likeliest token has a logit of {peak}")


def _sorted_ids(values: Floats, *, floor: np.float32) -> Ids:
    ids = np.flatnonzero(values >= floor)
    return ids[np.argsort(-values[ids], kind="stable")]


def _kth_at_least(values: Floats, k: int) -> np.float32:
    """A floor that the `k` greatest values reach, and few others.

    The k-th greatest of the blocks' maxima: k blocks have one value at least that great. Ten times
    faster than selecting from all values.
    """
    maxima = np.maximum.reduceat(values, np.arange(0, values.size, _BLOCK))
    if k > maxima.size:
        maxima = values
    return np.float32(np.partition(maxima, maxima.size - k)[maxima.size - k])


def _nucleus_floor(weights: Floats, *, top_p: float, total: np.float64) -> np.float32:
    """A floor with a share of `top_p` at least above it, and little more where that is easy."""
    for floor in (1e-2, 1e-3, 1e-4):
        kept = weights[weights >= np.float32(floor)]
        if kept.sum(dtype=np.float64) >= top_p * total:
            return np.float32(floor)
    # All below this together weigh less than 1 - top_p.
    return np.float32((1.0 - top_p) * total / weights.size)


def _draw_from_all(weights: Floats, *, point: float) -> int:
    starts = np.arange(0, weights.size, _BLOCK)
    sums = np.add.reduceat(weights, starts)
    block = _index_at(sums, point=point)
    before = sums[:block].sum(dtype=np.float64)
    within = (point * sums.sum(dtype=np.float64) - before) / float(sums[block])
    start = int(starts[block])
    return start + _index_at(weights[start : start + _BLOCK], point=max(within, 0.0))


def _index_at(weights: Floats, *, point: float) -> int:
    """Where `point` (0 to 1) falls when the weights are laid end to end; never on a weight of 0."""
    reached = np.cumsum(weights.astype(np.float64))
    # Rounding may put the point at the very end; then the last weight that is not 0 is meant.
    target = min(point * reached[-1], np.nextafter(reached[-1], 0.0))
    return int(np.searchsorted(reached, target, side="right"))
