"""The path of a request, in order: route, validate, template, tokenize, submit, answer.

    http1 hands over an exchange        serve()
    its route picks a handler           ROUTES
    the body becomes a request          api.requests, in a thread when it is large
    the request becomes token ids       model.py: template and tokenizer
    each choice is submitted            lane.client
    outputs come back by request id     on_outputs(), once per engine step
    tokens become text and leave        streams.py

A client that goes away is told of by its connection, and its requests are aborted in that call.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from fastserve.api import responses
from fastserve.api.chunks import ChatChunks, CompletionChunks
from fastserve.errors import (
    EngineDead,
    FastserveError,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    Overloaded,
    RequestError,
    UnsupportedMediaType,
)
from fastserve.frontend.about import About
from fastserve.frontend.prepare import Prepared, prepare_chat, prepare_completion
from fastserve.frontend.streams import (
    Answer,
    StreamedChoice,
    WholeChoice,
    error_response,
    respond_empty,
)
from fastserve.http1.message import Response
from fastserve.lane.messages import Abort, Submit
from fastserve.log import get_logger
from fastserve.metrics.catalog import PREPROCESSING_TIME, PROMPT_TOKENS, UNKNOWN_FIELDS
from fastserve.text.stream import TextStream

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from fastserve.frontend.model import Model
    from fastserve.frontend.prepare import Prompt
    from fastserve.frontend.state import ServingState
    from fastserve.generation import RequestId
    from fastserve.http1.exchange import Exchange
    from fastserve.http1.message import RequestHead
    from fastserve.lane.messages import Outputs, ToEngine
    from fastserve.metrics.board import Board
    from fastserve.metrics.meter import Meter

log = get_logger("frontend")

_THREADS = 2


class Engine(Protocol):
    """The frontend's way to the engine: a lane."""

    def send(self, message: ToEngine) -> None: ...


class Frontend:
    """The Application that http1 serves, and the Registry of what is in flight."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        engine: Engine,
        request_ids: Iterator[RequestId],
        state: ServingState,
        board: Board,
        meter: Meter,
        requests_in_flight_max: int,
        off_loop_bytes_min: int,
        num_connections: Callable[[], int],
        connections_max: int,
    ) -> None:
        self.engine = engine
        self.meter = meter
        self._state = state
        self._loop = loop
        self._request_ids = request_ids
        self._requests_in_flight_max = requests_in_flight_max
        self._off_loop_bytes_min = off_loop_bytes_min
        self._num_connections = num_connections
        self._connections_max = connections_max
        self._choices: dict[int, StreamedChoice | WholeChoice] = {}
        self._answers: set[Answer] = set()
        # No more than there are requests in flight.
        self._aborts_held: list[RequestId] = []
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")
        self._routes: dict[tuple[str, str], Callable[[Exchange], None]] = {
            **About(state, board=board, meter=meter, in_thread=self._in_thread).routes,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completion,
        }
        self._methods: dict[str, list[str]] = {}
        for method, path in self._routes:
            also = ["HEAD"] if method == "GET" else []
            self._methods.setdefault(path, ["OPTIONS"]).extend([method, *also])

    # ---- 1. The head: what can be refused without the body is refused here.

    def check(self, head: RequestHead) -> Response | None:
        """Refuse what needs no body to be refused: an Application of http1."""
        if self._num_connections() > self._connections_max:
            error: FastserveError = Overloaded("too many connections")
            return _closing(error_response(error))
        allowed = self._methods.get(head.path)
        if allowed is None and head.path != "*":
            return error_response(NotFound(f"no such route: {head.method} {head.path}"))
        if head.method == "OPTIONS":
            methods = ", ".join(allowed or ["GET", "HEAD", "OPTIONS", "POST"])
            return Response(204, headers=((b"Allow", methods.encode()),))
        if allowed is None or head.method not in allowed:
            return _not_allowed(head, allowed or ["OPTIONS"])
        if head.method == "POST":
            return self._check_generation(head)
        return None

    def _check_generation(self, head: RequestHead) -> Response | None:
        content_type = head.header(b"content-type")
        media_type = (content_type or b"application/json").split(b";", 1)[0].strip().lower()
        if media_type != b"application/json":
            return error_response(UnsupportedMediaType("the body must be application/json"))
        if head.header(b"content-encoding") not in (None, b"identity"):
            return error_response(UnsupportedMediaType("no content encoding is supported"))
        try:
            self._check_serving()
        except FastserveError as error:
            return error_response(error)
        return None

    def error_body(self, status: int, message: str) -> bytes:
        """Render a refusal of http1's own."""
        error = RequestError(message) if status < 500 else FastserveError(message)
        return responses.error_body(error)

    # ---- 2. The whole request.

    def serve(self, exchange: Exchange) -> None:
        """Answer `exchange`, now or later: an Application of http1."""
        method = "GET" if exchange.head.method == "HEAD" else exchange.head.method
        self._routes[method, exchange.head.path](exchange)

    def _chat(self, exchange: Exchange) -> None:
        self._prepare(exchange, prepare_chat)

    def _completion(self, exchange: Exchange) -> None:
        self._prepare(exchange, prepare_completion)

    # ---- 3. Bytes to token ids; off the loop when that takes long.

    def _prepare(self, exchange: Exchange, prepare: Callable[[bytes, Model], Prepared]) -> None:
        received_s = time.monotonic()
        try:
            model = self._check_serving()
            if len(exchange.body) < self._off_loop_bytes_min:
                self._submit(exchange, prepare(exchange.body, model), received_s=received_s)
                return
        except FastserveError as error:
            self._refuse(exchange, error)
            return
        future = self._threads.submit(prepare, exchange.body, model)

        def prepared() -> None:
            if exchange.ended:
                return
            try:
                self._submit(exchange, future.result(), received_s=received_s)
            except FastserveError as error:
                self._refuse(exchange, error)
            except Exception:
                log.exception("preparing a request failed", id=exchange.request_id)
                self._respond(exchange, error_response(FastserveError("internal error")))

        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(prepared))

    def _in_thread(self, work: Callable[[], bytes], done: Callable[[bytes], None]) -> None:
        """Run `work` in a thread, and then `done` with its result on the loop."""
        future = self._threads.submit(work)
        future.add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(lambda: done(future.result()))
        )

    def _check_serving(self) -> Model:
        """Return the model. Raises EngineDead, EngineStarting or Overloaded."""
        model = self._state.serving_model()
        self._check_room(1)
        return model

    def _check_room(self, num_requests: int) -> None:
        num_in_flight, most = len(self._choices), self._requests_in_flight_max
        if num_in_flight + num_requests > most:
            raise Overloaded(f"{num_in_flight} of at most {most} requests are in flight")

    def _refuse(self, exchange: Exchange, error: FastserveError) -> None:
        log.failed("request refused", error, id=exchange.request_id, status=error.status)
        self._respond(exchange, error_response(error))

    def _respond(self, exchange: Exchange, response: Response) -> None:
        self.meter.request(exchange.head.path, response.status)
        exchange.respond(response)

    # ---- 4. One request to the engine for each choice.

    def _submit(self, exchange: Exchange, prepared: Prepared, *, received_s: float) -> None:
        model = self._check_serving()  # again: preparing may have taken a while
        request = prepared.request
        if request.model is not None and request.model != model.card.name:
            raise ModelNotFound(
                f"The model '{request.model}' does not exist. This server has '{model.card.name}'.",
                param="model",
            )
        choices = list(prepared.choices())
        self._check_room(len(choices))
        if request.unknown_fields:
            self.meter.count(UNKNOWN_FIELDS, by=len(request.unknown_fields))
        answer = Answer(
            exchange,
            request=request,
            is_chat=prepared.is_chat,
            model=model,
            registry=self,
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prepared.prompts),
            received_s=received_s,
        )
        self._answers.add(answer)
        submits = []
        for index, (prompt, sampling) in enumerate(choices):
            choice = self._choice(answer, prompt, index=index)
            answer.choices.append(choice)
            answer.num_open += 1
            submits.append(
                Submit(
                    request_id=choice.request_id,
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    gather=not request.stream and not request.stop,
                    sim=request.sim,
                )
            )
        if submits[0].sampling.max_tokens == 0:
            respond_empty(answer)
            return
        for choice, submit in zip(answer.choices, submits, strict=True):
            self._choices[choice.request_id] = choice
            try:
                self.engine.send(submit)
            except Overloaded as error:
                answer.fail(error)
                return
        self.meter.count(PROMPT_TOKENS, by=answer.prompt_tokens)
        self.meter.observe(PREPROCESSING_TIME, time.monotonic() - received_s)

    def _choice(
        self, answer: Answer, prompt: Prompt, *, index: int
    ) -> StreamedChoice | WholeChoice:
        request = answer.request
        text = TextStream(
            answer.model.tokenizer,
            stops=request.stop,
            skip_special_tokens=request.skip_special_tokens,
            include_stop=request.include_stop_str_in_output,
        )
        shown_ids = prompt.token_ids if request.return_token_ids else None
        if not request.stream:
            return WholeChoice(
                answer,
                request_id=next(self._request_ids),
                text=text,
                prompt_token_ids=shown_ids,
                echo=prompt.echo,
            )
        chunks = ChatChunks if answer.is_chat else CompletionChunks
        return StreamedChoice(
            answer,
            request_id=next(self._request_ids),
            text=text,
            chunks=chunks(
                completion_id=answer.completion_id,
                created=answer.created,
                model=answer.model.card.name,
                index=index,
                include_usage=request.include_usage,
                continuous_prompt_tokens=len(prompt.token_ids)
                if request.continuous_usage
                else None,
            ),
            prompt_token_ids=shown_ids,
            echo=prompt.echo,
        )

    # ---- 5. What comes back, once per engine step. Hot path: see streams.py.

    def on_outputs(self, outputs: Outputs) -> None:
        """Give every delta to the choice that it belongs to."""
        token_ids, counts = outputs.token_ids, outputs.counts
        finishes, logprobs = outputs.finishes, outputs.logprobs
        find = self._choices.get
        at = 0
        for index, request_id in enumerate(outputs.request_ids):
            count = 1 if counts is None else counts[index]
            tokens = token_ids[at : at + count]
            at += count
            choice = find(request_id)
            if choice is None:
                continue  # aborted while this was on its way
            try:
                choice.push(tokens, finishes.get(index), logprobs.get(index))
            except Exception:
                log.exception("rendering failed", id=choice.answer.exchange.request_id)
                choice.answer.fail(FastserveError("internal error"))

    # ---- 6. Ends: the Registry that streams.py knows, and the ends that come from elsewhere.

    def forget(self, request_id: RequestId) -> None:
        """Nothing more will come for this request."""
        self._choices.pop(request_id, None)

    def abort(self, request_ids: list[RequestId]) -> None:
        """Tell the engine to stop working on these."""
        if self._state.liveness.dead is not None:
            return
        try:
            self.engine.send(Abort(request_ids))
        except Overloaded:
            self._aborts_held += request_ids

    def retry_aborts(self) -> None:
        """Send the aborts that a full lane did not take; called with every heartbeat."""
        if self._aborts_held:
            held, self._aborts_held = self._aborts_held, []
            self.abort(held)

    def closed(self, answer: Answer) -> None:
        """The answer is complete, or will never be."""
        self._answers.discard(answer)

    @property
    def num_in_flight(self) -> int:
        return len(self._answers)

    def fail_all(self, error: FastserveError) -> None:
        """Answer every exchange in flight with `error`."""
        for answer in list(self._answers):
            answer.fail(error)

    def on_engine_gone(self, reason: str) -> None:
        """The engine is dead: tell everybody who waits, and everybody who comes."""
        self._state.liveness.dead = reason
        self._aborts_held.clear()
        self.fail_all(EngineDead(reason))

    def ping_all(self) -> None:
        """Keep silent streams open; called once per ping interval."""
        for answer in list(self._answers):
            answer.ping()


def _not_allowed(head: RequestHead, allowed: list[str]) -> Response:
    error = MethodNotAllowed(f"{head.path} does not take {head.method}")
    allow = (b"Allow", ", ".join(allowed).encode())
    return Response(error.status, body=responses.error_body(error), headers=(allow,))


def _closing(response: Response) -> Response:
    return Response(response.status, body=response.body, headers=response.headers, close=True)
