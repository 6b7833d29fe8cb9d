"""FastAPI on uvicorn: requests are validated and answers rendered by pydantic models."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, Literal

import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from bench.peers.dialect import MODEL, MODELS, parse_arguments
from bench.peers.paced import PacedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Message(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class ChatRequest(BaseModel):
    """The fields that most requests have, with their ranges."""

    model: str
    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    n: int = Field(default=1, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logprobs: bool = False
    stream: bool = False


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int = 0
    delta: Delta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class Chunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str = MODEL
    choices: list[ChunkChoice]


class Choice(BaseModel):
    index: int = 0
    message: Message
    logprobs: dict[str, Any] | None = None
    finish_reason: str


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    id: str
    object: str = "chat.completion"
    created: int
    model: str = MODEL
    choices: list[Choice]
    usage: Usage


def application(engine: PacedEngine) -> FastAPI:
    """The app: two routes."""

    async def models() -> dict[str, Any]:
        return MODELS

    async def chat(request: ChatRequest) -> Response:
        if request.stream:
            return StreamingResponse(_events(engine, request), media_type="text/event-stream")
        text = await engine.whole(tokens=request.max_tokens)
        prompt = sum(len(str(message.content).split()) for message in request.messages)
        completion = Completion(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            choices=[
                Choice(message=Message(role="assistant", content=text), finish_reason="length")
            ],
            usage=Usage(
                prompt_tokens=prompt,
                completion_tokens=request.max_tokens,
                total_tokens=prompt + request.max_tokens,
            ),
        )
        return Response(completion.model_dump_json(), media_type="application/json")

    app = FastAPI()
    app.add_api_route("/v1/models", models, methods=["GET"])
    # The models are this module's, and annotations are text: response_model is not to be guessed.
    app.add_api_route("/v1/chat/completions", chat, methods=["POST"], response_model=None)
    return app


async def _events(engine: PacedEngine, request: ChatRequest) -> AsyncIterator[str]:
    completion_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def event(delta: Delta, reason: str | None = None) -> str:
        choice = ChunkChoice(delta=delta, finish_reason=reason)
        chunk = Chunk(id=completion_id, created=created, choices=[choice])
        return f"data: {chunk.model_dump_json()}\n\n"

    yield event(Delta(role="assistant", content=""))
    async for word, _ in engine.stream(tokens=request.max_tokens):
        yield event(Delta(content=word))
    yield event(Delta(), "length")
    yield "data: [DONE]\n\n"


def main() -> None:
    arguments = parse_arguments()
    uvicorn.run(
        application(PacedEngine(step_s=arguments.step_s)),
        host="127.0.0.1",
        port=arguments.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        backlog=4096,
    )


if __name__ == "__main__":
    main()
