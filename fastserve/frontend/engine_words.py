"""What the engine's words mean to a client: which tokens are text, what logprobs are told with,
and which error a failure is.

Pure. Knows nothing of exchanges or of how an answer is rendered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.api.logprobs import TokenText, token_string
from fastserve.errors import FastserveError, GenerationFailed, InvalidRequest
from fastserve.generation import Finish, FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.frontend.model import Model
    from fastserve.generation import TokenLogprob


def visible(token_ids: list[int], finish: Finish, *, include_stop: bool, model: Model) -> list[int]:
    """The tokens of a last delta without the one that ended the request, which is no text."""
    if finish.reason is not FinishReason.STOP or not token_ids or include_stop:
        return token_ids
    ended_by_id = finish.stop_token_id is not None
    if ended_by_id or token_ids[-1] in model.card.eos_token_ids:
        return token_ids[:-1]
    return token_ids


def told(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], *, model: Model
) -> list[TokenText]:
    """The texts that logprobs are told with."""
    table = model.tokenizer.token_bytes
    return [
        TokenText(
            token=token_string(table[token_id]),
            raw=table[token_id],
            logprob=entry.logprob,
            top=tuple(
                (token_string(table[other]), table[other], value) for other, value in entry.top
            ),
        )
        for token_id, entry in zip(token_ids, logprobs, strict=False)
    ]


def failure_of(finish: Finish) -> FastserveError:
    """The error to answer when the engine ended a request otherwise than with a text."""
    message = finish.error or "the engine gave the request up"
    return (
        InvalidRequest(message, param=finish.param) if finish.invalid else GenerationFailed(message)
    )
