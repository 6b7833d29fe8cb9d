"""Finding and loading llama.cpp's library, and the layouts of what crosses into it by value.

The shared object comes out of an installed wheel, which promises nothing about it. So layouts are
keyed by the wheel's exact version, and checked against known defaults before first use: what does
not fit is a StartError that names the versions, never a crash. ctypes gives up the GIL around every
call. A failed assertion inside the library ends the process: nothing here can catch it.

Used by llama.py alone.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.errors import StartError
from fastserve.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

log = get_logger("engine")

pointer = ctypes.c_void_p
int32 = ctypes.c_int32
boolean = ctypes.c_bool


def _fields(ctype: type, names: str) -> list[tuple[str, type]]:
    return [(name, ctype) for name in names.split()]


class ModelParams(ctypes.Structure):
    """struct llama_model_params."""

    _fields_ = [
        *_fields(pointer, "devices tensor_buft_overrides"),
        *_fields(ctypes.c_int32, "n_gpu_layers split_mode load_mode lazy_mode main_gpu"),
        *_fields(pointer, "tensor_split progress_callback progress_callback_user_data"),
        *_fields(pointer, "kv_overrides"),
        *_fields(boolean, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"),
    ]


_CONTEXT_HEAD = [
    *_fields(ctypes.c_uint32, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq"),
    *_fields(ctypes.c_uint32, "n_outputs_max n_outputs_max_per_seq"),
    *_fields(ctypes.c_int32, "n_threads n_threads_batch ctx_type rope_scaling_type"),
    *_fields(ctypes.c_int32, "pooling_type attention_type flash_attn_type"),
    *_fields(ctypes.c_float, "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor"),
    *_fields(ctypes.c_float, "yarn_beta_fast yarn_beta_slow"),
    *_fields(ctypes.c_uint32, "yarn_orig_ctx"),
    *_fields(ctypes.c_float, "defrag_thold"),
    *_fields(pointer, "cb_eval cb_eval_user_data"),
    *_fields(ctypes.c_int32, "type_k type_v"),
]
_CONTEXT_TAIL = [
    *_fields(pointer, "abort_callback abort_callback_data"),
    *_fields(boolean, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"),
    *_fields(pointer, "samplers"),
    *_fields(ctypes.c_size_t, "n_samplers"),
    *_fields(pointer, "ctx_other"),
]


class ContextParams(ctypes.Structure):
    """struct llama_context_params."""

    _fields_ = [*_CONTEXT_HEAD, *_CONTEXT_TAIL]


class ContextParamsMoe(ctypes.Structure):
    """The same, where the release has a cache for the weights of experts."""

    _fields_ = [*_CONTEXT_HEAD, *_fields(ctypes.c_size_t, "moe_cache_size"), *_CONTEXT_TAIL]


class BatchStruct(ctypes.Structure):
    """struct llama_batch."""

    _fields_ = [
        *_fields(int32, "n_tokens"),
        *_fields(pointer, "token embd pos n_seq_id seq_id logits"),
    ]


class GgufInitParams(ctypes.Structure):
    """struct gguf_init_params."""

    _fields_ = [*_fields(boolean, "no_alloc"), *_fields(pointer, "ctx")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A distribution whose wheel holds the library: `llama` and `ggml` are patterns of its files.

    `layouts`: llama_context_params of each supported version. `extra_bufts`: whether weights may be
    repacked; not by a library built on the spot, where AMX kernels crash if the compiler is old.
    """

    distribution: str
    llama: str
    ggml: str
    layouts: Mapping[str, type[ctypes.Structure]]
    extra_bufts: bool


# In order of preference: the first is a wheel that runs anywhere, the second compiles for minutes.
PROVIDERS: tuple[Provider, ...] = (
    Provider(
        distribution="xllamacpp",
        llama="xllamacpp/xllamacpp*.so",
        ggml="xllamacpp/xllamacpp*.so",
        layouts={"2026.10.11549": ContextParamsMoe},
        extra_bufts=True,
    ),
    Provider(
        distribution="llama-cpp-python",
        llama="llama_cpp/lib/libllama.*",
        ggml="llama_cpp/lib/libggml-base.*",
        layouts={"0.3.36": ContextParams},
        extra_bufts=False,
    ),
)

# enum ggml_log_level.
_LOG_INFO, _LOG_WARN, _LOG_ERROR = 2, 3, 4

LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
PROGRESS_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)

# name: (result, arguments). Only what is used; a symbol that is missing is found at load.
LLAMA_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LOG_CALLBACK, pointer]),
    "llama_model_default_params": (ModelParams, []),
    "llama_model_load_from_file": (pointer, [ctypes.c_char_p, ModelParams]),
    "llama_model_free": (None, [pointer]),
    "llama_model_n_ctx_train": (int32, [pointer]),
    "llama_model_has_encoder": (boolean, [pointer]),
    "llama_model_has_decoder": (boolean, [pointer]),
    "llama_model_n_swa": (int32, [pointer]),
    "llama_model_is_recurrent": (boolean, [pointer]),
    "llama_model_is_hybrid": (boolean, [pointer]),
    "llama_model_n_layer": (int32, [pointer]),
    "llama_model_n_embd": (int32, [pointer]),
    "llama_model_n_embd_out": (int32, [pointer]),
    "llama_model_n_head": (int32, [pointer]),
    "llama_model_n_head_kv": (int32, [pointer]),
    "llama_model_get_vocab": (pointer, [pointer]),
    "llama_vocab_n_tokens": (int32, [pointer]),
    "llama_vocab_is_eog": (boolean, [pointer, int32]),
    "llama_tokenize": (
        int32,
        [pointer, ctypes.c_char_p, int32, pointer, int32, boolean, boolean],
    ),
    "llama_token_to_piece": (int32, [pointer, int32, pointer, int32, int32, boolean]),
    "llama_free": (None, [pointer]),
    "llama_n_ctx_seq": (ctypes.c_uint32, [pointer]),
    "llama_get_memory": (pointer, [pointer]),
    "llama_memory_seq_rm": (boolean, [pointer, int32, int32, int32]),
    "llama_state_seq_get_size": (ctypes.c_size_t, [pointer, int32]),
    "llama_state_seq_get_data": (ctypes.c_size_t, [pointer, pointer, ctypes.c_size_t, int32]),
    "llama_state_seq_set_data": (ctypes.c_size_t, [pointer, pointer, ctypes.c_size_t, int32]),
    "llama_decode": (int32, [pointer, BatchStruct]),
    "llama_get_logits": (pointer, [pointer]),
    "llama_get_embeddings_seq": (pointer, [pointer, int32]),
    "llama_set_abort_callback": (None, [pointer, pointer, pointer]),
}
GGML_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "ggml_log_set": (None, [LOG_CALLBACK, pointer]),
    "gguf_init_from_file": (pointer, [ctypes.c_char_p, GgufInitParams]),
    "gguf_free": (None, [pointer]),
    "gguf_get_n_kv": (ctypes.c_int64, [pointer]),
    "gguf_get_key": (ctypes.c_char_p, [pointer, ctypes.c_int64]),
    "gguf_get_kv_type": (ctypes.c_int, [pointer, ctypes.c_int64]),
    "gguf_get_arr_type": (ctypes.c_int, [pointer, ctypes.c_int64]),
    "gguf_get_arr_n": (ctypes.c_size_t, [pointer, ctypes.c_int64]),
    "gguf_get_arr_data": (pointer, [pointer, ctypes.c_int64]),
    "gguf_get_arr_str": (ctypes.c_char_p, [pointer, ctypes.c_int64, ctypes.c_size_t]),
    "gguf_get_val_str": (ctypes.c_char_p, [pointer, ctypes.c_int64]),
    "gguf_get_val_data": (pointer, [pointer, ctypes.c_int64]),
}


class LibraryLog:
    """What the library says, which is the only place where it tells why a call failed."""

    def __init__(self) -> None:
        self._errors: list[str] = []
        self.interrupted = False
        """Set while an interruption is under way, of which it complains as of an error."""
        # Held, because the library keeps a bare pointer to it.
        self.callback = LOG_CALLBACK(self._on_line)

    def clear(self) -> None:
        self._errors.clear()

    def reason(self) -> str:
        """The first complaint since `clear`: the later ones only pass it on."""
        return self._errors[0] if self._errors else "llama.cpp gives no reason"

    def _on_line(self, level: int, text: bytes | None, _: object) -> None:
        """Called by any thread of the library. What it calls information is detail to a server."""
        line = (text or b"").decode(errors="replace").strip()
        if level == _LOG_ERROR and not self.interrupted:
            self._errors = [*self._errors[:1], line]
            log.error("llama.cpp", text=line)
        elif level in {_LOG_INFO, _LOG_WARN, _LOG_ERROR}:
            log.debug("llama.cpp", text=line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The loaded shared objects, which may be one and the same, and what they say."""

    provider: Provider
    llama: ctypes.CDLL
    ggml: ctypes.CDLL
    log: LibraryLog


@functools.cache
def library() -> Library:
    """Load the first installed provider, once. Raises StartError: none, unsupported or broken."""
    provider, distribution = _installed()
    layout = _supported_layout(provider, installed=distribution.version)
    llama = _open(distribution, provider.llama)
    ggml = llama if provider.ggml == provider.llama else _open(distribution, provider.ggml)
    _declare(llama, LLAMA_FUNCTIONS, provider=provider)
    _declare(llama, {"llama_context_default_params": (layout, [])}, provider=provider)
    _declare(llama, {"llama_init_from_model": (pointer, [pointer, layout])}, provider=provider)
    _declare(ggml, GGML_FUNCTIONS, provider=provider)
    if not _has_known_defaults(llama):
        raise StartError(
            f"{provider.distribution} {distribution.version} does not lay out its parameters as "
            f"that version should; {_install_hint(provider)}"
        )
    library_log = LibraryLog()
    llama.llama_log_set(library_log.callback, None)
    ggml.ggml_log_set(library_log.callback, None)
    llama.llama_backend_init()
    return Library(provider=provider, llama=llama, ggml=ggml, log=library_log)


def _installed() -> tuple[Provider, importlib.metadata.Distribution]:
    for provider in PROVIDERS:
        try:
            return provider, importlib.metadata.distribution(provider.distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise StartError(
        "the llamacpp engine needs llama.cpp's library: run `pip install fastserve[cpu]`"
    )


def _supported_layout(provider: Provider, *, installed: str) -> type[ctypes.Structure]:
    if installed not in provider.layouts:
        supported = ", ".join(provider.layouts)
        raise StartError(
            f"{provider.distribution} {installed} is installed, supported is {supported}; "
            f"{_install_hint(provider)}"
        )
    return provider.layouts[installed]


def _install_hint(provider: Provider) -> str:
    version = list(provider.layouts)[-1]
    return f"run `pip install {provider.distribution}=={version}`"


def _open(distribution: importlib.metadata.Distribution, pattern: str) -> ctypes.CDLL:
    name = distribution.metadata["Name"]
    for file in distribution.files or ():
        if Path(file).match(pattern):
            try:
                return ctypes.CDLL(str(distribution.locate_file(file)))
            except OSError as error:
                # The loader names the missing library, most often libgomp.so.1, which slim
                # images lack.
                hint = ": install the system package libgomp1" if "libgomp" in str(error) else ""
                raise StartError(f"{name} does not load: {error}{hint}") from error
    raise StartError(
        f"{name} {distribution.version} has no file {pattern}; reinstall it with "
        f"`pip install --force-reinstall {name}=={distribution.version}`"
    )


def _declare(
    cdll: ctypes.CDLL,
    functions: Mapping[str, tuple[type | None, list[type]]],
    *,
    provider: Provider,
) -> None:
    for name, (restype, argtypes) in functions.items():
        try:
            function = getattr(cdll, name)
        except AttributeError:
            raise StartError(
                f"{provider.distribution} does not export {name}; {_install_hint(provider)}"
            ) from None
        function.restype = restype
        function.argtypes = argtypes


def _has_known_defaults(llama: ctypes.CDLL) -> bool:
    """Whether the default parameters read through our layouts are llama.cpp's documented ones.

    The fields checked are spread over the structs up to their ends: one that moved shows.
    """
    model = llama.llama_model_default_params()
    context = llama.llama_context_default_params()
    return (
        (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max) == (512, 2048, 512, 1)
        # Keys and values are GGML_TYPE_F16.
        and (context.type_k, context.type_v) == (1, 1)
        and (context.offload_kqv, context.no_perf, context.embeddings) == (True, True, False)
        and not (context.samplers or context.n_samplers or context.ctx_other)
        and (model.vocab_only, model.check_tensors) == (False, False)
        and model.use_extra_bufts is True
    )
