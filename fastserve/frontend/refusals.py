"""The answer that tells of an error, where nothing has been said yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.api import responses
from fastserve.errors import MethodNotAllowed, RequestTimeout
from fastserve.frontend.routes import error_words
from fastserve.http1.message import Response

if TYPE_CHECKING:
    from fastserve.errors import FastserveError
    from fastserve.frontend.routes import Route
    from fastserve.http1.message import Fields, RequestHead


def error_response(error: FastserveError, *, body: bytes | None = None) -> Response:
    """The whole answer that tells of `error`, in OpenAI's words unless there is a `body`."""
    headers: Fields = ()
    if error.retry_after_s is not None:
        headers = ((b"Retry-After", b"%d" % error.retry_after_s),)
    elif isinstance(error, RequestTimeout):
        # In no RFC, but openai's and anthropic's clients heed it.
        headers = ((b"X-Should-Retry", b"false"),)
    return Response(error.status, body=body or responses.error_body(error), headers=headers)


def not_allowed(head: RequestHead, route: Route | None) -> Response:
    """The answer to a method that a path does not take; `route` None: it is no path, but `*`."""
    error = MethodNotAllowed(f"{head.path} does not take {head.method}")
    allow = (b"Allow", ", ".join(route.methods if route else ["OPTIONS"]).encode())
    body = error_words(head.path)(error)
    return Response(error.status, body=body, headers=(allow,))
