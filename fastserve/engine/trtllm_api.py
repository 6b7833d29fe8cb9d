"""TensorRT-LLM's LLM API as it is used here: the one file that imports it, and what it is given.

Token ids go in and come out: its tokenizer is loaded only where grammars need it. It changes
quickly, so nothing about it is taken for granted. What a request asks for and the installed version
lacks is refused, never dropped. That includes what SamplingParams accepts but the sampler ignores.

The sources are the LLM API's reference and NVIDIA's sampling page, from 1.2 to 1.4. Knows nothing
of threads, lanes or HTTP.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from fastserve.errors import InvalidRequest, StartError
from fastserve.generation import GrammarKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from fastserve.generation import Grammar, ModelCard, SamplingParams

# What trtllm-serve allows by default; the KV cache limits how many really run.
_BATCH_SIZE_DEFAULT = 2048

# What the card, the tokenizer, the cursors of results or the watch over ranks depend on, so a file
# may not change it; and what to do instead, where there is something.
_OURS = {
    "model": "--model",
    "max_seq_len": "--max_seq_len",
    "num_serve_frontends": "--frontends",
    "tokenizer": "", "tokenizer_mode": "", "skip_tokenizer_init": "", "max_beam_width": "",
    "num_postprocess_workers": "", "postprocess_tokenizer_dir": "", "executor_cls": "",
    "_mpi_session": "",
}  # fmt: skip

# What puts ranks into processes that are not on this host's list, or not ours to kill: their death
# would be nobody's news. The variable chooses ray, and makes a frontend of another server's engine.
_ORCHESTRATORS = ("rpc", "ray")
_VARIABLES = {
    "TLLM_DISABLE_MPI": "it chooses the ray orchestrator",
    "TLLM_EXECUTOR_ATTACH_INFO": "it attaches to the engine of another server",
}

# Without these no request can be put, so a version that lacks one is refused at start-up.
_SAMPLING_FIELDS = frozenset(
    {
        "max_tokens", "end_id", "pad_id", "stop_token_ids", "include_stop_str_in_output",
        "ignore_eos", "detokenize", "temperature", "top_k", "top_p",
    }
)  # fmt: skip
_GENERATE_PARAMETERS = frozenset({"inputs", "sampling_params", "streaming"})

# From when on the default sampler of the PyTorch backend heeds what SamplingParams always accepted:
# NVIDIA/TensorRT-LLM pull requests 16485 (penalties), 16590 (min_p) and 17172 (seed).
_HEEDED_SINCE = {
    "presence_penalty": (1, 3, 0, 24),
    "frequency_penalty": (1, 3, 0, 24),
    "repetition_penalty": (1, 3, 0, 24),
    "min_p": (1, 3, 0, 24),
    "seed": (1, 4, 0, 0),
}
_RELEASED = 1 << 30  # a release comes after each of its candidates

# What the library calls each kind of grammar, and which of them each of its backends follows: EBNF
# is xgrammar's language alone (the LLM API's reference, "guided decoding").
_GUIDED_FIELDS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "grammar",
}
_GUIDED_KINDS: dict[object, tuple[GrammarKind, ...]] = {
    "xgrammar": (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.EBNF),
    "llguidance": (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX),
}

_SEED_MASK = (1 << 64) - 1


class Logprob(Protocol):
    """One token's log probability."""

    logprob: float


class CompletionOutput(Protocol):
    """The one sequence of a request. Lists grow from response to response; finish_reason is last.

    `logprobs` has for each token a dict from token id, the sampled one's always among them, or
    the sampled one's log probability alone.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | list[float] | None
    finish_reason: str | None
    stop_reason: int | str | None


class RequestOutput(Protocol):
    """A request under way. Iterating yields this same object, changed by each response."""

    outputs: list[CompletionOutput]

    def abort(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...


class LLM(Protocol):
    """The engine. One event loop's thread makes every call but `get_stats` and `_check_health`."""

    def generate_async(
        self, inputs: object, *, sampling_params: object, streaming: bool, **more: object
    ) -> RequestOutput: ...

    def get_stats(self, timeout: float) -> list[dict[str, Any]]: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtLlmOptions:
    """What trtllm-serve has flags for, with its names and defaults.

    `max_batch_size` None: the server's max_num_seqs, or 2048. `max_num_tokens`: tokens in one
    step, and the longest prompt unless `enable_chunked_prefill`. The memory fraction, from 0 to 1,
    is of what the weights leave free. `enable_iter_perf_stats`: know the KV cache's usage, at some
    cost for each step. `extra_options_path`: a YAML file of arguments of tensorrt_llm.LLM, which
    win over these.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    moe_expert_parallel_size: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int = 8192
    enable_chunked_prefill: bool = False
    kv_cache_free_gpu_memory_fraction: float = 0.9
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    enable_iter_perf_stats: bool = False
    extra_options_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The installed TensorRT-LLM: what is called, what it raises, and its version.

    `make_guided`: what a grammar is put into, if there is such a thing. `fatal`: exceptions after
    which the engine is gone. `takes_trace_headers`: whether a request's trace can be handed on to
    it, which not every version knows.
    """

    make_llm: Callable[..., LLM]
    make_sampling_params: Callable[..., object]
    make_guided: Callable[..., object] | None
    sampling_fields: frozenset[str]
    request_error: type[BaseException]
    fatal: tuple[type[BaseException], ...]
    version: str
    takes_trace_headers: bool

    def is_fatal(self, error: BaseException) -> bool:
        """Whether `error` is the engine's end, and not just one request's.

        RequestError is a RuntimeError, and any other RuntimeError is a shutdown or worse.
        """
        return isinstance(error, self.fatal) and not isinstance(error, self.request_error)


def import_library() -> Library:
    """Import tensorrt_llm, which takes a minute. Raises StartError if that does not work."""
    try:
        package: Any = importlib.import_module("tensorrt_llm")
        executor: Any = importlib.import_module("tensorrt_llm.executor")
        utils: Any = importlib.import_module("tensorrt_llm.executor.utils")
        version: Any = importlib.import_module("tensorrt_llm.version")
        llmapi: Any = importlib.import_module("tensorrt_llm.llmapi")
    except ModuleNotFoundError as error:
        if error.name != "tensorrt_llm":
            raise StartError(f"TensorRT-LLM lacks a module of its own: {error}") from error
        raise StartError(
            "TensorRT-LLM is not installed: pip install 'fastserve[trtllm]' "
            "--extra-index-url https://pypi.nvidia.com (it needs an NVIDIA GPU)"
        ) from error
    # A driver or a CUDA library that is missing shows as an ImportError, an OSError or worse.
    except Exception as error:
        raise StartError(
            f"TensorRT-LLM cannot be imported ({type(error).__name__}: {error}); "
            "it needs an NVIDIA GPU, its driver, CUDA and MPI"
        ) from error
    parameters = inspect.signature(package.LLM.generate_async).parameters
    # CppExecutorError and EngineDeadError are not in every version.
    names = ("CppExecutorError", "EngineDeadError")
    found = [getattr(executor, name) for name in names if hasattr(executor, name)]
    library = Library(
        make_llm=package.LLM,
        make_sampling_params=package.SamplingParams,
        make_guided=getattr(llmapi, "GuidedDecodingParams", None),
        sampling_fields=frozenset(inspect.signature(package.SamplingParams).parameters),
        request_error=utils.RequestError,
        fatal=(RuntimeError, *found),
        version=str(version.__version__),
        takes_trace_headers="trace_headers" in parameters,
    )
    _check(library, parameters)
    return library


def _check(library: Library, parameters: Mapping[str, object]) -> None:
    lacking = _SAMPLING_FIELDS - library.sampling_fields | _GENERATE_PARAMETERS - set(parameters)
    if lacking:
        raise StartError(
            f"TensorRT-LLM {library.version} is not supported: its LLM API lacks "
            + ", ".join(sorted(lacking))
        )


# --- the constructor's arguments ---


def read_extra_options(path: Path) -> dict[str, object]:
    """Read a YAML mapping of arguments of tensorrt_llm.LLM. Raises StartError."""
    try:
        extra = msgspec.yaml.decode(path.read_bytes(), type=dict[str, object] | None)
    except ImportError as error:
        raise StartError(f"{path}: reading YAML needs PyYAML (pip install pyyaml)") from error
    except (OSError, msgspec.DecodeError) as error:
        raise StartError(f"{path}: {error}") from error
    for name, instead in _OURS.items():
        if extra and name in extra:
            hint = f": {instead}" if instead else ""
            raise StartError(f"{path}: {name} is fastserve's to set{hint}")
    extra = extra or {}
    if extra.get("orchestrator_type") in _ORCHESTRATORS:
        raise StartError(
            f"{path}: orchestrator_type {extra['orchestrator_type']} is not supported: its ranks "
            "are not processes whose death can be seen here, nor which could be ended; leave it "
            "out, and ranks are MPI's"
        )
    return extra


def refuse_variables(environ: Mapping[str, str]) -> None:
    """Raise StartError for variables with which the library would start no engine of its own."""
    for name, effect in _VARIABLES.items():
        if environ.get(name, "0") not in ("", "0"):
            raise StartError(f"{name} is set: {effect}, which is not supported; unset it")


def llm_arguments(
    *,
    model: str,
    card: ModelCard,
    options: TrtLlmOptions,
    max_num_seqs: int,
    extra: Mapping[str, object],
) -> dict[str, object]:
    """Return the arguments of tensorrt_llm.LLM. Limits are all explicit: defaults vary.

    `max_num_seqs` 0 leaves the choice to `options`, and `extra` wins over all of it.
    """
    kv_cache: dict[str, object] = {
        "free_gpu_memory_fraction": options.kv_cache_free_gpu_memory_fraction
    }
    arguments: dict[str, object] = {
        "model": model,
        # Which tokens fit a grammar depends on what they are in bytes.
        "skip_tokenizer_init": not grammar_kinds(extra),
        "trust_remote_code": options.trust_remote_code,
        "dtype": options.dtype,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "max_batch_size": options.max_batch_size or max_num_seqs or _BATCH_SIZE_DEFAULT,
        "max_num_tokens": options.max_num_tokens,
        "max_seq_len": card.max_seq_len,
        "max_beam_width": 1,
        "enable_chunked_prefill": options.enable_chunked_prefill,
        "kv_cache_config": kv_cache,
    }
    if options.kv_cache_dtype != "auto":
        kv_cache["dtype"] = options.kv_cache_dtype
    if options.moe_expert_parallel_size is not None:
        arguments["moe_expert_parallel_size"] = options.moe_expert_parallel_size
    if options.enable_iter_perf_stats:
        arguments["enable_iter_perf_stats"] = True
    return _merged(arguments, extra)


def grammar_kinds(extra: Mapping[str, object]) -> tuple[GrammarKind, ...]:
    """The grammars that an LLM of these arguments can follow: none, unless a backend is named."""
    return _GUIDED_KINDS.get(extra.get("guided_decoding_backend"), ())


def _merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Lay `over` on `base`, mappings within mappings key by key."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[name] = _merged(below, value) if both else value  # type: ignore[arg-type] # both are
    return merged


# --- sampling ---


class SamplingTranslator:
    """Makes the library's sampling parameters of ours, or says why it cannot."""

    def __init__(
        self,
        library: Library,
        *,
        arguments: Mapping[str, object],
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        """`arguments`: what the LLM was made with; `vocab_size`: the width of its logits."""
        self._library = library
        self._version = _version(library.version)
        # The old sampler heeds everything; it is chosen by name, before 1.2 by a flag.
        self._old_sampler = arguments.get("sampler_type") == "TRTLLMSampler" or bool(
            arguments.get("enable_trtllm_sampler")
        )
        self._grammar_kinds = grammar_kinds(arguments)
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size

    def translate(self, params: SamplingParams, *, max_tokens: int) -> object:
        """Return a SamplingParams of the library. Raises InvalidRequest for what it cannot do."""
        optional = _optional(params)
        for name in optional:
            self._check(name)
        if params.logit_bias:
            optional["embedding_bias"] = _bias(params.logit_bias, vocab_size=self._vocab_size)
            if "embedding_bias" not in self._library.sampling_fields:
                raise self._refusal("logit_bias")
        if params.grammar is not None:
            optional["guided_decoding"] = self._guided(params.grammar)
        # Without an end the library would ask its tokenizer for one. No token has the id -1.
        end_id = self._eos_token_ids[0] if self._eos_token_ids else -1
        try:
            return self._library.make_sampling_params(
                max_tokens=max_tokens,
                end_id=end_id,
                pad_id=max(end_id, 0),
                stop_token_ids=self._stop_token_ids(params) or None,
                # Else the id that ended the request would be cut off.
                include_stop_str_in_output=True,
                ignore_eos=params.ignore_eos,
                detokenize=False,
                **_randomness(params),
                **optional,
            )
        except (ValueError, TypeError) as error:
            raise InvalidRequest(
                f"TensorRT-LLM refuses the sampling parameters: {error}"
            ) from error

    def _guided(self, grammar: Grammar) -> object:
        make = self._library.make_guided
        known = "guided_decoding" in self._library.sampling_fields
        if make is None or not known or grammar.kind not in self._grammar_kinds:
            raise self._refusal(grammar.param)
        return make(**{_GUIDED_FIELDS[grammar.kind]: grammar.source})

    def _stop_token_ids(self, params: SamplingParams) -> list[int]:
        """The library has one end id; the model's others are stop ids like the request's."""
        others = () if params.ignore_eos else self._eos_token_ids[1:]
        return list(dict.fromkeys((*params.stop_token_ids, *others)))

    def _check(self, name: str) -> None:
        """Raise InvalidRequest if the library would not know `name`, or ignore it."""
        if name not in self._library.sampling_fields:
            raise self._refusal(name)
        since = _HEEDED_SINCE.get(name)
        if since is not None and self._version < since and not self._old_sampler:
            raise self._refusal(name)

    def _refusal(self, name: str) -> InvalidRequest:
        return InvalidRequest(
            f"{name} is not supported by TensorRT-LLM {self._library.version}", param=name
        )


def _optional(params: SamplingParams) -> dict[str, object]:
    """What is not at its default, by the library's names, which are ours."""
    wanted: dict[str, object] = {
        name: getattr(params, name)
        for name, off in (
            ("presence_penalty", 0.0),
            ("frequency_penalty", 0.0),
            ("repetition_penalty", 1.0),
            ("min_tokens", 0),
        )
        if getattr(params, name) != off
    }
    # They cannot change what the most likely token is.
    if params.temperature > 0:
        if params.min_p > 0:
            wanted["min_p"] = params.min_p
        if params.seed is not None:
            # C++ has it unsigned.
            wanted["seed"] = params.seed & _SEED_MASK
    if params.logprobs is not None:
        # Until 1.3 the library took 0 for none at all.
        wanted["logprobs"] = max(params.logprobs, 1)
    return wanted


def _randomness(params: SamplingParams) -> dict[str, object]:
    """How random. All of it unset would be greedy, so the temperature is always given."""
    if params.temperature <= 0:
        return {"temperature": 0.0, "top_k": 1}
    wanted: dict[str, object] = {"temperature": params.temperature}
    if params.top_p < 1:
        wanted["top_p"] = params.top_p
    if params.top_k > 0:
        wanted["top_k"] = params.top_k
    return wanted


def _bias(logit_bias: Mapping[int, float], *, vocab_size: int) -> object:
    """What to add to each token's logit: a float32 tensor of shape (vocab_size,)."""
    torch: Any = importlib.import_module("torch")
    bias = torch.zeros(vocab_size, dtype=torch.float32)
    for token_id, value in logit_bias.items():
        bias[token_id] = value
    return bias


def _version(version: str) -> tuple[int, int, int, int]:
    """Major, minor, patch and candidate, to be compared. Unreadable ones come before all others."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?", version)
    if match is None:
        return (0, 0, 0, 0)
    major, minor, patch, candidate = match.groups()
    return (int(major), int(minor), int(patch or 0), int(candidate or _RELEASED))
