"""Choices that nobody sees before they are complete, and the one answer that has them all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastserve.api import responses
from fastserve.frontend.in_flight import Choice
from fastserve.generation import ANSWERED, STOPPED, Finish, FinishReason
from fastserve.http1.message import Response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.api.logprobs import TokenText
    from fastserve.frontend.prepare import Prompt
    from fastserve.frontend.streams import Answer
    from fastserve.generation import RequestId, TokenLogprob
    from fastserve.text.stream import TextStream


class WholeChoice(Choice):
    """A choice that is answered when it is complete."""

    __slots__ = (
        "_finish",
        "_ids",
        "_logprobs",
        "_parts",
        "_prompt",
        "_prompt_token_ids",
        "_text",
    )

    def __init__(
        self,
        answer: Answer,
        *,
        request_id: RequestId,
        text: TextStream,
        prompt_token_ids: Sequence[int] | None,
        prompt: Prompt,
    ) -> None:
        super().__init__(answer, request_id=request_id, wrote_s=0.0)
        self._text = text
        # Its logprobs come before any token; nobody else needs it any more, and it may be long.
        self._prompt = prompt if answer.request.prompt_logprobs is not None else None
        self._parts = [prompt.echo]
        self._ids: list[int] = []
        self._logprobs: list[TokenText] = []
        self._prompt_token_ids = prompt_token_ids
        self._finish = STOPPED

    def hear_prompt(self, logprobs: list[TokenLogprob]) -> None:
        """Take the logprobs of the prompt, before any token."""
        prompt, self._prompt = self._prompt, None
        assert prompt is not None, "nobody asked for them"
        self._logprobs = self.answer.token_texts.of_prompt(prompt, logprobs)

    def push(
        self,
        token_ids: list[int],
        finish: Finish | None,
        logprobs: list[TokenLogprob] | None,
        now_s: float,
    ) -> None:
        """Take one delta."""
        answer = self.answer
        if not answer.phases.first_token_s:
            answer.registry.observer.first_token(answer, now_s, finish)
        self.num_tokens += len(token_ids)
        if finish is not None:
            answer.phases.finished(finish)
            token_ids = answer.ending(self.request_id, token_ids, finish)
        if self.thoughts is not None:
            self.thoughts.push(token_ids)
        self._parts.append(self._text.push(token_ids))
        if answer.request.return_token_ids:
            self._ids += token_ids
        if logprobs is not None:
            self._logprobs += answer.token_texts.of_answer(token_ids, logprobs)
        if self._text.stopped is not None:
            self._end(STOPPED, abort=finish is None)
        elif finish is not None:
            self._end(finish, abort=False)

    def rendered(self) -> responses.Choice:
        request = self.answer.request
        return responses.Choice(
            text="".join(self._parts),
            finish_reason=self._finish.reason,
            stop_reason=self._text.stopped or self._finish.stop_token_id,
            logprobs=self._logprobs if request.logprobs is not None else None,
            token_ids=self._ids if request.return_token_ids else None,
            prompt_token_ids=self._prompt_token_ids,
            embedding=self._finish.embedding,
        )

    def _end(self, finish: Finish, *, abort: bool) -> None:
        answer = self.answer
        self.finish_reason = finish.reason
        if finish.reason not in ANSWERED:
            answer.fail_by(finish)
            return
        if self._text.stopped is None:
            self._parts.append(self._text.finish())
            if self._text.stopped is not None:
                finish = STOPPED  # as in a stream
        self._finish = finish
        self.finish_reason = finish.reason
        if answer.closing(self, abort=abort):
            respond_whole(answer)


def respond_empty(answer: Answer) -> None:
    """Answer an exchange that asks for no token: the echo of its prompts is all there is."""
    nothing = Finish(reason=FinishReason.LENGTH)
    for choice in list(answer.choices):
        choice.push([], nothing, None, time.monotonic())


def respond_whole(answer: Answer) -> None:
    """Answer with every choice at once."""
    whole = [choice.rendered() for choice in answer.choices if isinstance(choice, WholeChoice)]
    body = answer.dialect.whole(
        whole,
        completion_id=answer.completion_id,
        created=answer.created,
        model=answer.model.card.name,
        usage=answer.usage(),
    )
    answer.finished(status=200)
    answer.exchange.respond(Response(200, body=body))
