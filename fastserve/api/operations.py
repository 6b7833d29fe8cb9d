"""Every operation of the API: method, path, and what it takes and answers, for the document.

Knows nothing of handlers (a test holds the two together) or of how the document says it
(openapi.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastserve.api import answers
from fastserve.api.input_items import LIMIT_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one route.

    `body` names its schema; `answer` is the shape of a 200 that is JSON, None: a 200 is text. Some
    answer a 503 in that shape, too. `links`: the parameter of other paths that an answer tells, and
    where. `query` is parameters and their schemas. `example` is a body that does on any server.
    """

    method: str
    path: str
    summary: str
    answer: Any
    body: str | None = None
    streams: bool = False
    error: str = "Error"
    answers_503: bool = False
    links: tuple[str, str] | None = None
    query: Mapping[str, Any] = field(default_factory=dict)
    example: Mapping[str, Any] | None = None


_TURNS = [{"role": "user", "content": "Say hello."}]


OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a chat",
        body="ChatRequest",
        example={"messages": _TURNS, "max_completion_tokens": 16},
        answer=answers.ChatCompletion,
        streams=True,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Continue texts",
        body="CompletionRequest",
        example={"prompt": "Once upon", "max_tokens": 16, "logprobs": 1},
        answer=answers.Completion,
        streams=True,
    ),
    Operation(
        method="POST",
        path="/v1/responses",
        summary="Answer in a conversation that is stored",
        body="ResponseRequest",
        example={"input": "Say hello.", "max_output_tokens": 16},
        answer=answers.ResponseAnswer,
        streams=True,
        links=("response", "$response.body#/id"),
    ),
    Operation(
        method="POST",
        path="/v1/responses/input_tokens",
        summary="Count the tokens of a conversation",
        body="ResponseRequest",
        example={"input": "Say hello."},
        answer=answers.InputTokens,
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response}",
        summary="Get a stored response",
        answer=answers.ResponseAnswer,
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{response}",
        summary="Forget a response",
        answer=answers.DeletedResponse,
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response}/input_items",
        summary="List what a stored response was asked with",
        answer=answers.InputItems,
        query={
            "after": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX},
            "order": {"enum": ["asc", "desc"]},
        },
    ),
    Operation(
        method="POST",
        path="/v1/responses/{response}/cancel",
        summary="Cancel a response in the background, which none is",
        answer=answers.ResponseAnswer,
    ),
    Operation(
        method="POST",
        path="/v1/messages",
        summary="Answer in a conversation",
        body="MessagesRequest",
        example={"messages": _TURNS, "max_tokens": 16},
        answer=answers.Message,
        streams=True,
        error="MessagesError",
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        summary="Count the tokens of a conversation",
        body="CountTokensRequest",
        example={"messages": _TURNS},
        answer=answers.TokenCount,
        error="MessagesError",
    ),
    Operation(
        method="POST",
        path="/v1/embeddings",
        summary="Embed texts, where the model does",
        body="EmbeddingRequest",
        answer=answers.Embeddings,
    ),
    Operation(
        method="POST",
        path="/tokenize",
        summary="Text or chat to tokens",
        body="TokenizeRequest",
        example={"prompt": "Once upon", "return_token_strs": True},
        answer=answers.Tokenized,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        summary="Tokens to text",
        body="DetokenizeRequest",
        example={"tokens": [1, 2]},
        answer=answers.Detokenized,
    ),
    Operation(
        method="GET",
        path="/v1/models",
        summary="List the models",
        answer=answers.Models,
        links=("model", "$response.body#/data/0/id"),
    ),
    Operation(
        method="GET",
        path="/v1/models/{model}",
        summary="Describe a model",
        answer=answers.ModelAnswer,
    ),
    Operation(
        method="GET",
        path="/health",
        summary="Whether what runs is worth keeping",
        answer=answers.Status,
        answers_503=True,
    ),
    Operation(
        method="GET",
        path="/ready",
        summary="Whether new requests are welcome",
        answer=answers.Status,
        answers_503=True,
    ),
    Operation(
        method="GET",
        path="/version",
        summary="The version of the server",
        answer=answers.Version,
    ),
    Operation(method="GET", path="/metrics", summary="What Prometheus scrapes", answer=None),
    Operation(
        method="GET",
        path="/perf_metrics",
        summary="The last requests and their timings",
        answer=list[answers.PerfRecord],
    ),
    Operation(method="GET", path="/openapi.json", summary="This document", answer=dict[str, Any]),
)
