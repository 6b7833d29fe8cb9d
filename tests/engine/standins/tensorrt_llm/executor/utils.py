"""Where the exception for a single request is."""

from __future__ import annotations


class RequestError(RuntimeError):
    pass
