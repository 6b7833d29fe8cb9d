"""One look at a server: its metrics and its health, read over HTTP."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "fastserve_"


class NotReached(Exception):
    """The server did not answer, or not as ours does. The message says how."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One series: its labels, and its value."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """`samples` are by name, without the server's prefix. `at_s` is of a monotonic clock."""

    at_s: float
    health: dict[str, Any]
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def sum(self, name: str, **labels: str) -> float:
        """The sum over all series of `name` with these labels; 0 where there is none."""
        return sum(one.value for one in self.samples.get(name, ()) if _has(one, labels))

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values of `name` by one of its labels, other labels summed over."""
        found: dict[str, float] = {}
        for one in self.samples.get(name, ()):
            key = one.labels.get(label, "")
            found[key] = found.get(key, 0.0) + one.value
        return found


class Server:
    """Where to ask. `timeout_s` bounds each of the two questions."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        """Raises ValueError for what is not the URL of a server."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"{url}: http://HOST:PORT is wanted")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s

    def scrape(self) -> Scrape:
        """Look once. Raises NotReached."""
        at_s = time.monotonic()
        try:
            # 503 is an answer, too: it says what is the matter.
            health = json.loads(self._get("/health", (200, 503)))
            families = list(text_string_to_metric_families(self._get("/metrics", (200,)).decode()))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotReached(f"{self.url}: {str(error) or type(error).__name__}") from error
        samples: dict[str, list[Sample]] = {}
        for family in families:
            for name, labels, value, *_ in family.samples:
                if name.startswith(_PREFIX):
                    row = samples.setdefault(name.removeprefix(_PREFIX), [])
                    row.append(Sample(labels, value))
        if not samples:
            raise NotReached(f"{self.url}: its /metrics has none of fastserve's")
        return Scrape(at_s=at_s, health=health, samples=samples)

    def _get(self, path: str, statuses: tuple[int, ...]) -> bytes:
        # With TLS, certificates are verified: that is http.client's default.
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request("GET", self._path + path, headers=self._headers)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status not in statuses:
            hint = "; give the key in OPENAI_API_KEY" if answer.status == 401 else ""
            raise NotReached(f"{self.url}{path}: {answer.status} {answer.reason}{hint}")
        return body


def _has(sample: Sample, labels: dict[str, str]) -> bool:
    return all(sample.labels.get(name) == value for name, value in labels.items())
