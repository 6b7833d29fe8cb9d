"""The last requests of all acceptors (recent.py), as /perf_metrics tells them."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastserve.metrics.recent import RecentRequests, RequestRecord


def render(rings: Iterable[RecentRequests], *, records_max: int) -> bytes:
    """The last `records_max` of all rings as JSON, in the order in which they ended.

    The objects are those of TensorRT-LLM's /perf_metrics as far as it has a word, in Unix time
    (there the clock is one that nobody else has); a time is null if the request did not come to it.
    """
    by_lane = [zip(ring.newest(), itertools.repeat(lane)) for lane, ring in enumerate(rings)]
    # A ring is in order, so no more of each is read than is told.
    newest = heapq.merge(*by_lane, key=lambda each: each[0].at_unix_s, reverse=True)
    told = list(itertools.islice(newest, records_max))
    return orjson.dumps([_as_json(ended.record(), lane) for ended, lane in reversed(told)])


def _as_json(record: RequestRecord, lane: int) -> dict[str, object]:
    def at(after_s: float) -> float:
        return record.received_unix_s + after_s  # a NaN becomes null

    return {
        "request_id": record.request_id,
        "trace_id": record.trace_id or None,
        "acceptor": lane,
        "endpoint": record.endpoint,
        "stream": record.stream,
        "status": record.status,
        "finish_reason": record.finish_reason or None,
        "num_choices": record.num_choices,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.generation_tokens,
        "perf_metrics": {
            "timing_metrics": {
                "server_arrival_time": at(0.0),
                "prepared_time": at(record.prepared_s),
                "arrival_time": at(record.submitted_s),
                "first_scheduled_time": at(record.scheduled_s),
                "first_token_time": at(record.first_token_s),
                "server_first_token_time": at(record.first_token_s),
                "last_token_time": at(record.last_token_s),
                "finished_time": at(record.finished_s),
            }
        },
    }
