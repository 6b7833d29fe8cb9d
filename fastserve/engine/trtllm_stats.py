"""How full TensorRT-LLM's KV cache is, asked for now and then on a thread of its own.

The question can block for as long as its time-out, and an answer is given once only: so there is
one reader, and nobody waits for it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fastserve.log import get_logger

if TYPE_CHECKING:
    from fastserve.engine.trtllm_api import LLM

log = get_logger("engine")

# As often as heartbeats tell of it.
_INTERVAL_S = 1.0
# How long the library may wait for statistics of which there are none yet.
_TIMEOUT_S = 0.5


class StatsReader:
    """Keeps `kv_cache_usage`, a share from 0 to 1, up to date until `close`."""

    def __init__(self, llm: LLM, *, interval_s: float = _INTERVAL_S) -> None:
        self.kv_cache_usage = 0.0
        self._llm = llm
        self._interval_s = interval_s
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="trtllm-stats", daemon=True).start()

    def close(self) -> None:
        """End the thread, but do not wait for it: it may be waiting for the engine."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                iterations = self._llm.get_stats(timeout=_TIMEOUT_S)
                if iterations and not self._closed.is_set():
                    self.kv_cache_usage = _usage(iterations[-1])
            # Whatever it is, requests go on without it.
            except Exception as error:
                if not self._closed.is_set():
                    log.warning("no statistics from TensorRT-LLM", error=repr(error))
                return


def _usage(iteration: dict[str, object]) -> float:
    """The share of blocks in use, or 0 where this version does not tell."""
    match iteration:
        case {"kvCacheStats": {"usedNumBlocks": int(used), "maxNumBlocks": int(most)}} if most > 0:
            return used / most
    return 0.0
