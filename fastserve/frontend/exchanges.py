"""The path of a request, in order: route, validate, template, tokenize, submit, answer.

    http1 hands over an exchange        serve()
    its route picks a handler           routes.py
    the body becomes a request          api.requests, in a thread when it is large
    the request becomes token ids       model.py: template and tokenizer
    each choice is submitted            lane.client
    outputs come back by request id     in_flight.py, once per engine step
    tokens become text and leave        there and in streams.py

A client that goes away is told of by its connection, and its requests are aborted in that call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from fastserve.api.anthropic_answers import error_body as messages_error
from fastserve.errors import (
    EngineDead,
    FastserveError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestError,
    RequestTimeout,
    ShuttingDown,
    UnsupportedMediaType,
)
from fastserve.frontend import texts
from fastserve.frontend.about import About
from fastserve.frontend.choices import choice_of
from fastserve.frontend.deadlines import Deadlines, Due, asked_timeout_s
from fastserve.frontend.in_flight import InFlight
from fastserve.frontend.kept import Kept
from fastserve.frontend.off_loop import OffLoop
from fastserve.frontend.prepare import (
    Prepared,
    check_model,
    check_task,
    prepare_chat,
    prepare_completion,
    prepare_embeddings,
    prepare_messages,
    prepare_response,
)
from fastserve.frontend.refusals import error_response, not_allowed
from fastserve.frontend.routes import MESSAGES, Route, Routes, error_words
from fastserve.frontend.streams import Answer
from fastserve.frontend.whole import respond_empty
from fastserve.http1.message import Response
from fastserve.lane.messages import Abort, Submit, SubmitGroup
from fastserve.log import get_logger
from fastserve.metrics.catalog import (
    ADMISSION_REJECTIONS,
    UNKNOWN_FIELDS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastserve.frontend.model import Model
    from fastserve.frontend.observing import Observer
    from fastserve.frontend.preparer import Preparer
    from fastserve.frontend.registry import Engine
    from fastserve.frontend.response_store import ResponseStore
    from fastserve.frontend.state import ServingState
    from fastserve.frontend.texts import TextAnswer
    from fastserve.generation import RequestId
    from fastserve.http1.exchange import Exchange
    from fastserve.http1.message import RequestHead
    from fastserve.lane.messages import Outputs
    from fastserve.metrics.board import Board
    from fastserve.metrics.exposition import ServerInfo

log = get_logger("frontend")


# Of fields that nobody knows, as many and as much of each name are told.
_FIELDS_SHOWN = 8
_FIELD_CHARS_SHOWN = 64

T = TypeVar("T")

_ALL_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "POST")


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
        info: ServerInfo,
        observer: Observer,
        requests_in_flight_max: int,
        request_timeout_s: float,
        off_loop_bytes_min: int,
        response_store: ResponseStore | None = None,
        shows_page: bool = False,
        refuse_unknown_fields: bool = False,
        preparer: Preparer | None = None,
        off_process_bytes_min: int = 1 << 30,
    ) -> None:
        self.engine = engine
        self.observer = observer
        self.meter = meter = observer.meter
        self._state = state
        self._loop = loop
        self._request_ids = request_ids
        self._requests_in_flight_max = requests_in_flight_max
        self._off_loop = OffLoop(
            loop.call_soon_threadsafe,
            bytes_min=off_loop_bytes_min,
            preparer=preparer,
            process_bytes_min=off_process_bytes_min,
        )
        self._refuse_unknown_fields = refuse_unknown_fields
        self._deadlines = Deadlines(loop, timeout_s=request_timeout_s)
        self._choices = InFlight(observer)
        self._answers: set[Answer] = set()
        # No more than there are requests in flight.
        self._aborts_held: list[RequestId] = []
        self._idle = asyncio.Event()
        self._routes = Routes(
            *About(
                state,
                board=board,
                info=info,
                meter=meter,
                in_thread=self._off_loop.run,
                shows_page=shows_page,
            ).routes,
            self._generating("/v1/chat/completions", prepare_chat),
            self._generating("/v1/completions", prepare_completion),
            self._generating("/v1/responses", partial(prepare_response, store=response_store)),
            self._telling(
                "/v1/responses/input_tokens",
                partial(texts.count_response_tokens, store=response_store),
            ),
            *Kept(response_store, meter=meter).routes,
            self._generating(MESSAGES, prepare_messages),
            self._generating("/v1/embeddings", prepare_embeddings, embeds=True),
            self._telling(f"{MESSAGES}/count_tokens", texts.count_tokens),
            self._telling("/tokenize", texts.tokenize),
            self._telling("/detokenize", texts.detokenize),
        )

    # ---- 1. The head: what can be refused without the body is refused here.

    def check(self, head: RequestHead) -> Response | None:
        """Refuse what needs no body to be refused: an Application of http1."""
        route = self._routes.find(head.path)
        if route is None and head.path != "*":
            error = NotFound(f"no such route: {head.method} {head.path}")
            return error_response(error, body=error_words(head.path)(error))
        if head.method == "OPTIONS":
            methods = ", ".join(route.methods if route else _ALL_METHODS)
            return Response(204, headers=((b"Allow", methods.encode()),))
        if route is None or head.method not in route.methods:
            return not_allowed(head, route)
        if head.method == "POST":
            try:
                self._check_post(head, route)
            except FastserveError as error:
                self.rejected(error)
                return error_response(error, body=route.error_body(error))
        return None

    def _check_post(self, head: RequestHead, route: Route) -> None:
        content_type = head.header(b"content-type")
        media_type = (content_type or b"application/json").split(b";", 1)[0].strip().lower()
        if media_type != b"application/json":
            raise UnsupportedMediaType("the body must be application/json")
        if head.header(b"content-encoding") not in (None, b"identity"):
            raise UnsupportedMediaType("no content encoding is supported")
        asked_timeout_s(head)
        if route.generates:
            # What has not started by now never will; a death is told of all the same.
            if self._state.draining and self._state.liveness.dead is None:
                raise ShuttingDown("the server is shutting down")
            self._check_serving()

    def error_body(self, status: int, message: str, *, path: str | None) -> bytes:
        """Render a refusal of http1's own."""
        error = RequestError(message) if status < 500 else FastserveError(message)
        error.status = status
        return error_words(path)(error)

    # ---- 2. The whole request.

    def serve(self, exchange: Exchange) -> None:
        """Answer `exchange`, now or later: an Application of http1."""
        route = self._routes.find(exchange.head.path)
        assert route is not None, "it was checked"
        if route.error_body is messages_error:
            # Where the clients of that API look for it.
            exchange.headers += ((b"request-id", exchange.request_id.encode()),)
        route.handler(exchange.head.method)(exchange)

    def _generating(
        self,
        path: str,
        prepare: Callable[[bytes, Model], Prepared],
        *,
        embeds: bool = False,
    ) -> Route:
        """A route whose answer the engine generates, or with `embeds` the embeddings in it."""

        def check() -> Model:
            return check_task(self._check_serving(), embeds=embeds)

        def serve(exchange: Exchange) -> None:
            received_s = time.monotonic()
            deadline_s = received_s + self._deadlines.allowed_s(exchange.head)
            submit = partial(self._submit, exchange, received_s=received_s, deadline_s=deadline_s)
            self._work(exchange, prepare, submit, check=check, deadline_s=deadline_s)

        return Route(path=path, handlers={"POST": serve}, generates=True)

    def _telling(
        self,
        path: str,
        tell: Callable[[bytes, Model], TextAnswer],
    ) -> Route:
        """A route that is answered from the model's vocabulary, without the engine."""

        def respond(exchange: Exchange, began_s: float, answer: TextAnswer) -> None:
            self._on_unknown(answer.unknown_fields)
            self._respond(exchange, Response(200, body=answer.body))
            total_s = round(time.monotonic() - began_s, 4)
            log.info("request finished", id=exchange.request_id, status=200, total_s=total_s)

        def serve(exchange: Exchange) -> None:
            began_s = time.monotonic()
            due_s = began_s + self._deadlines.allowed_s(exchange.head)
            then = partial(respond, exchange, began_s)
            self._work(exchange, tell, then, check=self._state.loaded_model, deadline_s=due_s)

        return Route(path=path, handlers={"POST": serve})

    # ---- 3. Bytes to token ids; off the loop when that takes long.

    def _work(
        self,
        exchange: Exchange,
        work: Callable[[bytes, Model], T],
        then: Callable[[T], None],
        *,
        check: Callable[[], Model],
        deadline_s: float,
    ) -> None:
        try:
            model = check()
            if not self._off_loop.takes(exchange.body):
                then(work(exchange.body, model))
                return
            future = self._off_loop.prepare(
                work, exchange.body, model, wanted=lambda: not exchange.ended
            )
        except FastserveError as error:
            self.refuse(exchange, error)
            return

        def expire() -> None:
            future.cancel()
            if not exchange.ended:
                self.refuse(exchange, RequestTimeout("the time was up before it was prepared"))

        preparing = Due(expire, deadline_s=deadline_s)
        self._deadlines.add(preparing)

        def done() -> None:
            self._deadlines.discard(preparing)
            if exchange.ended:
                return
            try:
                then(future.result())
            except FastserveError as error:
                self.refuse(exchange, error)
            except Exception:
                log.exception("preparing a request failed", id=exchange.request_id)
                self.refuse(exchange, FastserveError("internal error"))

        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(done))

    def _check_serving(self) -> Model:
        """Return the model. Raises EngineDead, EngineStarting or Overloaded."""
        model = self._state.serving_model()
        self._check_room(1)
        return model

    def _check_room(self, num_requests: int) -> None:
        num_in_flight, most = len(self._choices), self._requests_in_flight_max
        if num_in_flight + num_requests > most:
            raise Overloaded(
                f"{num_in_flight} of at most {most} requests are in flight",
                rejection="requests_in_flight",
            )

    def rejected(self, error: FastserveError) -> None:
        """Count a request that did not begin, if `error` is due to what else is going on."""
        if error.rejection is not None:
            self.meter.count(ADMISSION_REJECTIONS, error.rejection)

    def refuse(self, exchange: Exchange, error: FastserveError) -> None:
        """Answer a request that has not begun."""
        self.rejected(error)
        log.failed("request refused", error, id=exchange.request_id, status=error.status)
        route = self._routes.find(exchange.head.path)
        assert route is not None, "it was checked"
        self._respond(exchange, error_response(error, body=route.error_body(error)))

    def _respond(self, exchange: Exchange, response: Response) -> None:
        self.meter.request(exchange.head.path, response.status)
        exchange.respond(response)

    def _on_unknown(self, fields: tuple[str, ...]) -> None:
        """Count the fields that nobody knows. Raises InvalidRequest if none may be there."""
        if not fields:
            return
        self.meter.count(UNKNOWN_FIELDS, by=len(fields))
        if self._refuse_unknown_fields:
            shown = sorted(field[:_FIELD_CHARS_SHOWN] for field in fields)[:_FIELDS_SHOWN]
            raise InvalidRequest(
                f"Nobody knows {', '.join(map(repr, shown))} here.",
                param=shown[0],
                code="unknown_parameter",
            )

    # ---- 4. One request to the engine for each choice.

    def _submit(
        self, exchange: Exchange, prepared: Prepared, *, received_s: float, deadline_s: float
    ) -> None:
        model = self._check_serving()  # again: preparing may have taken a while
        request = prepared.request
        check_model(request.model, model)
        choices = list(prepared.choices())
        self._check_room(len(choices))
        self._on_unknown(request.unknown_fields)
        answer = Answer(
            exchange,
            request=request,
            dialect=prepared.dialect,
            model=model,
            registry=self,
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prepared.prompts),
            received_s=received_s,
            deadline_s=deadline_s,
        )
        self._answers.add(answer)
        exchange.forget_request()  # it has been read, and an answer may last
        submits = []
        for index, (prompt, sampling) in enumerate(choices):
            choice = choice_of(
                answer,
                prompt,
                request_id=next(self._request_ids),
                index=index,
                parsing=prepared.parsing,
            )
            answer.choices.append(choice)
            answer.num_open += 1
            submits.append(
                Submit(
                    request_id=choice.request_id,
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    gather=not request.stream and not request.stop,
                    sim=request.sim,
                    trace_headers=answer.trace.headers() if answer.trace else None,
                    embed=prepared.embeds,
                )
            )
        first = submits[0].sampling
        if first.max_tokens == 0 and first.prompt_logprobs is None and not prepared.embeds:
            respond_empty(answer)
            return
        # One message, whatever happens: the engine takes all of an exchange or nothing.
        message = submits[0] if len(submits) == 1 else SubmitGroup(submits)
        try:
            self.engine.send(message)
        except Overloaded as error:
            answer.refuse(error)
            return
        for choice in answer.choices:
            self._choices.add(choice)
        self._deadlines.add(answer)
        self.observer.submitted(answer, submits)

    # ---- 5. What comes back, once per engine step. Hot path: see in_flight.py.

    def on_outputs(self, outputs: Outputs) -> None:
        """Give every delta to the choice that it belongs to."""
        self._choices.on_outputs(outputs)

    # ---- 6. Ends: the Registry that streams.py knows, and the ends that come from elsewhere.

    def forget(self, request_id: RequestId) -> None:
        """Nothing more will come for this request."""
        self._choices.forget(request_id)

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
        self._deadlines.discard(answer)
        if not self._answers:
            self._idle.set()

    @property
    def routes(self) -> tuple[Route, ...]:
        """Every route that is served."""
        return self._routes.all

    @property
    def num_in_flight(self) -> int:
        return len(self._answers)

    async def wait_idle(self, *, timeout_s: float) -> None:
        """Return when no exchange is in flight, or `timeout_s` has passed."""
        while self._answers and timeout_s > 0:
            self._idle.clear()
            began_s = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            timeout_s -= time.monotonic() - began_s

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
