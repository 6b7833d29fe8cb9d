"""The embedded engine: llama.cpp's library on the CPU, token ids in and token ids out.

What the model is, how it is loaded, and what of the machine it may use. What it does then is
llama_runner.py's, or llama_embedder.py's where it makes embeddings.

Knows nothing of lanes, HTTP or text.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fastserve.engine import guidance, llama
from fastserve.engine.cpus import available_cpus, available_memory_bytes
from fastserve.engine.interface import EngineStats, StepOutputs
from fastserve.engine.llama_embedder import LlamaEmbedder
from fastserve.engine.llama_runner import LlamaRunner
from fastserve.engine.model_files import describe_gguf, resolve_model
from fastserve.errors import ConfigError, StartError
from fastserve.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from fastserve.engine.admission import Queue
    from fastserve.engine.interface import Pump
    from fastserve.generation import ModelCard, RequestId
    from fastserve.lane.messages import Submit

log = get_logger("engine")

# LLAMA_MAX_SEQ in llama.cpp.
_NUM_SEQS_MAX = 256

# The defaults for a machine. More sequences than that gain a processor nothing and cost everybody
# patience; the rest of the memory is for weights, acceptors, and the neighbours.
_NUM_SEQS_PER_CPU = 16
_KV_CACHE_MEMORY_SHARE = 1 / 8

# The default where a model was trained for more: the KV cache is reserved for all of it.
_MAX_SEQ_LEN_DEFAULT = 2048


class LlamaCppEngine:
    """An Engine over one GGUF file."""

    def __init__(
        self,
        *,
        model: str | None = None,
        name: str | None = None,
        max_seq_len: int | None = None,
        max_num_seqs: int = 0,
        kv_cache_tokens: int = 0,
        prefill_chunk_tokens: int = 256,
        prefill_target_ms: float = 200.0,
        prefix_cache_bytes_max: int = 512 << 20,
        threads: int = 0,
        memory_shared_by: int = 1,
        fallback_directory: Path | None = None,
    ) -> None:
        """`model`: a GGUF file, or None for the one that ships; `name`: what it is served as.

        `max_seq_len`: prompt and answer in tokens (default: what the model was trained for, at most
        2048). `max_num_seqs`: requests that run at once, up to 256 (0: 16 for each processor);
        fewer where the KV cache, of `kv_cache_tokens`, does not hold as many of `max_seq_len`. It
        is reserved at once; 0: an eighth of the memory at most, parted between those who share it.
        `prefill_chunk_tokens`: prompt tokens in one step; fewer where they would hold up a step of
        decode by more than about `prefill_target_ms`. `prefix_cache_bytes_max`: what is kept for
        requests that begin alike; 0: nothing is reused. `threads` 0: the processors there are.
        `fallback_directory`: where a tokenizer built from the file may be kept. Raises ConfigError.
        """
        if not 0 <= max_num_seqs <= _NUM_SEQS_MAX:
            raise ConfigError(f"max_num_seqs: {max_num_seqs} is not within 0 to {_NUM_SEQS_MAX}")
        for key, value, least in (
            ("max_seq_len", max_seq_len, 2),
            ("kv_cache_tokens", kv_cache_tokens, 0),
            ("prefill_chunk_tokens", prefill_chunk_tokens, 1),
            ("prefill_target_ms", prefill_target_ms, 1),
            ("prefix_cache_bytes_max", prefix_cache_bytes_max, 0),
            ("threads", threads, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{key}: {value} is less than {least}")
        self._model_setting = model
        self._name = name
        self._max_seq_len = max_seq_len
        self._max_num_seqs = max_num_seqs or min(
            _NUM_SEQS_PER_CPU * available_cpus(), _NUM_SEQS_MAX
        )
        self._kv_cache_tokens = kv_cache_tokens
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._prefill_target_ms = prefill_target_ms
        self._prefix_cache_bytes_max = prefix_cache_bytes_max
        self._threads = threads or available_cpus()
        self._shared_by = memory_shared_by
        self._fallback_directory = fallback_directory
        self._path: Path | None = None
        self._card: ModelCard | None = None

        # What load() makes and close() frees.
        self._model: llama.Model | None = None
        self._runner: LlamaRunner | None = None
        self._embedder: LlamaEmbedder | None = None

    def describe(self) -> ModelCard:
        """See Engine. Reads the file's metadata and not its weights."""
        self._path = resolve_model(self._model_setting)
        if self._path.is_dir():
            raise StartError(f"{self._path} has no GGUF file, which the llamacpp engine needs")
        card = describe_gguf(
            self._path,
            name=self._name,
            max_seq_len=self._max_seq_len,
            read_metadata=llama.read_gguf_metadata,
            fallback_directory=self._fallback_directory,
        )
        if self._max_seq_len is None:
            max_seq_len = min(card.max_seq_len, _MAX_SEQ_LEN_DEFAULT)
            card = dataclasses.replace(card, max_seq_len=max_seq_len)
        # What has no end cannot say that it has matched.
        if card.eos_token_ids and not card.embedding_size:
            card = dataclasses.replace(card, grammar_kinds=guidance.KINDS)
        self._card = card
        return card

    def load(self, progress: Callable[[float], None]) -> None:
        """See Engine. Also runs the model once: weights come off the disk on first use."""
        assert self._card is not None, "described before it is loaded"
        self._model = llama.Model(str(self._path), progress=progress)
        if self._card.embedding_size:
            self._load_embedder(self._model, self._card, progress)
        else:
            self._load_runner(self._model, self._card, progress)

    def _load_embedder(
        self, model: llama.Model, card: ModelCard, progress: Callable[[float], None]
    ) -> None:
        if model.embedding_size != card.embedding_size:
            raise StartError(
                f"{self._path} says that its embeddings have {card.embedding_size} numbers, "
                f"and makes {model.embedding_size}"
            )
        self._embedder = LlamaEmbedder(
            model,
            card=card,
            num_seqs=self._max_num_seqs,
            batch_tokens=max(card.max_seq_len, self._prefill_chunk_tokens),
            threads=self._threads,
        )
        self._embedder.warm_up(lambda: progress(1.0))
        log.info(
            "embedding model loaded",
            model=card.name,
            max_seq_len=card.max_seq_len,
            embedding_size=card.embedding_size,
            threads=self._threads,
        )

    def _load_runner(
        self, model: llama.Model, card: ModelCard, progress: Callable[[float], None]
    ) -> None:
        num_seqs = self._parallel_sequences(model)
        self._runner = LlamaRunner(
            model,
            card=card,
            num_seqs=num_seqs,
            prefill_chunk_tokens=self._prefill_chunk_tokens,
            prefill_target_s=self._prefill_target_ms / 1000,
            prefix_bytes_max=self._prefix_cache_bytes_max,
            threads=self._threads,
        )
        self._runner.warm_up(lambda: progress(1.0))
        log.info(
            "model loaded",
            model=card.name,
            max_seq_len=card.max_seq_len,
            max_num_seqs=num_seqs,
            kv_cache_tokens=num_seqs * card.max_seq_len,
            prefix_cache_bytes_max=self._prefix_cache_bytes_max,
            threads=self._threads,
        )

    def _parallel_sequences(self, model: llama.Model) -> int:
        """As many as may run and the KV cache holds, and one in any case."""
        assert self._card is not None
        tokens = self._kv_cache_tokens
        if not tokens:
            memory_bytes = available_memory_bytes() * _KV_CACHE_MEMORY_SHARE / self._shared_by
            tokens = int(memory_bytes / model.kv_bytes_per_token)
        return max(1, min(tokens // self._card.max_seq_len, self._max_num_seqs))

    def add(self, request: Submit) -> None:
        """See Engine. Raises InvalidRequest for what llama.cpp would fail on."""
        self._loaded().add(request)

    def abort(self, request_ids: Collection[RequestId]) -> None:
        """See Engine. A decode under way that any of them is part of is interrupted."""
        self._loaded().abort(request_ids)

    def has_work(self) -> bool:
        """See Engine."""
        worker = self._worker
        return worker is not None and worker.has_work()

    def step(self, pump: Pump) -> StepOutputs:
        """See Engine. Raises EngineDead if the library breaks."""
        return self._loaded().step(pump)

    def stats(self) -> EngineStats:
        """See Engine."""
        worker = self._worker
        if worker is None:
            return EngineStats(num_running=0, num_waiting=0)
        return worker.stats()

    def queue(self) -> Queue:
        """See Engine."""
        return self._loaded().queue()

    def close(self) -> None:
        """See Engine. What a decode that does not end still uses is left to the process's end."""
        worker, self._runner, self._embedder = self._worker, None, None
        model, self._model = self._model, None
        if worker is not None and not worker.close():
            log.error("the decode under way does not end")
            return
        if model is not None:
            model.close()

    def _loaded(self) -> LlamaRunner | LlamaEmbedder:
        worker = self._worker
        assert worker is not None, "the model is not loaded"
        return worker

    @property
    def _worker(self) -> LlamaRunner | LlamaEmbedder | None:
        return self._runner or self._embedder
