"""Who may ask, from which page, under which path: an Application around the Application.

In the order in which a request meets them: the root path is taken off, a preflight is answered, the
key is compared. What gets through is the inner application's, which knows nothing of all this.

With CORS off, a preflight is refused: a success without Access-Control fields would tell a browser
the same, and a person who reads it the opposite.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastserve.errors import InvalidAPIKey, OriginNotAllowed
from fastserve.frontend.routes import error_words
from fastserve.http1.message import Response
from fastserve.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastserve.http1.application import Application
    from fastserve.http1.exchange import Exchange
    from fastserve.http1.message import Fields, RequestHead

log = get_logger("access")

# What orchestrators probe; they have no key, and there is nothing to learn.
OPEN_PATHS = frozenset({"/health", "/ready"})

# RFC 6750 3: the scheme that the server takes, and what is wrong with a key that was given.
_CHALLENGE = b'Bearer realm="fastserve"'
_CHALLENGE_WRONG = _CHALLENGE + b', error="invalid_token"'
_BEARER = b"bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class CORS:
    """The settings of [cors]. No `allow_origins`: off. A "*" in a list stands for all."""

    allow_origins: tuple[str, ...] = ()
    allow_headers: tuple[str, ...] = ("*",)
    expose_headers: tuple[str, ...] = ()
    allow_credentials: bool = False
    max_age_s: float = 600.0


class Access:
    """`api_keys` empty: none is needed. `open_paths` need none in any case."""

    def __init__(
        self,
        app: Application,
        *,
        api_keys: Iterable[str] = (),
        open_paths: frozenset[str] = OPEN_PATHS,
        cors: CORS | None = None,
        root_path: str | None = None,
    ) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._open_paths = open_paths
        self._origins = _Origins(cors or CORS())
        self._root_path = root_path

    def check(self, head: RequestHead) -> Response | None:
        """Refuse by the head what need not be served: an Application of http1."""
        if self._root_path is not None:
            head = self._without_root_path(head)
        origin = head.header(b"origin")
        if origin is not None and _is_preflight(head):
            return self._preflight(head, origin)
        response = self._check_key(head) or self._app.check(head)
        if response is not None and origin is not None:
            return _with_headers(response, self._origins.fields(origin))
        return response

    def serve(self, exchange: Exchange) -> None:
        """Hand a request on: an Application of http1."""
        head = exchange.head
        if self._root_path is not None:
            exchange.head = self._without_root_path(head)
        if self._origins.on:
            exchange.headers = self._origins.fields(head.header(b"origin"))
        self._app.serve(exchange)

    def error_body(self, status: int, message: str, *, path: str | None) -> bytes:
        """Render a refusal of http1's own."""
        if path is not None:
            path = self._route_path(path)
        return self._app.error_body(status, message, path=path)

    def _without_root_path(self, head: RequestHead) -> RequestHead:
        return head._replace(path=self._route_path(head.path))

    def _route_path(self, path: str) -> str:
        """A proxy may have taken the root path off; then there is nothing to do."""
        rest = path.removeprefix(self._root_path or "")
        return rest if rest.startswith("/") else path

    # ---- keys

    def _check_key(self, head: RequestHead) -> Response | None:
        if not self._digests or head.path in self._open_paths:
            return None
        given = _keys_of(head)
        # Every key is compared with every other, however soon one fits: time tells nothing.
        fits = [
            hmac.compare_digest(digest, mine)
            for digest in map(_digest, given)
            for mine in self._digests
        ]
        if any(fits):
            return None
        log.warning_burst("request without a valid key", path=head.path)
        error = InvalidAPIKey(
            "The API key is not valid."
            if given
            else "An API key is needed: Authorization: Bearer KEY, or x-api-key: KEY."
        )
        challenge = _CHALLENGE_WRONG if given else _CHALLENGE
        headers = ((b"WWW-Authenticate", challenge),)
        body = error_words(head.path)(error)
        return Response(error.status, body=body, headers=headers)

    # ---- pages of other origins

    def _preflight(self, head: RequestHead, origin: bytes) -> Response:
        """Answer a browser that asks what a page may do (Fetch 3.2.2). It has no key to show."""
        granted = self._origins.fields(origin)
        if not any(name == b"Access-Control-Allow-Origin" for name, _ in granted):
            error = OriginNotAllowed(
                f"pages of this origin may not use this server: {origin.decode('latin-1')}"
            )
            body = error_words(head.path)(error)
            return Response(error.status, body=body, headers=granted)
        # The inner application knows which methods the route has, and whether there is one.
        answer = self._app.check(head._replace(headers=(), content_length=0, chunked=False))
        assert answer is not None, "OPTIONS is answered by the head"
        if answer.status >= 400:
            return _with_headers(answer, granted)
        methods = b", ".join(value for name, value in answer.headers if name == b"Allow")
        asked = head.header(b"access-control-request-headers")
        return Response(204, headers=granted + self._origins.preflight_fields(methods, asked))


class _Origins:
    """What the settings of [cors] mean for an origin."""

    def __init__(self, cors: CORS) -> None:
        self.on = bool(cors.allow_origins)
        self._cors = cors
        self._any = "*" in cors.allow_origins
        self._allowed = {origin.encode() for origin in cors.allow_origins}
        more: list[tuple[bytes, bytes]] = []
        if cors.expose_headers:
            more.append((b"Access-Control-Expose-Headers", ", ".join(cors.expose_headers).encode()))
        if cors.allow_credentials:
            more.append((b"Access-Control-Allow-Credentials", b"true"))
        self._more = tuple(more)

    def fields(self, origin: bytes | None) -> Fields:
        """The fields of any answer to a request from `origin`."""
        if not self.on:
            return ()
        if self._any:
            return () if origin is None else ((b"Access-Control-Allow-Origin", b"*"), *self._more)
        # A cache must not give one origin's answer to another (Fetch 3.2.5).
        vary = (b"Vary", b"Origin")
        if origin not in self._allowed:
            return (vary,)
        assert origin is not None
        return (vary, (b"Access-Control-Allow-Origin", origin), *self._more)

    def preflight_fields(self, methods: bytes, asked: bytes | None) -> Fields:
        """The further fields of the answer to a preflight that `asked` for these headers."""
        cors = self._cors
        max_age = b"%d" % cors.max_age_s
        fields = [
            (b"Allow", methods),
            (b"Access-Control-Allow-Methods", methods),
            (b"Access-Control-Max-Age", max_age),
        ]
        # What was asked for, since a "*" sent back would not cover Authorization (Fetch 4.9).
        allow = asked if "*" in cors.allow_headers else ", ".join(cors.allow_headers).encode()
        if allow:
            fields.append((b"Access-Control-Allow-Headers", allow))
        return tuple(fields)


def _is_preflight(head: RequestHead) -> bool:
    return head.method == "OPTIONS" and head.header(b"access-control-request-method") is not None


def _with_headers(response: Response, headers: Fields) -> Response:
    return Response(
        response.status,
        body=response.body,
        content_type=response.content_type,
        headers=response.headers + headers,
        close=response.close,
    )


def _keys_of(head: RequestHead) -> list[bytes]:
    """The keys that a request shows, two at most. RFC 9110 11.1: schemes are case-insensitive."""
    keys = []
    authorization = head.header(b"authorization")
    if authorization is not None and authorization[: len(_BEARER)].lower() == _BEARER:
        keys.append(authorization[len(_BEARER) :].strip(b" "))
    key = head.header(b"x-api-key")
    if key is not None:
        keys.append(key)
    return keys


def _digest(key: bytes) -> bytes:
    """Keys are compared by digests of one length: how long a key is shows in no timing."""
    return hashlib.sha256(key).digest()
