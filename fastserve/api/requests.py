"""What a client may ask for: OpenAI's chat and completion requests, with the common extensions.

The Struct that checks a body is the request itself: nulls are gone before (body.py), so that every
absent field has its default and no value is undecided. Checks that need two fields follow by hand.
A typical chat of 400 bytes costs about 5 us.

Knows nothing of tokenizing: what needs the vocabulary or the length of the prompt in tokens is
asked later, by `check_vocabulary` and `sampling`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from fastserve.api.body import (
    INT64_MAX,
    INT64_MIN,
    check_nesting,
    convert,
    load_object,
    wrong_type,
)
from fastserve.api.messages import read_messages
from fastserve.api.prompts import FIT, Count, Side, check_ids, empty, read_prompts, truncated
from fastserve.api.structured import FIELDS as STRUCTURED_FIELDS
from fastserve.api.structured import read_grammar
from fastserve.api.tools import ToolChoice, grammar_of, read_tools
from fastserve.api.unsupported import sort_out
from fastserve.errors import ContextLengthExceeded, InvalidRequest
from fastserve.generation import LOGPROBS_MAX, Grammar, SamplingParams

# OpenAI's, per prompt.
N_MAX = 128
# n times the prompts of a request: each is a sequence in the engine.
CHOICES_MAX = 1024
# OpenAI allows 4. The text is searched for every stop at every delta.
STOPS_MAX = 16
STOP_CHARS_MAX = 1024
STOP_TOKEN_IDS_MAX = 128
LOGIT_BIAS_MAX = 1024
# OpenAI's default for completions. Chat has none: an answer may fill the context.
COMPLETION_MAX_TOKENS = 16

# Names that a chat template's own arguments have, or that its call could not take twice.
TEMPLATE_KWARGS_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "documents",
        "eos_token",
        "messages",
        "raise_exception",
        "self",
        "strftime_now",
        "tools",
    }
)

Int64 = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's `stream_options`, and vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and completions share. Each has a definite value.

    `top_k` -1 and 0 are both off. `grammar` is what the fields of structured.py ask for.
    `unknown_fields` are the names that nobody knows, in no order. `return_tokens_as_token_ids`:
    logprobs tell each token as `token_id:N` (vLLM's extension).
    """

    # What an answer is thought to need where the client does not say.
    TOKENS_DEFAULT: ClassVar[int] = 1

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=N_MAX)] = 1
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Count = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    seed: Int64 | None = None
    logit_bias: Annotated[
        dict[Count, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=LOGIT_BIAS_MAX)
    ] = msgspec.field(default_factory=dict)
    stop: Annotated[tuple[Stop, ...], Meta(max_length=STOPS_MAX)] = ()
    stop_token_ids: Annotated[tuple[Count, ...], Meta(max_length=STOP_TOKEN_IDS_MAX)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Meta(ge=FIT, le=INT64_MAX)] | None = None
    truncation_side: Side = "left"
    priority: Int64 = 0
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    sim: dict[str, object] | None = None
    grammar: Grammar | None = None
    unknown_fields: tuple[str, ...] = ()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far (vLLM's extension)."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def max_new_tokens(self) -> int | None:
        """What the client set, if anything; `max_tokens` is the deprecated name of the two."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell with each of the prompt; None: tell nothing."""
        return None

    def truncated(self, token_ids: list[int], *, max_seq_len: int) -> list[int]:
        """What is left of a prompt, if it is to be cut."""
        asked = self.max_new_tokens
        return truncated(
            token_ids,
            keep=self.truncate_prompt_tokens,
            side=self.truncation_side,
            max_seq_len=max_seq_len,
            num_wanted=max(self.TOKENS_DEFAULT if asked is None else asked, self.min_tokens),
        )


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions (OpenAI API reference, "Create chat completion").

    `messages` are ready for a chat template: dicts with "role" and a "content" that is a string.
    With `prompt_token_ids` (TensorRT-LLM's extension) those are the prompt, and there may be none.
    `continue_final_message`: the prompt ends within the last message; `echo`: the answer begins
    with that, where it is the assistant's (both vLLM's). `template_kwargs` is what the template
    gets besides; `reasoning_effort` is in there too. `tools` are those that may be called. Thoughts
    are left out of the answer without `include_reasoning` (vLLM's), and part of its content without
    `separate_reasoning` (SGLang's).
    """

    messages: list[dict[str, object]]
    prompt_token_ids: Annotated[list[Count], Meta(min_length=1)] | None = None
    echo: bool = False
    continue_final_message: bool = False
    wants_logprobs: bool = msgspec.field(default=False, name="logprobs")
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] = 0
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    template_kwargs: dict[str, object] = msgspec.field(
        default_factory=dict, name="chat_template_kwargs"
    )
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True

    @property
    def tool_schemas(self) -> dict[str, Any]:
        """The functions that may be called, and the schemas of their parameters, if any."""
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function.get("parameters") for function in functions}

    @property
    def must_call(self) -> bool:
        """Whether the answer must be calls, and so is what a grammar makes it."""
        return bool(self.tools) and self.tool_choice.mode in ("required", "named")

    def without_prompts(self) -> ChatRequest:
        """The same without what has become its prompt, which need not be kept until it ends."""
        return msgspec.structs.replace(self, messages=[], prompt_token_ids=None)

    @property
    def logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell with each; None: tell nothing."""
        return self.top_logprobs if self.wants_logprobs else None

    def sampling(self, *, prompt_tokens: int, max_seq_len: int, choice: int) -> SamplingParams:
        """How to generate choice number `choice`, whose prompt has that many tokens.

        Raises ContextLengthExceeded. Without a limit of the client's the answer may fill the rest
        of `max_seq_len`.
        """
        room = max_seq_len - prompt_tokens
        _check_room(self, prompt_tokens=prompt_tokens, max_seq_len=max_seq_len, param="messages")
        asked = self.max_new_tokens
        sampling = _sampling(
            self, max_tokens=room if asked is None else asked, logprobs=self.logprobs, choice=choice
        )
        if not self.must_call:
            return sampling
        grammar = grammar_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)
        return msgspec.structs.replace(sampling, grammar=grammar)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions (OpenAI API reference, "Create completion").

    Each of `prompts` is a text or a list of token ids; none is empty. Choices are numbered
    prompt by prompt: `n` of the first, then `n` of the second.
    """

    prompts: tuple[str | list[Count], ...] = msgspec.field(name="prompt")
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    TOKENS_DEFAULT: ClassVar[int] = COMPLETION_MAX_TOKENS

    def without_prompts(self) -> CompletionRequest:
        """The same without what has become its prompts."""
        return msgspec.structs.replace(self, prompts=())

    @property
    def prompt_logprobs(self) -> int | None:
        """As many as of the answer's, where the prompt is repeated before it."""
        return self.logprobs if self.echo else None

    def sampling(self, *, prompt_tokens: int, max_seq_len: int, choice: int) -> SamplingParams:
        """How to generate the `choice`th of n for a prompt of that many tokens.

        Raises ContextLengthExceeded. `max_tokens` 0 (with echo) means there is nothing to generate.
        """
        room = max_seq_len - prompt_tokens
        _check_room(self, prompt_tokens=prompt_tokens, max_seq_len=max_seq_len, param="prompt")
        asked = self.max_new_tokens
        max_tokens = min(COMPLETION_MAX_TOKENS, room) if asked is None else asked
        return _sampling(self, max_tokens=max_tokens, logprobs=self.logprobs, choice=choice)


def parse_chat(body: bytes) -> ChatRequest:
    """Read a chat request. Raises InvalidRequest, and nothing else, for whatever is wrong."""
    return parse_chat_fields(load_object(body))


def parse_chat_fields(fields: dict[str, Any]) -> ChatRequest:
    """Read the fields of a chat request; they are changed on the way. Raises InvalidRequest."""
    fields["unknown_fields"] = sort_out(fields, ours=_CHAT_FIELDS)
    fields["grammar"] = read_grammar(fields)
    if "messages" in fields or "prompt_token_ids" not in fields:
        fields["messages"] = read_messages(fields.get("messages"))
    else:
        fields["messages"] = []
    _normalize_continuation(fields)
    _normalize(fields)
    _normalize_template_kwargs(fields)
    read_tools(fields)
    request = convert(fields, ChatRequest)
    _check_together(request, tokens_min=1, tokens_default=None)
    if request.top_logprobs and not request.wants_logprobs:
        raise InvalidRequest(
            "'top_logprobs' needs 'logprobs' to be true.",
            param="top_logprobs",
            code="invalid_value",
        )
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Read a completion request. Raises InvalidRequest, and nothing else, for whatever is wrong."""
    fields = load_object(body)
    fields["unknown_fields"] = sort_out(fields, ours=_COMPLETION_FIELDS)
    fields["grammar"] = read_grammar(fields)
    fields["prompt"] = read_prompts(fields.get("prompt"))
    _normalize(fields)
    request = convert(fields, CompletionRequest)
    tokens_min = 0 if request.echo else 1
    _check_together(request, tokens_min=tokens_min, tokens_default=COMPLETION_MAX_TOKENS)
    if request.n * len(request.prompts) > CHOICES_MAX:
        raise InvalidRequest(
            f"'n' times the number of prompts must be at most {CHOICES_MAX}.",
            param="n",
            code="integer_above_max_value",
        )
    return request


def check_vocabulary(request: ChatRequest | CompletionRequest, *, vocab_size: int) -> None:
    """Raise InvalidRequest if a token id of the request is none of the model's."""
    check_ids(request.logit_bias, param="logit_bias", vocab_size=vocab_size)
    check_ids(request.stop_token_ids, param="stop_token_ids", vocab_size=vocab_size)
    if isinstance(request, ChatRequest):
        check_ids(request.prompt_token_ids, param="prompt_token_ids", vocab_size=vocab_size)
    else:
        for prompt in request.prompts:
            if not isinstance(prompt, str):
                check_ids(prompt, param="prompt", vocab_size=vocab_size)


def _check_room(
    request: GenerationRequest, *, prompt_tokens: int, max_seq_len: int, param: str
) -> None:
    """Raise ContextLengthExceeded if the context cannot hold the prompt and what was asked for."""
    asked = request.max_new_tokens
    needed = max(1 if asked is None else asked, request.min_tokens)
    if prompt_tokens + needed > max_seq_len:
        # Client libraries look for these first words where they do not look at the code.
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_seq_len} tokens, but the prompt has "
            f"{prompt_tokens} and at least {needed} more were asked for.",
            param=param,
        )


def _sampling(
    request: GenerationRequest, *, max_tokens: int, logprobs: int | None, choice: int
) -> SamplingParams:
    seed = request.seed
    if seed is not None:
        # The choices of a seeded request differ from each other, and are the same every time.
        seed = (seed + choice - INT64_MIN) % 2**64 + INT64_MIN
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        seed=seed,
        logit_bias=request.logit_bias,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        priority=request.priority,
        grammar=request.grammar,
    )


def _normalize_continuation(fields: dict[str, Any]) -> None:
    """A message that is to be continued has nothing after it, unless that was asked for."""
    if fields.get("continue_final_message") is not True:
        return
    if fields.setdefault("add_generation_prompt", False) is True:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.",
            param="continue_final_message",
            code="invalid_value",
        )


def _normalize(fields: dict[str, Any]) -> None:
    """Bring the fields that have more than one form to the form of the Struct."""
    if isinstance(stop := fields.get("stop"), str):
        if not stop:
            raise empty("stop")
        fields["stop"] = [stop]
    if "sim" in fields:
        check_nesting(fields["sim"], param="sim")


def _normalize_template_kwargs(fields: dict[str, Any]) -> None:
    kwargs = fields.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise wrong_type("chat_template_kwargs", want="an object", got=kwargs)
    check_nesting(kwargs, param="chat_template_kwargs")
    if taken := kwargs.keys() & TEMPLATE_KWARGS_RESERVED:
        raise InvalidRequest(
            f"'chat_template_kwargs' must not set '{min(taken)}'.",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    if "reasoning_effort" in fields:
        # Only templates know what to do about it, each in its own way.
        kwargs = {"reasoning_effort": fields["reasoning_effort"]} | kwargs
    if kwargs:
        fields["chat_template_kwargs"] = kwargs


def _check_together(
    request: GenerationRequest, *, tokens_min: int, tokens_default: int | None
) -> None:
    """The checks that need more than one field, or another bound in each dialect."""
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(request, name)
        if value is not None and value < tokens_min:
            raise InvalidRequest(
                f"'{name}' must be at least {tokens_min}; it is {value}.",
                param=name,
                code="integer_below_min_value",
            )
    if request.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            f"'truncate_prompt_tokens' must be at least 1, or {FIT} for as many as fit.",
            param="truncate_prompt_tokens",
            code="integer_below_min_value",
        )
    asked = request.max_new_tokens
    limit = tokens_default if asked is None else asked
    if limit is not None and request.min_tokens > limit:
        raise InvalidRequest(
            f"'min_tokens' must be at most the {limit} of 'max_tokens'.",
            param="min_tokens",
            code="integer_above_max_value",
        )
    if request.stream_options is not None:
        _check_stream_options(request.stream_options, stream=request.stream)


def _check_stream_options(options: StreamOptions, *, stream: bool) -> None:
    if not stream:
        raise InvalidRequest(
            "'stream_options' needs 'stream' to be true.",
            param="stream_options",
            code="invalid_value",
        )
    if options.continuous_usage_stats and not options.include_usage:
        raise InvalidRequest(
            "'stream_options.continuous_usage_stats' needs 'include_usage' to be true.",
            param="stream_options.continuous_usage_stats",
            code="invalid_value",
        )
    if options.include_obfuscation:
        raise InvalidRequest(
            "'stream_options.include_obfuscation' is not supported.",
            param="stream_options.include_obfuscation",
            code="unsupported_value",
        )


def _names(request: type[GenerationRequest]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(request)) - OUR_OWN


# What the parser adds to the fields that were sent.
OUR_OWN = frozenset({"grammar", "unknown_fields"})

_CHAT_FIELDS = _names(ChatRequest) | STRUCTURED_FIELDS
_COMPLETION_FIELDS = _names(CompletionRequest) | STRUCTURED_FIELDS
