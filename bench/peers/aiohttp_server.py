"""aiohttp on uvloop, with dicts and orjson."""

from __future__ import annotations

import uvloop
from aiohttp import web

from bench.peers.dialect import DONE, MODELS, Chat, parse_arguments
from bench.peers.paced import PacedEngine

_ENGINE = web.AppKey("engine", PacedEngine)


async def _models(_: web.Request) -> web.Response:
    return web.json_response(MODELS)


async def _chat(request: web.Request) -> web.StreamResponse:
    engine = request.app[_ENGINE]
    try:
        chat = Chat.parse(await request.read())
    except (ValueError, KeyError, TypeError) as error:
        return web.json_response({"error": {"message": repr(error)}}, status=400)
    if not chat.stream:
        text = await engine.whole(tokens=chat.tokens)
        return web.Response(body=chat.whole(text), content_type="application/json")
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    await answer.write(chat.first())
    async for word, _ in engine.stream(tokens=chat.tokens):
        await answer.write(chat.text(word))
    await answer.write(chat.finish())
    await answer.write(DONE)
    await answer.write_eof()
    return answer


def main() -> None:
    arguments = parse_arguments()
    application = web.Application()
    application[_ENGINE] = PacedEngine(step_s=arguments.step_s)
    application.router.add_get("/v1/models", _models)
    application.router.add_post("/v1/chat/completions", _chat)
    web.run_app(
        application,
        host="127.0.0.1",
        port=arguments.port,
        access_log=None,
        print=None,
        backlog=4096,
        loop=uvloop.new_event_loop(),
    )


if __name__ == "__main__":
    main()
