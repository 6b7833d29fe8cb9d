"""Whole answers that tell of an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.api import responses
from fastserve.http1.message import Response

if TYPE_CHECKING:
    from fastserve.errors import FastserveError


def error_response(error: FastserveError, *, body: bytes | None = None) -> Response:
    """The whole answer that tells of `error`, in OpenAI's words unless there is a `body`."""
    retry = error.retry_after_s
    headers = () if retry is None else ((b"Retry-After", b"%d" % retry),)
    return Response(error.status, body=body or responses.error_body(error), headers=headers)
