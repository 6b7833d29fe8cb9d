"""A streamed answer: a delta arrives, its text leaves, all in one call.

Nothing is awakened by a delta. What a client is not ready to take is merged into the next chunk, so
a slow reader costs bounded memory. The chunks of most tokens are not made here (in_flight.py): a
choice of plain text lends out what they are made of while there is nothing else to be done.

An Answer is one exchange's generations; each of its choices is one request of the engine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastserve.api import responses
from fastserve.errors import RequestTimeout
from fastserve.frontend.engine_words import TokenTexts, failure_of, visible
from fastserve.frontend.in_flight import NO_PIECES, Choice
from fastserve.frontend.observing import Phases
from fastserve.frontend.pieces import PIECE_BYTES_MAX
from fastserve.frontend.refusals import error_response
from fastserve.generation import ANSWERED, STOPPED, Finish, FinishReason
from fastserve.http1.exchange import CHUNK_HEADS, CHUNK_TAIL
from fastserve.metrics.catalog import ABORTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.api.dialect import Chunks, Dialect
    from fastserve.api.logprobs import TokenText
    from fastserve.api.requests import ChatRequest, CompletionRequest
    from fastserve.errors import FastserveError
    from fastserve.frontend.model import Model
    from fastserve.frontend.prepare import Prompt
    from fastserve.frontend.registry import Registry
    from fastserve.generation import RequestId, TokenLogprob
    from fastserve.http1.exchange import Exchange
    from fastserve.text.stream import TextStream


class Answer:
    """One exchange and its generations, until the last of them ends or the client goes.

    `pinged_s`: when a ping was last due. `deadline_s`: by when it must
    have ended (monotonic); infinite: whenever.
    """

    __slots__ = (
        "cached_tokens",
        "choices",
        "completion_id",
        "created",
        "deadline_s",
        "dialect",
        "exchange",
        "model",
        "num_open",
        "parent_span_id",
        "phases",
        "pieces",
        "pinged_s",
        "prompt_tokens",
        "received_s",
        "registry",
        "request",
        "token_texts",
        "trace",
    )

    def __init__(
        self,
        exchange: Exchange,
        *,
        request: ChatRequest | CompletionRequest,
        dialect: Dialect,
        model: Model,
        registry: Registry,
        prompt_tokens: int,
        received_s: float,
        deadline_s: float,
    ) -> None:
        self.exchange = exchange
        self.request = request
        self.dialect = dialect
        self.model = model
        self.registry = registry
        self.prompt_tokens = prompt_tokens
        self.received_s = received_s
        self.deadline_s = deadline_s
        self.phases = Phases()
        self.trace, self.parent_span_id = registry.observer.traces.begin(exchange.head)
        self.created = int(time.time())
        self.completion_id = dialect.answer_id(exchange.request_id)
        self.token_texts = TokenTexts(
            model,
            as_ids=request.return_tokens_as_token_ids,
            skip_special_tokens=request.skip_special_tokens,
        )
        self.pieces = model.pieces if request.skip_special_tokens else model.pieces_all
        self.choices: list[Choice] = []
        self.cached_tokens: dict[RequestId, int] = {}
        self.num_open = 0
        # The first ping comes after a whole interval, so that what fails at once has its status.
        self.pinged_s = received_s
        exchange.on_disconnect = self._on_disconnect

    @property
    def in_flight(self) -> list[RequestId]:
        """The requests that the engine still works on."""
        return [choice.request_id for choice in self.choices if choice.open]

    def closing(self, choice: Choice, *, abort: bool) -> bool:
        """Note that `choice` has its end; return whether it was the last one open."""
        choice.open = False
        self.phases.last_token_s = time.monotonic()
        self.num_open -= 1
        self.registry.forget(choice.request_id)
        if abort:
            self.registry.abort([choice.request_id])
            self.registry.meter.count(ABORTS, "stop_string")
        return self.num_open == 0

    @property
    def num_tokens(self) -> int:
        """The tokens of all choices, so far."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int | None:
        """How many of them were thoughts; None: nobody looks for them."""
        told = [choice.thoughts.number for choice in self.choices if choice.thoughts is not None]
        return sum(told) if told else None

    @property
    def num_cached_tokens(self) -> int | None:
        """How many tokens of its prompts the engine had already; None: it did not tell."""
        by_choice = [self.cached_tokens.get(choice.request_id) for choice in self.choices]
        return responses.cached_of_all(by_choice, n=self.request.n)

    def usage(self) -> responses.Usage:
        return responses.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.num_tokens,
            cached_tokens=self.num_cached_tokens,
            reasoning_tokens=self.reasoning_tokens,
        )

    def ending(self, request_id: RequestId, token_ids: list[int], finish: Finish) -> list[int]:
        """Note what the engine tells of a request at its end; return the last tokens to be seen."""
        self.cached_tokens[request_id] = finish.cached_tokens
        include_stop = self.request.include_stop_str_in_output
        return visible(token_ids, finish, include_stop=include_stop, model=self.model)

    def fail_by(self, finish: Finish) -> None:
        """End the exchange by what the engine said of one of its requests."""
        (self.fail if finish.refusal is None else self.refuse)(failure_of(finish))

    def refuse(self, error: FastserveError) -> None:
        """End the exchange with `error`; the engine has taken none of its requests."""
        for choice in self.choices:
            choice.open = False
            self.registry.forget(choice.request_id)
        self.registry.rejected(error)
        self.fail(error)

    def expire(self) -> None:
        """Its time is up."""
        had_s = self.deadline_s - self.received_s
        self.fail(RequestTimeout(f"not answered within {had_s:.6g} s"), why="timeout")

    def fail(self, error: FastserveError, *, why: str = "failed") -> None:
        """End the exchange with `error`; what is in flight of it is aborted, for reason `why`."""
        self._give_up(FinishReason.ERROR, why=why)
        self.finished(status=error.status, error=error)
        if self.exchange.started:
            self.exchange.end(self.dialect.error_event(error))
        else:
            self.exchange.respond(error_response(error, body=self.dialect.error_body(error)))

    def ping(self) -> None:
        """Keep a silent stream open for proxies; starts it if need be."""
        quiet = all(choice.wrote_s < self.pinged_s for choice in self.choices)
        if self.request.stream and quiet and self.exchange.writable:
            if not self.exchange.started:
                self.exchange.start_stream()
            if self.phases.first_token_s:
                self.exchange.write(self.dialect.ping)
            else:
                self.exchange.probe()  # no dialect's stream begins with a ping of its own
        self.pinged_s = time.monotonic()

    @property
    def streamed(self) -> list[StreamedChoice]:
        """Its choices, if it is a stream."""
        return [choice for choice in self.choices if isinstance(choice, StreamedChoice)]

    def flush(self) -> None:
        """The client is ready again: write what was held."""
        # One write for all: after the first of many the client might not be ready any more.
        self.exchange.write(b"".join([choice.release() for choice in self.streamed]))

    def pause(self) -> None:
        """The client is not ready: hold what comes."""
        for choice in self.streamed:
            choice.pause()

    def finished(self, *, status: int, error: FastserveError | None = None) -> None:
        """Tell how it went, and let go.

        Before the last bytes leave: whoever has them finds this request in the metrics.
        """
        self.registry.closed(self)
        self.registry.observer.finished(self, status=status, error=error)
        self.choices = []  # they know us: no cycle is left for the collector

    def _give_up(self, reason: FinishReason, *, why: str) -> None:
        for choice in self.choices:
            choice.finish_reason = choice.finish_reason or reason
        in_flight = self.in_flight
        if in_flight:
            for choice in self.choices:
                choice.open = False
            self.num_open = 0
            for request_id in in_flight:
                self.registry.forget(request_id)
            self.registry.abort(in_flight)
            self.registry.meter.count(ABORTS, why, by=len(in_flight))

    def _on_disconnect(self) -> None:
        self._give_up(FinishReason.ABORT, why="client_gone")
        # What nginx logs for a client that closed before its answer.
        self.finished(status=499)


class StreamedChoice(Choice):
    """A choice whose text leaves as it comes."""

    __slots__ = (
        "_chunks",
        "_echo",
        "_exchange",
        "_frame",
        "_held",
        "_held_ids",
        "_held_logprobs",
        "_plain",
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
        chunks: Chunks,
        prompt_token_ids: Sequence[int] | None,
        prompt: Prompt,
    ) -> None:
        super().__init__(answer, request_id=request_id, wrote_s=answer.received_s)
        request = answer.request
        self._exchange = answer.exchange
        self._text = text
        self._chunks = chunks
        self._prompt_token_ids = prompt_token_ids
        # Where the prompt's logprobs are wanted they come with the first token (hear_prompt), and
        # its echo with them; nobody else needs it any more, and it may be long.
        heard = request.prompt_logprobs is not None
        self._prompt = prompt if heard else None
        self._echo = "" if heard else prompt.echo
        self._held = ""
        self._held_ids: list[int] = []
        self._held_logprobs: list[TokenText] = []
        self._plain = not (
            request.logprobs is not None or request.return_token_ids or request.continuous_usage
        )
        # Of what its chunks are made by InFlight, in its better moments.
        self._frame = chunks.frame() if self._plain and not request.stop else None

    def begin(self) -> bytes:
        """Return the events that come before the first token."""
        first = self._chunks.first(prompt_token_ids=self._prompt_token_ids)
        return first + self._event(self._echo) if self._echo else first

    def hear_prompt(self, logprobs: list[TokenLogprob]) -> None:
        """Take the logprobs of the prompt, before any token: with the echo they wait for a text."""
        prompt, self._prompt = self._prompt, None
        assert prompt is not None, "nobody asked for them"
        self._held = prompt.echo
        self._held_logprobs = self.answer.token_texts.of_prompt(prompt, logprobs)

    def push(
        self,
        token_ids: list[int],
        finish: Finish | None,
        logprobs: list[TokenLogprob] | None,
        now_s: float,
    ) -> None:
        """Take one delta: write its text, or hold it while the client is not ready."""
        answer = self.answer
        if self.last_s:
            answer.registry.observer.observe_gaps(now_s - self.last_s)
        elif not answer.phases.first_token_s:
            answer.registry.observer.first_token(answer, now_s, finish)
            start_stream(answer, failing=finish)
        self.last_s = now_s
        self.num_tokens += len(token_ids)
        if finish is not None:
            answer.phases.finished(finish)
            token_ids = answer.ending(self.request_id, token_ids, finish)
        if self.thoughts is not None:
            self.thoughts.push(token_ids)
        text = self._text.push(token_ids)
        if not self._plain:
            self._remember(token_ids, logprobs)
        if self._text.stopped is not None:
            self._end(text, STOPPED, abort=finish is None)
        elif finish is not None:
            self._end(text, finish, abort=False)
        else:
            if text:
                self._tell(text, now_s)
            if self._frame is not None:
                self._settle(token_ids)

    def _tell(self, text: str, now_s: float) -> None:
        exchange = self._exchange
        if not exchange.writable:
            self._held += text
            return
        self.wrote_s = now_s
        if self._held:
            text, self._held = self._held + text, ""
        exchange.write(self._event(text))

    def _settle(self, token_ids: list[int]) -> None:
        """Have the next chunks made by InFlight, unless something here waits for the next delta."""
        pieces = self.answer.pieces
        if len(token_ids) == 1:
            pieces.learn(token_ids[0])
        write_chunk = self._exchange.write_chunk
        if write_chunk is None or self._held or self._text.pending or not self._exchange.writable:
            self.pieces = NO_PIECES
            return
        if not self.frame_head:
            assert self._frame is not None
            self.frame_head, tail = self._frame
            self.frame_tail = tail + CHUNK_TAIL
            self.frame_bytes = len(self.frame_head) + len(tail)
        if self.frame_bytes + PIECE_BYTES_MAX < len(CHUNK_HEADS):
            self.write_chunk = write_chunk
            self.pieces = pieces.ready

    def pause(self) -> None:
        """The client is not ready: hold what comes."""
        self.pieces = NO_PIECES

    def release(self) -> bytes:
        """Return the event of what was held, if anything: the client is ready again."""
        if not self._held or not self.open:
            return b""
        text, self._held = self._held, ""
        return self._event(text)

    def _end(self, text: str, finish: Finish, *, abort: bool) -> None:
        answer = self.answer
        self.finish_reason = finish.reason
        if finish.reason not in ANSWERED:
            answer.fail_by(finish)
            return
        if self._text.stopped is None:
            text += self._text.finish()
            if self._text.stopped is not None:
                finish = STOPPED  # the last characters, freed by the end, completed a stop string
        self.finish_reason = finish.reason
        text, self._held = self._held + text, ""
        last = answer.closing(self, abort=abort)
        events = self._event(text) if text or self._held_ids or self._held_logprobs else b""
        ending = responses.Ending(
            finish.reason,
            stop_reason=self._text.stopped or finish.stop_token_id,
            completion_tokens=self.num_tokens,
            cached_tokens=answer.cached_tokens.get(self.request_id),
            reasoning_tokens=None if self.thoughts is None else self.thoughts.number,
        )
        events += self._chunks.finish(ending)
        if not last:
            answer.exchange.write(events)
            return
        if answer.request.include_usage:
            events += self._chunks.usage(answer.usage())
        answer.finished(status=200)
        answer.exchange.end(events + answer.dialect.done)

    def _event(self, text: str) -> bytes:
        if self._plain:
            return self._chunks.text(text)
        request = self.answer.request
        event = self._chunks.text_with(
            text,
            logprobs=self._held_logprobs if request.logprobs is not None else None,
            token_ids=self._held_ids if request.return_token_ids else None,
            completion_tokens=self.num_tokens if request.continuous_usage else None,
        )
        self._held_ids, self._held_logprobs = [], []
        return event

    def _remember(self, token_ids: list[int], logprobs: list[TokenLogprob] | None) -> None:
        self._held_ids += token_ids
        if logprobs is not None:
            self._held_logprobs += self.answer.token_texts.of_answer(token_ids, logprobs)


def start_stream(answer: Answer, *, failing: Finish | None) -> None:
    """Begin the stream with the first token, unless that says that there will be none.

    So a request that fails before its first token still gets an honest status.
    """
    if failing is not None and failing.reason not in ANSWERED:
        return
    if not answer.exchange.started:
        answer.exchange.start_stream()
    answer.exchange.on_writable = answer.flush
    answer.exchange.on_unwritable = answer.pause
    if preface := b"".join([choice.begin() for choice in answer.streamed]):
        answer.exchange.write(preface)
