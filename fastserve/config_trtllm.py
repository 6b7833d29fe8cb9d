"""The settings of the trtllm engine, which keep their names in trtllm-serve as further flags.

Whoever comes from there changes the command's name and little else. What it has no setting for goes
into a YAML file, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastserve.settings import Section, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtLlmConfig(Section):
    """The trtllm engine; [engine] says what it batches and how long a sequence is."""

    section: ClassVar[str] = "trtllm"

    tensor_parallel_size: int = setting(
        1,
        "GPUs that share each layer.",
        unit="GPUs",
        at_least=1,
        at_most=1024,
        aliases=("tp_size", "tensor_parallel_size"),
    )
    pipeline_parallel_size: int = setting(
        1,
        "Groups of GPUs that share the layers.",
        unit="groups",
        at_least=1,
        at_most=1024,
        aliases=("pp_size", "pipeline_parallel_size"),
    )
    moe_expert_parallel_size: int | None = setting(
        None,
        "GPUs that share the experts of a mixture; not set: the library's choice.",
        unit="GPUs",
        at_least=1,
        at_most=1024,
        aliases=("ep_size", "moe_expert_parallel_size"),
    )
    max_num_tokens: int = setting(
        8192,
        "Tokens in one step, prompts included.",
        unit="tokens",
        at_least=1,
        at_most=1 << 24,
        aliases=("max_num_tokens",),
    )
    enable_chunked_prefill: bool = setting(
        False,
        "Whether a prompt longer than max_num_tokens is read in pieces, or refused.",
        aliases=("enable_chunked_prefill",),
    )
    kv_cache_free_gpu_memory_fraction: float = setting(
        0.9,
        "How much of the memory that the weights leave free the KV cache takes.",
        unit="share",
        at_least=0.01,
        at_most=1,
        aliases=("kv_cache_free_gpu_memory_fraction", "free_gpu_memory_fraction"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "The KV cache's type of number.",
        placeholder="TYPE",
        aliases=("kv_cache_dtype",),
    )
    dtype: str = setting("auto", "The weights' type of number.", placeholder="TYPE")
    trust_remote_code: bool = setting(
        False,
        "Whether code that comes with the model may run.",
        aliases=("trust_remote_code",),
    )
    enable_iter_perf_stats: bool = setting(
        False, "Whether the library counts KV cache usage, at some cost per step."
    )
    extra_options_path: str | None = setting(
        None,
        "A YAML file of further arguments for the library; it wins.",
        placeholder="PATH",
        aliases=("extra_llm_api_options", "config_yaml"),
    )
