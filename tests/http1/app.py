"""A small application on the HTTP layer alone, to be driven by conformance suites.

`python tests/http1/app.py PORT` serves GET /health and POST /v1/completions (JSON, or events with
"stream": true) on uvloop until SIGTERM, then drains. It prints the port, which 0 leaves to the
system. Its model says one word again and again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from fastserve.http1 import sse
from fastserve.http1.connection import Connection
from fastserve.http1.connections import Connections
from fastserve.http1.limits import Limits
from fastserve.http1.message import RequestHead, Response

if TYPE_CHECKING:
    from fastserve.http1.exchange import Exchange

METHODS = {"/health": ("GET", "HEAD"), "/v1/completions": ("POST",)}
TOKEN_INTERVAL_S = 0.01


def error(status: int, message: str, **response: Any) -> Response:
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error"}})
    return Response(status, body=body.encode(), **response)


class App:
    """Fulfils connection.Application."""

    def check(self, head: RequestHead) -> Response | None:
        methods = METHODS.get(head.path)
        if head.method == "OPTIONS" and (methods or head.path == "*"):
            return None
        if methods is None:
            return error(404, "not found")
        if head.method not in methods:
            allow = ", ".join((*methods, "OPTIONS")).encode()
            return error(405, "method not allowed", headers=((b"Allow", allow),))
        if head.header(b"content-encoding") is not None:
            return error(415, "content codings are not understood")
        return None

    def serve(self, exchange: Exchange) -> None:
        if exchange.head.method == "OPTIONS":
            exchange.respond(preflight(exchange.head))
        elif exchange.head.path == "/health":
            exchange.respond(Response(200, body=b'{"status": "ok"}'))
        else:
            complete(exchange)

    def error_body(self, status: int, message: str, *, path: str | None) -> bytes:
        return error(status, message).body


def preflight(head: RequestHead) -> Response:
    methods = (*METHODS.get(head.path, ("GET", "HEAD", "POST")), "OPTIONS")
    allow = ", ".join(methods).encode()
    return Response(
        204,
        headers=(
            (b"Allow", allow),
            (b"Access-Control-Allow-Origin", b"*"),
            (b"Access-Control-Allow-Methods", allow),
            (b"Access-Control-Allow-Headers", b"authorization, content-type"),
        ),
    )


def complete(exchange: Exchange) -> None:
    try:
        request = json.loads(exchange.body.decode())
    except (ValueError, RecursionError) as problem:
        exchange.respond(error(400, f"invalid JSON: {problem}"[:200]))
        return
    match request:
        case {"model": str()}:
            max_tokens = request.get("max_tokens", 4)
        case _:
            max_tokens = None
    if not isinstance(max_tokens, int) or not isinstance(request.get("prompt", ""), str | list):
        exchange.respond(error(400, "invalid fields"))
    elif request.get("stream"):
        Stream(exchange, left=max(1, min(max_tokens, 100_000))).start()
    else:
        exchange.respond(Response(200, body=completion(finish_reason="stop")))


def completion(*, finish_reason: str | None) -> bytes:
    choice = {"index": 0, "text": "word ", "finish_reason": finish_reason, "logprobs": None}
    return json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [choice]}).encode()


@dataclass(slots=True)
class Stream:
    """Writes an event each TOKEN_INTERVAL_S, but none while the client does not take them."""

    exchange: Exchange
    left: int

    def start(self) -> None:
        self.exchange.start_stream()
        self.step()

    def step(self) -> None:
        if self.exchange.ended:
            return
        if not self.exchange.writable:
            self.exchange.on_writable = self.step
            return
        self.exchange.on_writable = None
        if self.left == 0:
            self.exchange.end(sse.DONE)
            return
        self.left -= 1
        self.exchange.write(sse.event(completion(finish_reason=None if self.left else "length")))
        asyncio.get_running_loop().call_later(TOKEN_INTERVAL_S, self.step)


async def main(port: int) -> None:
    loop = asyncio.get_running_loop()
    connections = Connections()
    limits = Limits(keep_alive_timeout_s=20.0)
    factory = partial(Connection, App(), limits=limits, connections=connections)
    server = await loop.create_server(factory, "127.0.0.1", port, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    server.close()
    connections.drain()
    if not await connections.wait_closed(timeout_s=30.0):
        connections.abort_all()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    uvloop.run(main(int(sys.argv[1])))
