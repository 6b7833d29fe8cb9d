"""From a body's bytes to token ids and sampling parameters: pure, and safe to run in any thread."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from fastserve.api.anthropic_answers import MessagesDialect
from fastserve.api.anthropic_requests import parse_messages
from fastserve.api.dialect import ChatDialect, CompletionDialect
from fastserve.api.embeddings import EmbeddingDialect, parse_embeddings
from fastserve.api.requests import (
    ChatRequest,
    CompletionRequest,
    check_vocabulary,
    parse_chat,
    parse_completion,
)
from fastserve.api.response_objects import ResponseDialect, conversation_of
from fastserve.api.response_requests import parse_response
from fastserve.api.structured import check_supported
from fastserve.errors import InvalidRequest, ModelNotFound, NotFound
from fastserve.frontend.parsed import Parsing
from fastserve.frontend.response_store import new_response_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fastserve.api.dialect import Dialect
    from fastserve.frontend.model import Model
    from fastserve.frontend.response_store import ResponseStore
    from fastserve.generation import SamplingParams


# So many ids are worth packing: as objects, a million are 36 MB and cost 20 ms to make and to free.
PACKED_MIN = 4096


def packed(token_ids: list[int]) -> Sequence[int]:
    """The ids of a prompt, in four bytes each where they are many."""
    return token_ids if len(token_ids) < PACKED_MIN else array("I", token_ids)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt in tokens. `echo` is the text that is repeated before its answer, if any.

    The first `num_unechoed` tokens are not in that, nor are control tokens unless `echo_control`.
    """

    token_ids: Sequence[int]
    echo: str = ""
    num_unechoed: int = 0
    echo_control: bool = True


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request that is ready for the engine, and the dialect of its answer.

    `parsing`: how the answer is parsed, if it is not plain text. `embeds`: it is no text at all.
    """

    request: ChatRequest | CompletionRequest
    dialect: Dialect
    prompts: list[Prompt]
    max_seq_len: int
    parsing: Parsing | None = None
    embeds: bool = False

    def choices(self) -> Iterator[tuple[Prompt, SamplingParams]]:
        """Yield the prompt and the parameters of each choice: n of the first prompt come first.

        Raises ContextLengthExceeded.
        """
        for prompt in self.prompts:
            for choice in range(self.request.n):
                sampling = self.request.sampling(
                    prompt_tokens=len(prompt.token_ids), max_seq_len=self.max_seq_len, choice=choice
                )
                yield prompt, sampling


def check_model(name: str | None, model: Model) -> None:
    """Raise ModelNotFound if a request named another model than the one that is here."""
    if name is not None and name not in model.names:
        has = "' and '".join(model.names)
        raise ModelNotFound(
            f"The model '{name}' does not exist. This server has '{has}'.",
            param="model",
        )


def check_task(model: Model, *, embeds: bool) -> Model:
    """Return the model. Raises NotFound if it does not do what the route is for."""
    if model.embeds == embeds:
        return model
    if model.embeds:
        raise NotFound("this server's model makes embeddings; it generates no text")
    raise NotFound("this server's model generates text; it makes no embeddings")


def _chat_prompt(request: ChatRequest, model: Model) -> tuple[Prompt, str]:
    """The prompt, in tokens and as the template made it."""
    check_vocabulary(request, vocab_size=model.card.vocab_size)
    check_supported(request.grammar, model.card.grammar_kinds)
    text = model.chat_text(request)
    token_ids = model.chat_tokens(text, request)
    if not token_ids:
        raise InvalidRequest("the chat template made an empty prompt", param="messages")
    return Prompt(token_ids=packed(token_ids), echo=_echo_of_chat(request)), text


def _echo_of_chat(request: ChatRequest) -> str:
    """What an answer goes on from, which is the last message if that is the assistant's."""
    if not request.echo or not request.messages:
        return ""
    last = request.messages[-1]
    return str(last["content"]) if last["role"] == "assistant" else ""


def prepare_chat(body: bytes, model: Model) -> Prepared:
    """Validate, template and tokenize a chat request. Raises RequestError."""
    request = parse_chat(body)
    prompt, text = _chat_prompt(request, model)
    request = request.without_prompts()
    dialect = ChatDialect(request)
    return Prepared(
        request=request,
        dialect=dialect,
        prompts=[prompt],
        max_seq_len=model.card.max_seq_len,
        parsing=Parsing.of(request, prompt=text, model=model, dialect=dialect),
    )


def prepare_messages(body: bytes, model: Model) -> Prepared:
    """Validate, template and tokenize a request of the Messages API. Raises RequestError.

    The context ends an answer before `max_tokens` does, where that is more than there is room for:
    clients of this API ask for what their usual model could say.
    """
    asked = parse_messages(body)
    prompt, text = _chat_prompt(asked.as_chat(), model)
    room = max(model.card.max_seq_len - len(prompt.token_ids), 1)
    request = asked.as_chat(max_tokens=min(asked.max_tokens, room))
    dialect = MessagesDialect(max_tokens=asked.max_tokens)
    return Prepared(
        request=request,
        dialect=dialect,
        prompts=[prompt],
        max_seq_len=model.card.max_seq_len,
        parsing=Parsing.of(request, prompt=text, model=model, dialect=dialect),
    )


def prepare_response(body: bytes, model: Model, *, store: ResponseStore | None) -> Prepared:
    """Validate, template and tokenize a request of the Responses API. Raises RequestError.

    `store` has the conversation that it may continue, and takes the response in the end.
    """
    asked = parse_response(body)
    if asked.fields.store and store is None:
        raise InvalidRequest("This server stores no responses.", param="store")
    request = asked.as_chat(earlier(asked.fields.previous_response_id, store))
    prompt, text = _chat_prompt(request, model)
    response_id = new_response_id() if store is None else store.new_id()
    dialect = ResponseDialect(
        asked,
        request,
        response_id=response_id,
        keep=None if store is None or asked.fields.store is False else store.put,
    )
    parsing = Parsing.of(request, prompt=text, model=model, dialect=dialect)
    if parsing is not None and request.logprobs is not None:
        raise InvalidRequest(
            "Logprobs are not supported where an answer may have calls or thoughts: not every "
            "token is text then.",
            param="include",
            code="unsupported_value",
        )
    return Prepared(
        request=request,
        dialect=dialect,
        prompts=[prompt],
        max_seq_len=model.card.max_seq_len,
        parsing=parsing,
    )


def earlier(response_id: str | None, store: ResponseStore | None) -> list[dict[str, object]]:
    """The conversation up to a stored response."""
    if response_id is None:
        return []
    record = None if store is None else store.get(response_id)
    if record is None:
        raise InvalidRequest(
            f"Previous response with id '{response_id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return conversation_of(record)


def prepare_completion(body: bytes, model: Model) -> Prepared:
    """Validate and tokenize a completion request. Raises RequestError."""
    request = parse_completion(body)
    check_vocabulary(request, vocab_size=model.card.vocab_size)
    check_supported(request.grammar, model.card.grammar_kinds)
    prompts = [_completion_prompt(prompt, request, model) for prompt in request.prompts]
    request = request.without_prompts()
    return Prepared(
        request=request,
        dialect=CompletionDialect(request),
        prompts=prompts,
        max_seq_len=model.card.max_seq_len,
    )


def prepare_embeddings(body: bytes, model: Model) -> Prepared:
    """Validate and tokenize a request for embeddings. Raises RequestError.

    To all that follows, each text is a completion of no tokens.
    """
    asked = parse_embeddings(body, size=model.card.embedding_size, vocab_size=model.card.vocab_size)
    return Prepared(
        request=asked.as_completion(),
        dialect=EmbeddingDialect(packed=asked.encoding_format == "base64"),
        prompts=[_embedding_prompt(text, model) for text in asked.inputs],
        max_seq_len=model.card.max_seq_len,
        embeds=True,
    )


def _embedding_prompt(text: str | list[int], model: Model) -> Prompt:
    token_ids = model.embedding_prompt(text)
    if not token_ids:
        raise InvalidRequest("'input' has no token", param="input")
    return Prompt(token_ids=packed(token_ids))


def _completion_prompt(prompt: str | list[int], request: CompletionRequest, model: Model) -> Prompt:
    whole = model.completion_prompt(
        prompt, special=request.add_special_tokens, cut=bool(request.truncate_prompt_tokens)
    )
    if not whole:
        raise InvalidRequest("'prompt' has no token", param="prompt")
    token_ids = request.truncated(whole, max_seq_len=model.card.max_seq_len)
    if not request.echo:
        return Prompt(token_ids=packed(token_ids))
    if isinstance(prompt, str) and token_ids is whole:
        num_unechoed = model.num_bos if request.add_special_tokens else 0
        return Prompt(token_ids=packed(token_ids), echo=prompt, num_unechoed=num_unechoed)
    skip = request.skip_special_tokens
    echo = model.tokenizer.decode(token_ids, skip_special_tokens=skip)
    return Prompt(token_ids=packed(token_ids), echo=echo, echo_control=not skip)
