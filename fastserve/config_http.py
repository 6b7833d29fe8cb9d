"""The settings that concern HTTP clients alone: limits and times, TLS, pages of other origins.

A part of config.py, which has the rest and puts all of it together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from fastserve.errors import ConfigError
from fastserve.settings import Section, setting

# RFC 6454 6.2, lower-case as browsers send it. "*" is the any of Fetch, no origin.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?|null|\*")
HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")

DAY_S = 86_400
HOUR_S = 3_600
# Nobody means to wait less than this, and zero would mean "at once" here and "for ever" there.
WAIT_S_MIN = 0.05

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def seconds(
    default: float, meaning: str, *, at_least: float = WAIT_S_MIN, at_most: float = DAY_S
) -> float:
    """Declare a time."""
    return setting(default, meaning, unit="seconds", at_least=at_least, at_most=at_most)


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPConfig(Section):
    """What an HTTP client may do, and for how long; all of it for each acceptor."""

    section: ClassVar[str] = "http"

    # The names and the defaults are those of http1.limits, which has the reasons.
    target_bytes_max: int = setting(
        32 * KIB,
        "The longest request line; beyond it 414.",
        unit="bytes",
        at_least=256,
        at_most=MIB,
    )
    header_bytes_max: int = setting(
        64 * KIB,
        "The longest request line and headers together; beyond it 431.",
        unit="bytes",
        at_least=KIB,
        at_most=16 * MIB,
    )
    header_count_max: int = setting(
        256,
        "The most headers of a request; beyond it 431.",
        unit="headers",
        at_least=8,
        at_most=65_536,
    )
    body_bytes_max: int = setting(
        32 * MIB, "The longest body; beyond it 413.", unit="bytes", at_least=KIB, at_most=GIB
    )
    chunk_line_bytes_max: int = setting(
        4 * KIB,
        "The longest line of a chunked body's framing; beyond it 400.",
        unit="bytes",
        at_least=64,
        at_most=MIB,
    )
    chunk_overhead_bytes_max: int = setting(
        16 * KIB,
        "The most framing of a chunked body beyond 16 bytes a chunk; beyond it 400.",
        unit="bytes",
        at_least=KIB,
        at_most=16 * MIB,
    )
    first_byte_timeout_s: float = seconds(
        10.0, "A new connection that sends nothing is closed after this time."
    )
    header_timeout_s: float = seconds(10.0, "A request whose headers take longer is answered 408.")
    body_timeout_s: float = seconds(
        30.0, "A request whose body takes longer, and longer than its size allows, is answered 408."
    )
    body_bytes_per_s_min: int = setting(
        16 * KIB,
        "A body may take a second more for as many bytes as this.",
        unit="bytes per second",
        at_least=1,
        at_most=GIB,
    )
    keep_alive_timeout_s: float = seconds(
        120.0, "A connection that is idle between requests is closed after this time."
    )
    write_stall_timeout_s: float = seconds(
        30.0,
        "A client that reads nothing for this long while there is something to read loses its "
        "connection, and its request is aborted.",
    )
    linger_timeout_s: float = seconds(
        2.0,
        "How long to read on after the last answer, so that the client sees it and not a reset.",
        at_most=60,
    )
    drain_first_byte_timeout_s: float = seconds(
        1.0,
        "While draining, a new connection that sends nothing is closed after this time.",
        at_most=60,
    )
    read_buffer_bytes_max: int = setting(
        64 * KIB,
        "Bytes of later requests held while one is answered; beyond it reading pauses.",
        unit="bytes",
        at_least=4 * KIB,
        at_most=64 * MIB,
    )
    write_buffer_bytes_max: int = setting(
        64 * KIB,
        "Bytes of an answer that wait for the client; beyond it chunks are merged.",
        unit="bytes",
        at_least=4 * KIB,
        at_most=64 * MIB,
    )
    requests_per_connection_max: int = setting(
        0,
        "Close a connection after this many requests; 0: never for that reason.",
        unit="requests",
        at_least=0,
        at_most=1_000_000_000,
    )
    connections_max: int = setting(
        16_384,
        "Open connections; one more is answered 503 at once, before it has sent a request, and "
        "closed.",
        unit="connections",
        at_least=1,
        at_most=1_000_000,
    )
    connections_refused_max: int = setting(
        128,
        "Refused connections that still read their 503; one more is closed without a word.",
        unit="connections",
        at_least=0,
        at_most=1_000_000,
    )
    bodies_bytes_max: int = setting(
        GIB,
        "Bytes of bodies on their way, of all connections together, and of those that wait to be "
        "parsed in a process of their own; beyond it 503.",
        unit="bytes",
        at_least=KIB,
        at_most=1024 * GIB,
    )
    off_process_bytes_min: int = setting(
        512 * KIB,
        "Bodies from this size on are parsed in a process of each acceptor's own, which starts "
        "when the first comes.",
        unit="bytes",
        at_least=KIB,
        at_most=GIB,
    )
    off_loop_bytes_min: int = setting(
        64 * KIB,
        "Bodies and prompts from this size on are parsed in a thread, so that they do not hold up "
        "other requests.",
        unit="bytes",
        at_least=0,
        at_most=GIB,
    )

    def check(self) -> None:
        if self.bodies_bytes_max < self.body_bytes_max:
            raise ConfigError(
                f"http.bodies_bytes_max: {self.bodies_bytes_max} is less than "
                f"http.body_bytes_max, which is {self.body_bytes_max}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSConfig(Section):
    """HTTPS on the port: TLS 1.2 and 1.3. Files are read anew for each acceptor that starts."""

    section: ClassVar[str] = "tls"

    certificate: str | None = setting(
        None, "The certificate and its chain, PEM; set: the port speaks TLS.", placeholder="PATH"
    )
    key: str | None = setting(
        None,
        "The certificate's private key, PEM, not encrypted; not set: it is with the certificate.",
        placeholder="PATH",
    )
    client_ca: str | None = setting(
        None,
        "Clients must have a certificate that one of these authorities has signed, PEM.",
        placeholder="PATH",
    )
    handshake_timeout_s: float = seconds(
        10.0, "A connection whose handshake takes longer is closed.", at_most=HOUR_S
    )

    def check(self) -> None:
        for name in ("key", "client_ca"):
            if getattr(self, name) is not None and self.certificate is None:
                raise ConfigError(f"tls.{name}: not without tls.certificate")


@dataclass(frozen=True, slots=True, kw_only=True)
class CORSConfig(Section):
    """Which web pages of other origins may use this server from a browser (Fetch, 3.2)."""

    section: ClassVar[str] = "cors"

    allow_origins: tuple[str, ...] = setting(
        (),
        "Origins whose pages may, such as https://chat.example; *: any; none: CORS is off.",
        placeholder="ORIGIN",
    )
    allow_headers: tuple[str, ...] = setting(
        ("*",), "Request headers that pages may set; *: any.", placeholder="NAME"
    )
    expose_headers: tuple[str, ...] = setting(
        ("X-Request-Id", "Retry-After"), "Answer headers that pages may read.", placeholder="NAME"
    )
    allow_credentials: bool = setting(
        False, "Whether pages may send cookies and certificates; not with origin *."
    )
    max_age_s: float = seconds(
        600.0, "How long a browser may remember the answer to a preflight.", at_least=0
    )

    def check(self) -> None:
        if "*" in self.allow_origins and self.allow_credentials:
            raise ConfigError("cors.allow_credentials: not with origin *: name the origins")
        for origin in self.allow_origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors.allow_origins: {origin!r} is not SCHEME://HOST[:PORT], null or *"
                )
        for name in ("allow_headers", "expose_headers"):
            for header in getattr(self, name):
                if not HEADER_NAME.fullmatch(header):
                    raise ConfigError(f"cors.{name}: {header!r} is not the name of a header")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesConfig(Section):
    """The store of /v1/responses; all of it for each acceptor. What it has no room for is gone."""

    section: ClassVar[str] = "responses"

    # A run directory may be in memory.
    records_max: int = setting(
        4096,
        "Responses that are kept; one more, and the oldest is forgotten.",
        unit="responses",
        at_least=0,
        at_most=1_000_000,
    )
    bytes_max: int = setting(
        16 * MIB,
        "What they take together, conversations included; beyond it the oldest are forgotten.",
        unit="bytes",
        at_least=0,
        at_most=64 * GIB,
    )
    record_bytes_max: int = setting(
        MIB,
        "What one may take; a larger one is answered, and says that it is not stored.",
        unit="bytes",
        at_least=0,
        at_most=GIB,
    )
    # OpenAI keeps them for 30 days, vLLM for ever.
    age_max_s: float = seconds(
        24 * HOUR_S, "How long one is kept; older ones are not found.", at_most=366 * 24 * HOUR_S
    )
