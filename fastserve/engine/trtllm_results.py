"""What TensorRT-LLM says of a request, as deltas.

A result is one object that grows from response to response, and its own "diff" attributes are
those of the last response, even if that was another sequence's. So each request has a cursor here,
which remembers what it has already handed on. Each response is copied at once: the next changes it.

Pure. Knows nothing of threads or of who reads the deltas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fastserve.generation import Finish, FinishReason, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.engine.trtllm_api import CompletionOutput, Logprob
    from fastserve.generation import RequestId, SamplingParams


class Delta(NamedTuple):
    """What one response added to a request. `logprobs`: one for each token, if asked for."""

    request_id: RequestId
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None


class Cursor:
    """How far one request's result has been read."""

    __slots__ = ("_num_read", "_num_top", "_request_id", "_stop_token_ids")

    def __init__(
        self, request_id: RequestId, params: SamplingParams, *, eos_token_ids: Sequence[int]
    ) -> None:
        self._request_id = request_id
        self._num_top = params.logprobs
        self._num_read = 0
        # An id that ends any text is no stop id, whoever else names it.
        ends = () if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids).difference(ends)

    def advance(self, output: CompletionOutput) -> Delta | None:
        """Return what is new in `output`, or None.

        A token waits for its log probability, if that was asked for.
        """
        start, end = self._num_read, len(output.token_ids)
        logprobs: list[TokenLogprob] | None = None
        if self._num_top is not None:
            entries = output.logprobs or []
            end = max(start, min(end, len(entries)))
            logprobs = [
                _token_logprob(token_id, entries[index], num_top=self._num_top)
                for index, token_id in enumerate(output.token_ids[start:end], start)
            ]
        finish = self._finish(output, num_lacking=len(output.token_ids) - end)
        if start >= end and finish is None:
            return None
        self._num_read = max(start, end)
        return Delta(self._request_id, output.token_ids[start:end], logprobs, finish)

    def _finish(self, output: CompletionOutput, *, num_lacking: int) -> Finish | None:
        match output.finish_reason:
            case None:
                return None
            case "cancelled":
                return Finish(reason=FinishReason.ABORT)
            case _ if num_lacking:
                return _failed(f"{num_lacking} tokens came without their log probabilities")
            case "length":
                return Finish(reason=FinishReason.LENGTH)
            case "stop":
                return Finish(
                    reason=FinishReason.STOP, stop_token_id=self._stop_token_id(output.stop_reason)
                )
            case "timeout":
                return _failed("the request ran into TensorRT-LLM's time limit")
            case other:
                return _failed(f"TensorRT-LLM ended the request as {other!r}")

    def _stop_token_id(self, stop_reason: int | str | None) -> int | None:
        # A set of ints finds no string.
        return stop_reason if stop_reason in self._stop_token_ids else None

    def fail(self, error: str, *, invalid: bool = False) -> Delta:
        """Return the end of a request that did not end by itself."""
        finish = Finish(reason=FinishReason.ERROR, error=error, invalid=invalid)
        return Delta(self._request_id, [], None, finish)


def _failed(error: str) -> Finish:
    return Finish(reason=FinishReason.ERROR, error=error)


def _token_logprob(
    token_id: int, entry: dict[int, Logprob] | float, *, num_top: int
) -> TokenLogprob:
    """The sampled token's entry is among the others, whether it is one of the best or not."""
    if not isinstance(entry, dict):
        return TokenLogprob(logprob=entry)
    chosen = entry[token_id].logprob
    pairs = [(other, value.logprob) for other, value in entry.items()]
    pairs.sort(key=lambda pair: pair[1], reverse=True)
    return TokenLogprob(logprob=chosen, top=tuple(pairs[:num_top]))
