"""Embeddings: what may be asked for, and how it is answered (OpenAI API reference, "Create
embeddings").

A text that is to be embedded takes the way of a completion of no tokens, so this is a dialect.

Knows nothing of tokenizing, nor of how numbers are made of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
import orjson
from msgspec import Meta

from fastserve.api import responses
from fastserve.api.body import check_nesting, convert, load_object
from fastserve.api.prompts import Count, check_ids, read_inputs
from fastserve.api.requests import OUR_OWN, CompletionRequest
from fastserve.api.unsupported import sort_out
from fastserve.errors import InvalidRequest
from fastserve.generation import embedding_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.api.dialect import Chunks
    from fastserve.api.responses import Choice, Usage
    from fastserve.errors import FastserveError


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/embeddings. Each of `inputs` is a text or a list of token ids; none is empty.

    `dimensions`: how many numbers an embedding is to have, which only the model's own may be: the
    first of a model's numbers are an embedding only where it was trained for that, and no file says
    so.
    """

    inputs: tuple[str | list[Count], ...] = msgspec.field(name="input")
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    sim: dict[str, object] | None = None
    unknown_fields: tuple[str, ...] = ()

    def as_completion(self) -> CompletionRequest:
        """The request as all that follows knows it."""
        return CompletionRequest(
            prompts=(),
            model=self.model,
            max_tokens=0,
            sim=self.sim,
            unknown_fields=self.unknown_fields,
        )


def parse_embeddings(body: bytes, *, size: int, vocab_size: int) -> EmbeddingRequest:
    """Read a request for embeddings of `size` numbers. Raises InvalidRequest."""
    fields = load_object(body)
    fields["unknown_fields"] = sort_out(fields, ours=_FIELDS)
    fields["input"] = read_inputs(fields.get("input"))
    if "sim" in fields:
        check_nesting(fields["sim"], param="sim")
    request = convert(fields, EmbeddingRequest)
    if request.dimensions not in (None, size):
        raise InvalidRequest(
            f"'dimensions' must be the {size} of this model's embeddings, if it is given.",
            param="dimensions",
            code="unsupported_value",
        )
    for ids in request.inputs:
        if not isinstance(ids, str):
            check_ids(ids, param="input", vocab_size=vocab_size)
    return request


class EmbeddingDialect:
    """POST /v1/embeddings. `packed`: numbers in base64 are wanted, and not in JSON."""

    __slots__ = ("_packed",)

    ping: ClassVar[bytes] = b""
    done: ClassVar[bytes] = b""

    def __init__(self, *, packed: bool) -> None:
        self._packed = packed

    def answer_id(self, request_id: str) -> str:
        return f"embd-{request_id}"

    def chunks(self, **_: object) -> Chunks:
        raise AssertionError("no request for embeddings is streamed")

    def whole(self, choices: Sequence[Choice], *, model: str, usage: Usage, **_: object) -> bytes:
        """A list of `embedding` objects, in the order of the inputs."""
        return orjson.dumps(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": self._shown(choice)}
                    for index, choice in enumerate(choices)
                ],
                "model": model,
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "total_tokens": usage.prompt_tokens,
                },
            }
        )

    def error_body(self, error: FastserveError) -> bytes:
        return responses.error_body(error)

    def error_event(self, error: FastserveError) -> bytes:
        return responses.error_event(error)

    def _shown(self, choice: Choice) -> str | list[float]:
        assert choice.embedding is not None, "an engine that embeds ends with an embedding"
        return choice.embedding if self._packed else embedding_values(choice.embedding)


_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(EmbeddingRequest)) - (
    OUR_OWN
)
