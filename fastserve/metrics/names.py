"""Our numbers under the names that dashboards of vLLM and TensorRT-LLM read.

Names, labels and meanings are those of vLLM 0.11 to 0.20 (`vllm/v1/metrics/loggers.py`, and the
`http_requests_total` of the instrumentator that it uses) and of TensorRT-LLM 1.2
(`tensorrt_llm/metrics/collector.py`). What has no number here, such as preemptions or blocks, is
not made up. Buckets are ours: quantiles come out the same.

A colon in a name is Prometheus's sign for recording rules; vLLM's names have it all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastserve.metrics import catalog as c

FASTSERVE, VLLM, TRTLLM = "fastserve", "vllm", "trtllm"
NAMES = (FASTSERVE, VLLM, TRTLLM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """`metric` under another name, without the `_total` that every counter's name ends in."""

    name: str
    metric: c.Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Somebody's names. `labels` every series has: model_name, and a second one.

    `second` is that label, and whether its value is the engine's name or its index.
    """

    aliases: tuple[Alias, ...]
    second: tuple[str, bool]


def _aliases(prefix: str, names: dict[str, c.Metric]) -> tuple[Alias, ...]:
    return tuple(Alias(name=prefix + name, metric=metric) for name, metric in names.items())


_SAME: dict[str, c.Metric] = {
    "request_success": c.REQUEST_SUCCESS,
    "prompt_tokens": c.PROMPT_TOKENS,
    "generation_tokens": c.GENERATION_TOKENS,
    "time_to_first_token_seconds": c.TIME_TO_FIRST_TOKEN,
    "e2e_request_latency_seconds": c.E2E_REQUEST_LATENCY,
    "request_queue_time_seconds": c.QUEUE_TIME,
    "request_prefill_time_seconds": c.PREFILL_TIME,
    "request_decode_time_seconds": c.DECODE_TIME,
    "request_inference_time_seconds": c.INFERENCE_TIME,
    "num_requests_running": c.NUM_RUNNING,
    "num_requests_waiting": c.NUM_WAITING,
}

DIALECTS = {
    VLLM: Dialect(
        aliases=_aliases(
            "vllm:",
            _SAME
            | {
                "prompt_tokens_cached": c.CACHED_TOKENS,
                "prefix_cache_queries": c.PREFIX_CACHE_QUERIES,
                "prefix_cache_hits": c.PREFIX_CACHE_HITS,
                "kv_cache_usage_perc": c.KV_CACHE_USAGE,
                # Until 0.10, and dashboards have them still.
                "gpu_cache_usage_perc": c.KV_CACHE_USAGE,
                "time_per_output_token_seconds": c.INTER_TOKEN_LATENCY,
                "inter_token_latency_seconds": c.INTER_TOKEN_LATENCY,
                "request_time_per_output_token_seconds": c.TIME_PER_OUTPUT_TOKEN,
                "request_prompt_tokens": c.REQUEST_PROMPT_TOKENS,
                "request_generation_tokens": c.REQUEST_GENERATION_TOKENS,
                # The longest of a request's choices there, each choice here: the same for n = 1.
                "request_max_num_generation_tokens": c.REQUEST_GENERATION_TOKENS,
                "request_params_n": c.REQUEST_PARAMS_N,
                "request_params_max_tokens": c.REQUEST_PARAMS_MAX_TOKENS,
            },
        ),
        second=("engine", False),
    ),
    TRTLLM: Dialect(
        aliases=_aliases(
            "trtllm_",
            _SAME
            | {
                "time_per_output_token_seconds": c.TIME_PER_OUTPUT_TOKEN,
                "prompt_cached_tokens": c.CACHED_TOKENS,
                "kv_cache_utilization": c.KV_CACHE_USAGE,
                "iteration_latency_seconds": c.LAST_STEP_TIME,
            },
        ),
        second=("engine_type", True),
    ),
}
