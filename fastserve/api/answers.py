"""The shapes of whole answers, for the OpenAPI document.

Answers are rendered by hand, from what is at hand, elsewhere: these declarations are the other
account of them, and tests hold the two together. Nothing is in an answer that is not declared here.
A field that is only there when it was asked for, or has something to tell, is UNSET by default.

Knows nothing of what is sent (openapi.py, requests.py) or streamed.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class _Answer(Struct, forbid_unknown_fields=True, kw_only=True):
    """Whatever is told is declared."""


# ---- chats and completions


class CachedTokens(_Answer):
    """What of a prompt was computed for an earlier request."""

    cached_tokens: int


class ThoughtTokens(_Answer):
    """What of an answer was thought."""

    reasoning_tokens: int


class UsageAnswer(_Answer):
    """The tokens of an exchange."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET
    completion_tokens_details: ThoughtTokens | UnsetType = UNSET


class TopLogprob(_Answer):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(_Answer):
    """A token of an answer. Only the first token of a prompt has no logprob."""

    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """The logprobs of a chat's choice."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(_Answer):
    """The logprobs of a completion's choice, a column for each kind of fact."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CalledFunction(_Answer):
    """A function and the arguments it is called with: JSON text, or what the model took for it."""

    name: str
    arguments: str


class ToolCallAnswer(_Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Answer):
    """The answer of a chat."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChatChoice(_Answer):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(_Answer):
    """The answers to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(_Answer):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(_Answer):
    """The continuations of prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


# ---- responses


class OutputText(_Answer):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(_Answer, tag="message", tag_field="type"):
    """A message in a response's output."""

    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(_Answer):
    """A thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(_Answer, tag="reasoning", tag_field="type"):
    """What was thought before the answer, of which nobody makes a summary."""

    id: str
    status: Literal["completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(_Answer, tag="function_call", tag_field="type"):
    """A call of a function in a response's output."""

    id: str
    status: Literal["completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class WhyIncomplete(_Answer):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class EffortAnswer(_Answer):
    """How hard the model was asked to think."""

    effort: str | None
    summary: None


class TextAnswered(_Answer):
    """The format that was asked for."""

    format: dict[str, Any]


class InputDetails(_Answer):
    """What of a response's input was computed earlier."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(_Answer):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ThoughtTokens
    total_tokens: int


class ResponseAnswer(_Answer):
    """A response that has ended."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: bool
    error: None
    incomplete_details: WhyIncomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: EffortAnswer
    store: bool
    temperature: float
    text: TextAnswered
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage


class DeletedResponse(_Answer):
    """A response that is forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputText(_Answer):
    """A text of a conversation."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | UnsetType = UNSET


class InputTurn(_Answer):
    """A turn of the conversation that a response answers."""

    id: str
    type: Literal["message"]
    role: str
    status: Literal["completed"]
    content: list[InputText]


class InputItems(_Answer):
    """A page of such turns."""

    object: Literal["list"]
    data: list[InputTurn]
    first_id: str | None
    last_id: str | None
    has_more: bool


# ---- messages


class TextAnswerBlock(_Answer, tag="text", tag_field="type"):
    """A text in a message."""

    text: str


class ThinkingAnswerBlock(_Answer, tag="thinking", tag_field="type"):
    """A thought in a message. Nobody signs it."""

    thinking: str
    signature: str


class ToolUseAnswerBlock(_Answer, tag="tool_use", tag_field="type"):
    """A call of a tool in a message."""

    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(_Answer):
    """The tokens of a message: what was cached is not input besides."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(_Answer):
    """An answer in a conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextAnswerBlock | ThinkingAnswerBlock | ToolUseAnswerBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
    ]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(_Answer):
    """How many tokens a response would be asked with."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class TokenCount(_Answer):
    """How many tokens a conversation has."""

    input_tokens: int


# ---- tokens, models, and the server itself


class EmbeddingUsage(_Answer):
    """All of it is prompt."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(_Answer):
    """One input's numbers, as they are or in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(_Answer):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingAnswer]
    model: str
    usage: EmbeddingUsage


class TokenPiece(_Answer):
    """A token and its text; its bytes, where they are no text by themselves."""

    id: int
    piece: str | list[int]


class Tokenized(_Answer):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    token_strs: list[str] | None


class Detokenized(_Answer):
    """The text of tokens, by two names."""

    prompt: str
    content: str


class ModelAnswer(_Answer):
    """A model, in OpenAI's words and in Anthropic's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str
    max_input_tokens: int


class Models(_Answer):
    """The models: all of them on one page."""

    object: Literal["list"]
    data: list[ModelAnswer]
    first_id: str
    last_id: str
    has_more: bool


class Status(_Answer):
    """How the server is, and what its engine has to do."""

    status: Literal["starting", "ready", "draining", "stalled", "dead"]
    num_running: int
    num_waiting: int


class Version(_Answer):
    """The version of the server."""

    version: str


class Timings(_Answer):
    """When a request came to what, in Unix time; null: never."""

    server_arrival_time: float
    prepared_time: float | None
    arrival_time: float | None
    first_scheduled_time: float | None
    first_token_time: float | None
    server_first_token_time: float | None
    last_token_time: float | None
    finished_time: float


class PerfMetrics(_Answer):
    """What was measured of a request."""

    timing_metrics: Timings


class PerfRecord(_Answer):
    """One of the last requests."""

    request_id: str
    trace_id: str | None
    acceptor: int
    endpoint: str
    stream: bool
    status: int
    finish_reason: str | None
    num_choices: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    perf_metrics: PerfMetrics
