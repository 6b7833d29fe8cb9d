"""Which kind of choice an answer gets: streamed or whole, parsed or plain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.frontend.parsed import ParsedWholeChoice, chunks_of
from fastserve.frontend.streams import StreamedChoice
from fastserve.frontend.whole import WholeChoice
from fastserve.text.reasoning import ThoughtTokens
from fastserve.text.stream import TextStream

if TYPE_CHECKING:
    from fastserve.frontend.in_flight import Choice
    from fastserve.frontend.parsed import Parsing
    from fastserve.frontend.prepare import Prompt
    from fastserve.frontend.streams import Answer
    from fastserve.generation import RequestId


def choice_of(
    answer: Answer, prompt: Prompt, *, request_id: RequestId, index: int, parsing: Parsing | None
) -> Choice:
    """Choice `index` of an answer, which generates from `prompt`. `parsing` None: plain text."""
    choice = _choice_of(answer, prompt, request_id=request_id, index=index, parsing=parsing)
    if parsing is not None and parsing.thinking is not None:
        table = answer.model.parsed_table(tools=parsing.calls)
        choice.thoughts = ThoughtTokens(table.token_bytes, parsing.thinking)
    return choice


def _choice_of(
    answer: Answer, prompt: Prompt, *, request_id: RequestId, index: int, parsing: Parsing | None
) -> Choice:
    request = answer.request
    text = TextStream(
        answer.model.tokenizer,
        stops=request.stop,
        skip_special_tokens=request.skip_special_tokens,
        include_stop=request.include_stop_str_in_output,
        table=None if parsing is None else answer.model.parsed_table(tools=parsing.calls),
    )
    shown_ids = prompt.token_ids if request.return_token_ids else None
    if request.stream:
        return StreamedChoice(
            answer,
            request_id=request_id,
            text=text,
            chunks=chunks_of(
                answer, index=index, prompt_tokens=len(prompt.token_ids), parsing=parsing
            ),
            prompt_token_ids=shown_ids,
            prompt=prompt,
        )
    if parsing is not None:
        return ParsedWholeChoice(
            answer,
            request_id=request_id,
            text=text,
            prompt_token_ids=shown_ids,
            prompt=prompt,
            parsing=parsing,
        )
    return WholeChoice(
        answer,
        request_id=request_id,
        text=text,
        prompt_token_ids=shown_ids,
        prompt=prompt,
    )
