"""A collector of OpenTelemetry spans, for tests: a small HTTP server that decodes what it gets."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import threading
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator


class Collector:
    """What came: spans, and the attributes of who sent them. `status` is what it answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.status = 200
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.asked = threading.Semaphore(0)

    def take(self, body: bytes) -> None:
        if self.status == 200:
            request = ExportTraceServiceRequest.FromString(body)
            for group in request.resource_spans:
                self.resources.append(attributes(group.resource.attributes))
                self.spans += [span for scope in group.scope_spans for span in scope.spans]
        self.asked.release()


def attributes(pairs: Any) -> dict[str, Any]:
    """Attributes as a dictionary; a list as a list."""
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        if kind == "array_value":
            value = [each.string_value for each in value.values]
        found[pair.key] = value
    return found


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            status = collector.status
            collector.take(body)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
