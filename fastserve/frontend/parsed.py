"""Answers whose text is parsed: into thoughts, content and calls of tools.

A parsed choice is a choice like any other (streams.py): its text is parsed where it is rendered,
in chunks as they come or as a whole. What the parser says does not depend on how the text came, so
it matters to nobody whether pieces were merged on the way.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastserve.api.tools import Call, Thought
from fastserve.errors import InvalidRequest
from fastserve.frontend.whole import WholeChoice
from fastserve.generation import GrammarKind
from fastserve.text.answer import AnswerParser, Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fastserve.api.dialect import Chunks, PartChunks, PartDialect
    from fastserve.api.logprobs import TokenText
    from fastserve.api.requests import ChatRequest
    from fastserve.api.responses import Choice, Ending, Usage
    from fastserve.api.tools import Part as AnswerPart
    from fastserve.frontend.model import Model
    from fastserve.frontend.prepare import Prompt
    from fastserve.frontend.streams import Answer
    from fastserve.generation import RequestId
    from fastserve.text.reasoning import Thinking
    from fastserve.text.stream import TextStream
    from fastserve.text.tool_calls.formats import ToolFormat
    from fastserve.text.tool_calls.source import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsing:
    """How the answers to one request are parsed, and how they are told.

    `must_call`: a grammar makes the answer calls, whose function is `name` if it was named.
    `thinking`: where an answer begins, if thoughts are told from it. `calls`: it may have calls in
    the model's own format.
    """

    dialect: PartDialect
    thinking: Thinking | None
    tools: ToolFormat | None
    schemas: dict[str, Any]
    must_call: bool
    name: str | None
    parallel: bool
    show_thoughts: bool
    continuous_usage: bool
    calls: bool

    @classmethod
    def of(
        cls, request: ChatRequest, *, prompt: str, model: Model, dialect: PartDialect
    ) -> Parsing | None:
        """How to parse the answers to this `prompt`; None: they are plain text.

        Raises InvalidRequest if they would have to be parsed, and the server was not told how.
        """
        _check(request, model)
        # What a grammar makes is the answer from its first character on.
        may_think = request.separate_reasoning and request.grammar is None
        thoughts = model.reasoning_format if may_think else None
        must_call = request.must_call
        if not request.tools and thoughts is None:
            return None
        return cls(
            dialect=dialect,
            thinking=None if thoughts is None or must_call else thoughts.beginning(prompt),
            tools=model.tool_format if request.tools else None,
            schemas=request.tool_schemas,
            must_call=must_call,
            name=request.tool_choice.name,
            parallel=request.parallel_tool_calls,
            show_thoughts=request.include_reasoning,
            continuous_usage=request.continuous_usage,
            calls=bool(request.tools) and not must_call,
        )

    def parser(self) -> AnswerParser:
        """A parser of one answer."""
        if self.must_call:
            return AnswerParser.of_calls(name=self.name)
        return AnswerParser.of_model(thinking=self.thinking, tools=self.tools, schemas=self.schemas)

    def call_id(self) -> str:
        """An id for a call, of the length that the model's template insists on, if it does."""
        if self.tools is not None and self.tools.id_chars is not None:
            return secrets.token_hex(self.tools.id_chars)[: self.tools.id_chars]
        return self.dialect.call_prefix + secrets.token_hex(12)


def _check(request: ChatRequest, model: Model) -> None:
    if not request.include_reasoning and model.reasoning_format is None:
        raise InvalidRequest(
            "This server was not told how its model writes thoughts (--reasoning-parser), and so "
            "cannot leave them out.",
            param="include_reasoning",
            code="unsupported_value",
        )
    if not request.tools:
        return
    if request.grammar is not None:
        raise InvalidRequest(
            "'tools' cannot be called where an answer must match a grammar.",
            param="tools",
            code="unsupported_value",
        )
    if request.must_call:
        if GrammarKind.JSON_SCHEMA not in model.card.grammar_kinds:
            raise InvalidRequest(
                "This server's engine cannot make a model call a tool: 'tool_choice' can only be "
                "'none' or 'auto'.",
                param="tool_choice",
                code="unsupported_value",
            )
        return
    why = None
    if model.tool_format is None:
        why = "This server was not told how its model writes calls (--tool-parser)"
    elif not model.takes_tools:
        why = "The model's chat template has no place for tools (--chat-template)"
    if why is not None:
        raise InvalidRequest(
            f"{why}: 'tool_choice' cannot be 'auto'.", param="tools", code="unsupported_value"
        )


class _Reading:
    """One answer's parser, and what of its parts the client wants to hear of."""

    __slots__ = ("_ended", "_parser", "_parsing")

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing
        self._parser = parsing.parser()
        self._ended = False

    def push(self, text: str) -> Iterator[Event]:
        return self._wanted(self._parser.push(text))

    def finish(self) -> Iterator[Event]:
        return self._wanted(self._parser.finish())

    def _wanted(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            if self._ended:
                return
            if event[0] is Part.CALL_END:
                # One call was asked for, and whatever follows it is of the next.
                self._ended = not self._parsing.parallel
            if event[0] is not Part.REASONING or self._parsing.show_thoughts:
                yield event


class ParsedChunks:
    """The events of one choice: `Chunks` that take text, and have it rendered part by part.

    Logprobs and token ids are of all tokens, whatever part they are, and ride on the next content,
    or on a chunk without any at the end.
    """

    __slots__ = ("_chunks", "_ids", "_logprobs", "_parsing", "_reading")

    def __init__(self, parsing: Parsing, chunks: PartChunks) -> None:
        self._parsing = parsing
        self._chunks = chunks
        self._reading = _Reading(parsing)
        self._logprobs: list[TokenText] | None = None
        self._ids: list[int] | None = None

    def first(self, *, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        return self._chunks.first(prompt_token_ids=prompt_token_ids)

    def text(self, text: str) -> bytes:
        """The events of what `text` adds to the parts of the answer; mostly one, or none."""
        chunks = self._chunks
        events = []
        for part, piece in self._reading.push(text):
            if part is Part.CONTENT:
                events.append(chunks.text(piece))
            else:
                events.append(self._rendered(part, piece, None))
        return b"".join(events)

    def frame(self) -> None:
        """None: it depends on the parts."""

    def text_with(
        self,
        text: str,
        *,
        logprobs: Sequence[TokenText] | None = None,
        token_ids: Sequence[int] | None = None,
        completion_tokens: int | None = None,
    ) -> bytes:
        """The same, with what else was asked for."""
        if logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *logprobs]
        if token_ids is not None:
            self._ids = [*(self._ids or ()), *token_ids]
        return self._told(self._reading.push(text), completion_tokens)

    def finish(self, ending: Ending, /) -> bytes:
        """The events of what the end frees, and of the end."""
        counted = ending.completion_tokens if self._parsing.continuous_usage else None
        events = self._told(self._reading.finish(), counted)
        if self._logprobs or self._ids:
            events += self._content("", counted)
        return events + self._chunks.finish(ending)

    def usage(self, usage: Usage, /) -> bytes:
        return self._chunks.usage(usage)

    def _told(self, events: Iterator[Event], completion_tokens: int | None) -> bytes:
        return b"".join(
            [
                self._content(text, completion_tokens)
                if part is Part.CONTENT
                else self._rendered(part, text, completion_tokens)
                for part, text in events
            ]
        )

    def _content(self, text: str, completion_tokens: int | None) -> bytes:
        logprobs, ids = self._logprobs, self._ids
        self._logprobs = self._ids = None
        return self._chunks.text_with(
            text, logprobs=logprobs, token_ids=ids, completion_tokens=completion_tokens
        )

    def _rendered(self, part: Part, text: str, completion_tokens: int | None) -> bytes:
        chunks = self._chunks
        match part:
            case Part.REASONING:
                return chunks.reasoning(text, completion_tokens=completion_tokens)
            case Part.CALL:
                call_id = self._parsing.call_id()
                return chunks.call(call_id, text, completion_tokens=completion_tokens)
            case Part.ARGUMENTS:
                return chunks.arguments(text, completion_tokens=completion_tokens)
            case _:
                return chunks.end_call()


def chunks_of(answer: Answer, *, index: int, prompt_tokens: int, parsing: Parsing | None) -> Chunks:
    """What renders choice `index` of an answer, whose prompt has that many tokens."""
    what: Any = {
        "completion_id": answer.completion_id,
        "created": answer.created,
        "model": answer.model.card.name,
        "index": index,
        "prompt_tokens": prompt_tokens,
    }
    if parsing is None:
        return answer.dialect.chunks(**what)
    return ParsedChunks(parsing, parsing.dialect.part_chunks(**what))


class ParsedWholeChoice(WholeChoice):
    """A choice that is parsed when it is complete."""

    __slots__ = ("_parsing",)

    def __init__(
        self,
        answer: Answer,
        *,
        request_id: RequestId,
        text: TextStream,
        prompt_token_ids: Sequence[int] | None,
        prompt: Prompt,
        parsing: Parsing,
    ) -> None:
        super().__init__(
            answer,
            request_id=request_id,
            text=text,
            prompt_token_ids=prompt_token_ids,
            prompt=prompt,
        )
        self._parsing = parsing

    def rendered(self) -> Choice:
        choice = super().rendered()
        reading = _Reading(self._parsing)
        parts = self._parts_of([*reading.push(choice.text), *reading.finish()])
        content = "".join(part for part in parts if isinstance(part, str))
        return replace(choice, text=content, parts=parts)

    def _parts_of(self, events: list[Event]) -> list[AnswerPart]:
        """The parts of an answer, each in one piece."""
        parts: list[AnswerPart] = []
        for event, text in events:
            last = parts[-1] if parts else None
            match event, last:
                case Part.CONTENT, str():
                    parts[-1] = last + text
                case Part.CONTENT, _:
                    parts.append(text)
                case Part.REASONING, Thought(before):
                    parts[-1] = Thought(before + text)
                case Part.REASONING, _:
                    parts.append(Thought(text))
                case Part.CALL, _:
                    parts.append(Call(id=self._parsing.call_id(), name=text, arguments=""))
                case Part.ARGUMENTS, Call(arguments=before):
                    parts[-1] = replace(last, arguments=before + text)
        return parts
