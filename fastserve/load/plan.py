"""What to send, to whom, and when: the plan that loadgen.c reads.

Three kinds of load. In a closed loop each of so many connections sends its next request when it has
its answer. In an open loop requests are sent at times that chance chose beforehand (Poisson), and
in a trace at times that were recorded; neither waits for answers.

Pure: values in, bytes out.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fastserve.load.build import LoadError

if TYPE_CHECKING:
    from collections.abc import Iterable

_MODELS = "/models"
_CHAT = "/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI-compatible server: where it listens, and the paths of what it serves."""

    host: str
    port: int
    path: str
    models_path: str
    api_key: str | None = None

    def request(self, body: bytes) -> bytes:
        """The bytes of a POST of `body`."""
        authority = f"[{self.host}]" if ":" in self.host else self.host
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {authority}:{self.port}\r\n"
            f"Content-Type: application/json\r\n{key}Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def target_of(url: str, *, api_key: str | None = None) -> Target:
    """The server of a URL: its root, its `/v1`, or the very endpoint. Raises LoadError."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise LoadError(f"{url}: an http:// URL is wanted (TLS is not spoken here)")
    path = parts.path.rstrip("/")
    if not path.endswith("/completions"):
        path = (path if path.endswith("/v1") else f"{path}/v1") + _CHAT
    return Target(
        host=parts.hostname,
        port=parts.port or 80,
        path=path,
        models_path=path.removesuffix("/completions").removesuffix("/chat") + _MODELS,
        api_key=api_key,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A body, and how many chunks of text its stream must have (of an object: how many tokens).

    `expected_chunks` 0: any number will do, and so will any end.
    """

    body: bytes
    expected_chunks: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """When to send which request; in seconds from the beginning, and as an index."""

    at_s: float
    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: a beginning, a window in which everything is counted, and a bounded end.

    Without `sends` it is a closed loop, which comes to its full number of connections over `ramp_s`
    and takes the requests in turn. The window begins `warm_s` after the beginning; nothing is sent
    after it, and answers are waited for `drain_s` longer.
    """

    target: Target
    requests: tuple[Request, ...]
    sends: tuple[Send, ...] = ()
    connections: int
    ramp_s: float = 0.0
    warm_s: float
    window_s: float
    drain_s: float

    @property
    def duration_s(self) -> float:
        """At most."""
        return self.warm_s + self.window_s + self.drain_s

    def part(self, index: int, *, of: int) -> Plan:
        """The share of program `index` when `of` programs carry the plan out together."""
        start = index * len(self.requests) // of
        if self.sends:
            requests, sends = self.requests, self.sends[index::of]
        else:
            requests, sends = self.requests[start:] + self.requests[:start], ()
        share = self.connections // of + (index < self.connections % of)
        return replace(self, connections=share, requests=requests, sends=sends)

    def render(self, *, begin_ns: int) -> bytes:
        """The plan as loadgen.c reads it. `begin_ns` is CLOCK_MONOTONIC."""

        def at_ns(seconds: float) -> int:
            return begin_ns + round(seconds * 1e9)

        window_end_s = self.warm_s + self.window_s
        settings = (
            f"server {self.target.host} {self.target.port}\nconnections {self.connections}\n"
            f"begin_ns {begin_ns}\nramp_ns {round(self.ramp_s * 1e9)}\n"
            f"window_begin_ns {at_ns(self.warm_s)}\nwindow_end_ns {at_ns(window_end_s)}\n"
            f"give_up_ns {at_ns(self.duration_s)}\n"
        )
        parts = [settings.encode()]
        for request in self.requests:
            data = self.target.request(request.body)
            parts.append(b"request %d %d\n%b\n" % (len(data), request.expected_chunks, data))
        parts += [b"send %d %d\n" % (round(send.at_s * 1e9), send.request) for send in self.sends]
        return b"".join([*parts, b"go\n"])


def poisson(*, rate_per_s: float, duration_s: float, num_requests: int, seed: int) -> list[Send]:
    """Sends whose gaps are exponential: independent users, so many requests per second of them."""
    chance = random.Random(seed)
    sends: list[Send] = []
    at_s = chance.expovariate(rate_per_s)
    while at_s < duration_s:
        sends.append(Send(at_s, len(sends) % num_requests))
        at_s += chance.expovariate(rate_per_s)
    return sends


def read_trace(lines: Iterable[str]) -> tuple[list[Request], list[Send]]:
    """Requests and sends of a trace: lines of {"at_s": seconds, "body": {...}}, in any order.

    Raises LoadError for a line that is not one, naming it.
    """
    timed: list[tuple[float, bytes]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            at_s, body = float(entry["at_s"]), entry["body"]
        except (ValueError, TypeError, KeyError) as error:
            raise LoadError(f"trace, line {number}: {error!r}") from error
        if not 0 <= at_s < float("inf") or not isinstance(body, dict):
            raise LoadError(f"trace, line {number}: at_s must be 0 or more, body an object")
        timed.append((at_s, json.dumps(body).encode()))
    if not timed:
        raise LoadError("the trace has no requests")
    timed.sort(key=lambda entry: entry[0])
    requests = [Request(body=body) for _, body in timed]
    return requests, [Send(at_s, index) for index, (at_s, _) in enumerate(timed)]
