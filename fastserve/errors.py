"""Every way fastserve fails on purpose.

FastserveError
    ConfigError                at start-up only; the process exits with 2
    StartError                 at start-up only; a child could not become ready
    RequestError               the client's doing; carries the status to answer
        InvalidRequest         400
            ContextLengthExceeded
        InvalidAPIKey          401
        OriginNotAllowed       403
        NotFound               404
            ModelNotFound
        MethodNotAllowed       405
        UnsupportedMediaType   415
    Overloaded                 429; expected under load, never logged as an error
    RequestTimeout             504; the time that the request has is up
    ShuttingDown               503; the time to drain is up
    EngineError
        GenerationFailed       500; this request is lost, the engine lives
        EngineDead             503; every request is lost, the supervisor acts
        EngineStarting         503; the model is still loading

Anything else that escapes is a bug: it is logged with its traceback and answered with a bare 500.
"""

from __future__ import annotations


class FastserveError(Exception):
    """The root; `status`, `type` and `code` are those of the answer (OpenAI's error object)."""

    status = 500
    type = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    # Under which reason the metric counts it, where a request is refused for what else is going on.
    rejection: str | None = None

    @property
    def message(self) -> str:
        return str(self)


class ConfigError(FastserveError):
    """A setting is unknown or impossible. The message names the key and what would be right."""


class StartError(FastserveError):
    """A process could not become ready. The message says what to do about it."""


class RequestError(FastserveError):
    """The client's doing. `param` names the field at fault, as OpenAI's `error.param` does."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """400: the request cannot mean anything that we do."""


class ContextLengthExceeded(InvalidRequest):
    """400: prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"


class InvalidAPIKey(RequestError):
    """401: a key is needed, and there is none or a wrong one."""

    status = 401
    code = "invalid_api_key"


class OriginNotAllowed(RequestError):
    """403: a page of another origin may not use the server."""

    status = 403
    code = "origin_not_allowed"


class NotFound(RequestError):
    """404: there is no such route."""

    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    """404: another model was asked for."""

    code = "model_not_found"


class MethodNotAllowed(RequestError):
    """405: the route does not take this method."""

    status = 405
    code = "method_not_allowed"


class UnsupportedMediaType(RequestError):
    """415: the body is of a type or an encoding that we do not take."""

    status = 415
    code = "unsupported_media_type"


class Overloaded(FastserveError):
    """429: a limit of admission is reached; the same request may succeed after `retry_after_s`.

    And not 503: nothing is wrong with a server that is busy. Balancers take a 5xx for a fault, and
    would throw it out, and its load at the others.
    """

    status = 429
    type = "overloaded"
    code = "overloaded"

    def __init__(self, message: str, *, rejection: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.rejection = rejection
        self.retry_after_s = retry_after_s


class RequestTimeout(FastserveError):
    """504: the request was not answered in the time that its client, or the server, gives it.

    Clients retry a 5xx by themselves. Here that would be the same work again, for longer than was
    asked: they are told not to.
    """

    status = 504
    type = "timeout"
    code = "request_timeout"


class ShuttingDown(FastserveError):
    """503: the server is stopping, and the time for this request is up."""

    status = 503
    type = "shutting_down"
    code = "shutting_down"
    retry_after_s = 5
    rejection = "shutting_down"


class EngineError(FastserveError):
    """The engine's doing."""

    type = "engine_error"


class GenerationFailed(EngineError):
    """500: this request is lost; the engine lives."""

    code = "generation_failed"


class EngineDead(EngineError):
    """503: the engine is gone, and every request in flight with it."""

    status = 503
    type = "engine_dead"
    code = "engine_dead"
    retry_after_s = 5
    rejection = "engine_dead"


class EngineStarting(EngineError):
    """503: the model is still loading."""

    status = 503
    type = "engine_starting"
    code = "engine_starting"
    retry_after_s = 1
    rejection = "engine_starting"
