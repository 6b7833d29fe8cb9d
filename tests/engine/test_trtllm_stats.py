"""The KV cache's usage, from what TensorRT-LLM tells of its iterations."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fastserve.engine.trtllm_stats import StatsReader


@pytest.mark.parametrize(
    ("iteration", "usage"),
    [
        ({"kvCacheStats": {"usedNumBlocks": 30, "maxNumBlocks": 120}}, 0.25),
        ({"kvCacheStats": {"usedNumBlocks": 3, "maxNumBlocks": 0}}, 0.0),
        ({"iter": 1}, 0.0),
    ],
)
def test_the_kv_caches_usage_is_that_of_the_last_iteration(
    iteration: dict[str, object], usage: float
) -> None:
    asked = threading.Semaphore(0)

    class Source:
        def get_stats(self, timeout: float) -> list[dict[str, object]]:
            asked.release()
            return [{"kvCacheStats": {"usedNumBlocks": 1, "maxNumBlocks": 1}}, iteration]

    source: Any = Source()
    reader = StatsReader(source, interval_s=0.001)
    # The second question comes after the first answer was read.
    assert asked.acquire(timeout=10)
    assert asked.acquire(timeout=10)
    reader.close()
    assert reader.kv_cache_usage == usage
