"""The floor: a bare uvloop protocol that looks for two fields and writes prepared bytes.

No framework, no HTTP parser, no JSON, no task per request. It serves nothing but the bench.
"""

from __future__ import annotations

import asyncio
import re
from typing import cast

import orjson
import uvloop

from bench.peers.dialect import DONE, MODELS, Chat, parse_arguments
from bench.peers.paced import WORDS, PacedEngine

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": *(\d+)')
_STREAM = re.compile(rb'"stream": *true')

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


def _chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


_CHAT = Chat(id="chatcmpl-0", created=0, tokens=64, stream=True, prompt_tokens=50)
_BEGINNING = _HEAD + _chunk(_CHAT.first())
_TEXTS = {word: _chunk(_CHAT.text(word)) for word in WORDS}
_END = _chunk(_CHAT.finish() + DONE) + b"0\r\n\r\n"


class _Connection(asyncio.Protocol):
    def __init__(self, engine: PacedEngine) -> None:
        self._engine = engine
        self._received = b""
        self._begun = False
        self._words: list[str] = []
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports derive from no class of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (the base's name)
        self._engine.abort(self._on_word)
        self._engine.abort(self._on_gathered)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        length = _LENGTH.search(self._received, 0, end)
        whole = end + (int(length[1]) if length else 0)
        if len(self._received) >= whole:
            request, self._received = self._received[:whole], self._received[whole:]
            self._serve(request)

    def _serve(self, request: bytes) -> None:
        tokens = _TOKENS.search(request)
        if tokens is None:
            body = orjson.dumps(MODELS)
            self._transport.write(_JSON % (len(body), body))
            return
        self._begun = False
        self._words = []
        sink = self._on_word if _STREAM.search(request) else self._on_gathered
        self._engine.run(sink, tokens=int(tokens[1]))

    def _on_word(self, word: str, is_last: bool) -> None:
        event = _TEXTS[word]
        if not self._begun:
            self._begun = True
            event = _BEGINNING + event
        self._transport.write(event + _END if is_last else event)

    def _on_gathered(self, word: str, is_last: bool) -> None:
        self._words.append(word)
        if is_last:
            tokens = len(self._words)
            chat = Chat(id="chatcmpl-0", created=0, tokens=tokens, stream=False, prompt_tokens=50)
            body = chat.whole("".join(self._words))
            self._transport.write(_JSON % (len(body), body))


async def _main() -> None:
    arguments = parse_arguments()
    engine = PacedEngine(step_s=arguments.step_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Connection(engine), "127.0.0.1", arguments.port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_main())
