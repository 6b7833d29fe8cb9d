"""The engine's own figures on the board: steps, batches, lanes, and how busy it is.

Everything is written by the engine's one thread: a step costs about a microsecond here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastserve.log import get_logger
from fastserve.metrics.catalog import (
    ABORTS,
    ENGINE_BATCH_SIZE,
    ENGINE_STEP_TIME,
    ENGINE_STEPS,
    ENGINE_UP,
    HEARTBEAT_AGE,
    KV_CACHE_USAGE,
    LANE_BAD_FRAMES,
    LANE_DROPS,
    LANE_FRAMES_HELD,
    LANES_MAX,
    LAST_STEP_TIME,
    NUM_RUNNING,
    NUM_WAITING,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
)

if TYPE_CHECKING:
    from fastserve.lane.messages import Heartbeat
    from fastserve.lane.server import LaneServer
    from fastserve.metrics.meter import Meter

log = get_logger("engine")


class Figures:
    """Writes them to the row of `meter`."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._queries = self._hits = 0
        # Since the last heartbeat; how long the last one took.
        self._steps = 0
        self._last_step_s = 0.0
        self._observe_step = meter.timer(ENGINE_STEP_TIME)
        self._observe_batch = meter.timer(ENGINE_BATCH_SIZE)

    def step(self, took_s: float, *, batch_size: int) -> None:
        """A step has ended that gave `batch_size` requests a token."""
        self._steps += 1
        self._last_step_s = took_s
        self._observe_step(took_s)
        if batch_size:
            self._observe_batch(batch_size)

    def stale_submit(self) -> None:
        """A request came of an acceptor that is gone."""
        self._meter.count(LANE_DROPS, "stale_submit")

    def lane_closed(self, *, num_aborted: int) -> None:
        """A lane was closed with so many requests in flight."""
        self._meter.count(ABORTS, "lane_closed", by=num_aborted)

    def beat(self, heartbeat: Heartbeat, lanes: LaneServer) -> None:
        """Say how things are, with every heartbeat."""
        meter = self._meter
        meter.count(ENGINE_STEPS, by=self._steps)
        self._steps = 0
        meter.set(LAST_STEP_TIME, self._last_step_s)
        meter.set(ENGINE_UP, float(heartbeat.ready))
        meter.set(NUM_RUNNING, heartbeat.num_running)
        meter.set(NUM_WAITING, heartbeat.num_waiting)
        meter.set(KV_CACHE_USAGE, heartbeat.kv_cache_usage)
        meter.set(HEARTBEAT_AGE, time.monotonic())
        meter.count(PREFIX_CACHE_QUERIES, by=heartbeat.prefix_cache_queries - self._queries)
        meter.count(PREFIX_CACHE_HITS, by=heartbeat.prefix_cache_hits - self._hits)
        self._queries = heartbeat.prefix_cache_queries
        self._hits = heartbeat.prefix_cache_hits
        self._lanes(lanes)

    def _lanes(self, lanes: LaneServer) -> None:
        meter = self._meter
        held = lanes.held()
        for lane in range(LANES_MAX):
            meter.set(LANE_FRAMES_HELD, held.get(lane, 0), lane=lane)
        drops = lanes.take_drops()
        if bad_frames := drops.pop("bad"):
            log.warning_burst("frames on the ingress that we had not signed", frames=bad_frames)
            meter.count(LANE_BAD_FRAMES, "engine", by=bad_frames)
        for reason, number in drops.items():
            meter.count(LANE_DROPS, reason, by=number)
