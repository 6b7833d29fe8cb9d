"""The settings of the engines that come along: what holds for any, the embedded and the simulated.

TensorRT-LLM's are in config_trtllm.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastserve.config_http import MIB, seconds
from fastserve.errors import ConfigError
from fastserve.settings import Section, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Section):
    """What holds for every engine."""

    section: ClassVar[str] = "engine"

    max_seq_len: int | None = setting(
        None,
        "The longest prompt and answer together; beyond it 400. Not set: what the model was "
        "trained for, and for llamacpp at most 2048.",
        unit="tokens",
        at_least=1,
        at_most=1 << 24,
        aliases=("max_seq_len",),
    )
    max_num_seqs: int = setting(
        0,
        "Requests in the running batch, the others wait; 0: chosen by the engine.",
        unit="requests",
        at_least=0,
        at_most=65_536,
        aliases=("max_batch_size",),
    )
    # All that waits is in memory: some 40 bytes for each token. Clients wait for minutes behind
    # thousands; a number that suits the model's pace is lower.
    max_queued_requests: int = setting(
        4096,
        "Requests of all acceptors together that may wait for a place in the running batch; one "
        "more is answered 429. 0: no limit.",
        unit="requests",
        at_least=0,
        at_most=1_000_000,
    )
    max_queued_tokens: int = setting(
        8 * MIB,
        "Prompt tokens of the requests that wait for a place, together; a request that would "
        "exceed it is answered 429. 0: no limit.",
        unit="tokens",
        at_least=0,
        at_most=1 << 40,
    )
    respawn: int = setting(
        0,
        "How often within respawn_window_s an engine that died is started again, while requests "
        "are answered 503; once more and the server exits with code 70.",
        unit="times",
        at_least=0,
        at_most=1000,
    )
    respawn_window_s: float = seconds(3600.0, "The window of respawn.", at_least=1)
    stall_unhealthy_s: float = seconds(
        30.0, "An engine that has work and finishes no step for this long makes /health answer 503."
    )
    stall_kill_s: float = seconds(
        120.0,
        "An engine that has work and finishes no step for this long is killed, and treated as "
        "dead.",
    )

    def check(self) -> None:
        if self.stall_kill_s < self.stall_unhealthy_s:
            raise ConfigError(
                f"engine.stall_kill_s: {self.stall_kill_s:g} is less than "
                f"engine.stall_unhealthy_s, which is {self.stall_unhealthy_s:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppConfig(Section):
    """The llamacpp engine."""

    section: ClassVar[str] = "llamacpp"

    threads: int = setting(
        0,
        "Threads that compute, of each rank; 0: as many as there are cores to use, shared out.",
        unit="threads",
        at_least=0,
        at_most=1024,
    )
    prefill_chunk_tokens: int = setting(
        256, "The longest piece of a prompt in one step.", unit="tokens", at_least=1, at_most=65_536
    )
    # Whoever decodes waits for the step that a piece of prompt is in, so that piece is cut shorter.
    prefill_target_ms: float = setting(
        200.0,
        "What prompts may add to a step in which others get tokens; 8 tokens go in any case.",
        unit="milliseconds",
        at_least=1.0,
        at_most=60_000.0,
    )
    kv_cache_tokens: int = setting(
        0,
        "The KV cache of each rank, reserved at the start: as many sequences of max_seq_len run at "
        "once as fit. 0: as many as may run by max_num_seqs, within an eighth of the memory there "
        "is, shared out.",
        unit="tokens",
        at_least=0,
        at_most=1 << 30,
    )
    prefix_cache_bytes_max: int = setting(
        512 << 20,
        "Copies of what ended requests computed, for later ones that begin alike. 0: no reuse.",
        unit="bytes",
        at_least=0,
        at_most=1 << 40,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig(Section):
    """The sim engine, which has the timing of an engine and no model."""

    section: ClassVar[str] = "sim"

    step_ms: float = setting(
        10.0,
        "How long a step takes, however large its batch.",
        unit="milliseconds",
        at_least=0,
        at_most=60_000,
    )
    prefill_tokens_per_s: float = setting(
        0.0,
        "How fast prompts are read; 0: in no time.",
        unit="tokens per second",
        at_least=0,
        at_most=1_000_000_000,
    )
    max_batch_size: int = setting(
        1024, "Requests in one step, the others wait.", unit="requests", at_least=1, at_most=65_536
    )
    embedding_size: int = setting(
        0,
        "How many numbers the embedding of a text has, of an engine that makes embeddings and "
        "generates nothing. 0: as the model's file says, which is nothing for most.",
        unit="numbers",
        at_least=0,
        at_most=65_536,
    )
