"""Which adapter serves which `--engine`: the one file that names them, and imports them late."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from fastserve.engine.model_files import describe
from fastserve.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fastserve.engine.arguments import EngineSettings
    from fastserve.engine.interface import Engine
    from fastserve.generation import ModelCard


def make_engine(settings: EngineSettings, *, run_directory: Path) -> Engine:
    """Make the adapter that `server.engine` names. Raises StartError."""

    name = next(iter(settings.server.served_model_name), None)

    def describe_model() -> ModelCard:
        with _packages_of("cpu"):
            return describe(
                settings.server.model,
                name=name,
                max_seq_len=settings.engine.max_seq_len,
                fallback_directory=run_directory,
            )

    match settings.server.engine:
        case "llamacpp":
            with _packages_of("cpu"):
                from fastserve.engine.adapters.llamacpp import LlamaCppEngine  # noqa: PLC0415

            return LlamaCppEngine(
                model=settings.server.model,
                name=name,
                max_seq_len=settings.engine.max_seq_len,
                max_num_seqs=settings.engine.max_num_seqs,
                kv_cache_tokens=settings.llamacpp.kv_cache_tokens,
                prefill_chunk_tokens=settings.llamacpp.prefill_chunk_tokens,
                prefill_target_ms=settings.llamacpp.prefill_target_ms,
                prefix_cache_bytes_max=settings.llamacpp.prefix_cache_bytes_max,
                threads=settings.llamacpp.threads,
                memory_shared_by=settings.server.dp_size,
                fallback_directory=run_directory,
            )
        case "sim":
            from fastserve.engine.adapters.sim import SimEngine  # noqa: PLC0415

            return SimEngine(
                describe=describe_model,
                step_ms=settings.sim.step_ms,
                prefill_tokens_per_s=settings.sim.prefill_tokens_per_s,
                max_batch_size=settings.sim.max_batch_size,
                embedding_size=settings.sim.embedding_size,
            )
        case "trtllm":
            from fastserve.engine.adapters.trtllm import TensorRTLLMEngine  # noqa: PLC0415
            from fastserve.engine.trtllm_api import TrtLlmOptions  # noqa: PLC0415

            return TensorRTLLMEngine(
                describe=describe_model,
                model=settings.server.model,
                max_num_seqs=settings.engine.max_num_seqs,
                options=TrtLlmOptions(**dataclasses.asdict(settings.trtllm)),
                # The rest is for the process to end in.
                close_timeout_s=0.8 * settings.server.terminate_timeout_s,
            )
    raise StartError(f"server.engine: no adapter for {settings.server.engine!r}")


@contextlib.contextmanager
def _packages_of(extra: str) -> Iterator[None]:
    """Turn a package that is not installed into a StartError that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "fastserve":
            raise
        raise StartError(
            f"{error.name} is not installed: pip install 'fastserve[{extra}]'"
        ) from error
