"""What the engine's words mean to a client: which tokens are text, what logprobs are told with,
and which error a failure is.

Pure. Knows nothing of exchanges or of how an answer is rendered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.api.logprobs import TokenText, token_string
from fastserve.errors import FastserveError, GenerationFailed, InvalidRequest, Overloaded
from fastserve.generation import Finish, FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fastserve.frontend.model import Model
    from fastserve.frontend.prepare import Prompt
    from fastserve.generation import TokenLogprob


def visible(token_ids: list[int], finish: Finish, *, include_stop: bool, model: Model) -> list[int]:
    """The tokens of a last delta without the one that ended the request, which is no text."""
    if finish.reason is not FinishReason.STOP or not token_ids or include_stop:
        return token_ids
    ended_by_id = finish.stop_token_id is not None
    if ended_by_id or token_ids[-1] in model.card.eos_token_ids:
        return token_ids[:-1]
    return token_ids


class TokenTexts:
    """The texts that the logprobs of one exchange are told with.

    `as_ids`: each token is `token_id:N`. `skip_special_tokens`: control tokens are no part of the
    answer's text, though they are told.
    """

    __slots__ = ("_as_ids", "_control", "_table")

    def __init__(self, model: Model, *, as_ids: bool, skip_special_tokens: bool) -> None:
        self._table = model.tokenizer.token_bytes
        self._as_ids = as_ids
        self._control = model.tokenizer.table.special_ids if skip_special_tokens else frozenset()

    def of_answer(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> list[TokenText]:
        """The texts of an answer's next tokens."""
        return [
            self._text(token_id, entry.logprob, entry.top, hidden=token_id in self._control)
            for token_id, entry in zip(token_ids, logprobs, strict=False)
        ]

    def of_prompt(self, prompt: Prompt, logprobs: Sequence[TokenLogprob]) -> list[TokenText]:
        """The texts of a prompt's tokens, of which the first has no logprob."""
        control: Collection[int] = () if prompt.echo_control else self._control
        rows = [(None, ()), *((entry.logprob, entry.top) for entry in logprobs)]
        return [
            self._text(token_id, *row, hidden=place < prompt.num_unechoed or token_id in control)
            for place, (token_id, row) in enumerate(zip(prompt.token_ids, rows, strict=False))
        ]

    def _text(
        self,
        token_id: int,
        logprob: float | None,
        top: tuple[tuple[int, float], ...],
        *,
        hidden: bool,
    ) -> TokenText:
        table, string = self._table, self._string
        return TokenText(
            token=string(token_id),
            raw=table[token_id],
            logprob=logprob,
            top=tuple((string(other), table[other], value) for other, value in top),
            hidden=hidden,
        )

    def _string(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else token_string(self._table[token_id])


def failure_of(finish: Finish) -> FastserveError:
    """The error to answer when the engine ended a request otherwise than with a text."""
    message = finish.error or "the engine gave the request up"
    if finish.refusal is not None:
        refusal = finish.refusal
        return Overloaded(message, rejection=refusal.reason, retry_after_s=refusal.retry_after_s)
    return (
        InvalidRequest(message, param=finish.param) if finish.invalid else GenerationFailed(message)
    )
