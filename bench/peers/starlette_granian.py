"""Starlette on granian, a server in Rust, with dicts and orjson."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from granian.constants import Interfaces, Loops
from granian.server import Server
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.peers.dialect import DONE, MODELS, Chat, parse_arguments
from bench.peers.paced import PacedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

# The application is imported in a process of granian's, which hears of the step time in this way.
_STEP_S = "BENCH_PEER_STEP_S"

_engine = PacedEngine(step_s=float(os.environ.get(_STEP_S, "0")))


async def _models(_: Request) -> Response:
    return JSONResponse(MODELS)


async def _chat(request: Request) -> Response:
    try:
        chat = Chat.parse(await request.body())
    except (ValueError, KeyError, TypeError) as error:
        return JSONResponse({"error": {"message": repr(error)}}, status_code=400)
    if chat.stream:
        return StreamingResponse(_events(chat), media_type="text/event-stream")
    text = await _engine.whole(tokens=chat.tokens)
    return Response(chat.whole(text), media_type="application/json")


async def _events(chat: Chat) -> AsyncIterator[bytes]:
    yield chat.first()
    async for word, _ in _engine.stream(tokens=chat.tokens):
        yield chat.text(word)
    yield chat.finish()
    yield DONE


application = Starlette(
    routes=[
        Route("/v1/models", _models, methods=["GET"]),
        Route("/v1/chat/completions", _chat, methods=["POST"]),
    ]
)


def main() -> None:
    arguments = parse_arguments()
    os.environ[_STEP_S] = str(arguments.step_s)
    Server(
        "bench.peers.starlette_granian:application",
        address="127.0.0.1",
        port=arguments.port,
        interface=Interfaces.ASGI,
        loop=Loops.uvloop,
        workers=1,
        backlog=4096,
        log_enabled=False,
    ).serve()


if __name__ == "__main__":
    main()
