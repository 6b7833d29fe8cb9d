"""Every metric: its name, what it counts, its labels and buckets. Declared here once.

A series is a place in a row of numbers (board.py), so the values of a label are listed: there are
no others, and no client can make one up. Every process has a row of the same length, and writes
what is its own to tell: `of` says whose a gauge is; a counter may be anybody's. Names are those of
the field (STYLE: vLLM's, under our prefix): names.py has the rest.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

PREFIX = "fastserve_"

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/responses", "/v1/responses/{response}", "/v1/responses/{response}/cancel",
    "/v1/responses/{response}/input_items", "/v1/responses/input_tokens",
    "/tokenize", "/detokenize", "/v1/models", "/v1/models/{model}", "/health", "/ready",
    "/version", "/metrics", "/perf_metrics", "/openapi.json", "/", "other",
)  # fmt: skip
CODES = (
    "200", "204", "400", "401", "403", "404", "405", "408", "413", "414", "415", "417", "429",
    "431", "499", "500", "501", "503", "504", "505", "other",
)  # fmt: skip
FINISH_REASONS = ("stop", "length", "abort", "error")

# The width of the lane in a request id (lane.ids), which this must not import.
LANES_MAX = 64

# Seconds. What people feel lies between 1 ms and a minute; the last are for prompts of books.
LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 600.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25,
    0.5, 1.0, 2.5, 10.0,
)  # fmt: skip


# Tokens of a prompt or an answer, and what a request may ask for.
TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
    200_000, 500_000, 1_000_000,
)  # fmt: skip
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """Only ever grows. `values` lists, for each label, what it may be."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()

    @property
    def series(self) -> list[tuple[str, ...]]:
        return list(itertools.product(*self.values))

    @property
    def words(self) -> int:
        return len(self.series)


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Durations in seconds, or numbers of something.

    A row has a count for each bucket, one for beyond, and the sum.
    """

    name: str
    help: str
    buckets: tuple[float, ...]

    @property
    def words(self) -> int:
        return len(self.buckets) + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A number as it is now: each acceptor's, the engine's, or what that says of each lane.

    `age`: what is written is a moment (monotonic), and what is shown is how long ago it was.
    """

    name: str
    help: str
    of: Literal["acceptor", "engine", "lane"] = "acceptor"
    age: bool = False

    @property
    def words(self) -> int:
        return LANES_MAX if self.of == "lane" else 1


HTTP_REQUESTS = Counter(
    name="http_requests",
    help="HTTP requests by endpoint and status code; 499: the client went away first.",
    labels=("endpoint", "code"),
    values=(ENDPOINTS, CODES),
)
REQUEST_SUCCESS = Counter(
    name="request_success",
    help="Choices that ended, by finish reason.",
    labels=("finished_reason",),
    values=(FINISH_REASONS,),
)
PROMPT_TOKENS = Counter(
    name="prompt_tokens", help="Prompt tokens of requests that the engine took."
)
GENERATION_TOKENS = Counter(
    name="generation_tokens", help="Tokens that came back for a request in flight."
)
CACHED_TOKENS = Counter(
    name="prompt_tokens_cached",
    help="Prompt tokens of answered requests that the engine had from earlier ones.",
)
ABORTS = Counter(
    name="requests_aborted",
    help="Requests that the engine was told to forget, by reason; lane_closed: their acceptor "
    "ended.",
    labels=("reason",),
    values=(("client_gone", "stop_string", "timeout", "failed", "lane_closed"),),
)
ADMISSION_REJECTIONS = Counter(
    name="admission_rejections",
    help="HTTP requests refused for what else is going on, by the limit reached or the state.",
    labels=("reason",),
    values=(
        (
            "queued_requests", "queued_tokens", "requests_in_flight", "lane_full", "large_requests",
            "connections", "engine_starting", "engine_dead", "shutting_down",
        ),
    ),
)  # fmt: skip
UNKNOWN_FIELDS = Counter(
    name="request_unknown_fields", help="Fields of requests that nobody knows, and were ignored."
)
LANE_BAD_FRAMES = Counter(
    name="lane_bad_frames",
    help="Frames that we had not signed, and dropped, by the end that they came to.",
    labels=("end",),
    values=(("acceptor", "engine"),),
)
LANE_DROPS = Counter(
    name="lane_drops",
    help="Messages that nobody waits for any more. late: a delta of a request that has ended; "
    "stale_submit: a request of an acceptor that is gone; not_attached, detached: frames to a lane "
    "that is not there, or that closed before it took them.",
    labels=("reason",),
    values=(("late", "stale_submit", "not_attached", "detached"),),
)
TIME_TO_FIRST_TOKEN = Histogram(
    name="time_to_first_token_seconds",
    help="From the request's head to the first token's text.",
    buckets=LATENCY_BUCKETS_S,
)
INTER_TOKEN_LATENCY = Histogram(
    name="inter_token_latency_seconds",
    help="Between two deltas of one request.",
    buckets=INTER_TOKEN_BUCKETS_S,
)
TIME_PER_OUTPUT_TOKEN = Histogram(
    name="request_time_per_output_token_seconds",
    help="A request's mean time per token after the first.",
    buckets=INTER_TOKEN_BUCKETS_S,
)
E2E_REQUEST_LATENCY = Histogram(
    name="e2e_request_latency_seconds",
    help="From the request's head to the last byte written.",
    buckets=LATENCY_BUCKETS_S,
)
PREPROCESSING_TIME = Histogram(
    name="request_preprocessing_time_seconds",
    help="From the request's body to its tokens submitted.",
    buckets=LATENCY_BUCKETS_S,
)
QUEUE_TIME = Histogram(
    name="request_queue_time_seconds",
    help="From the request's arrival in the engine to its first step, as the engine tells.",
    buckets=LATENCY_BUCKETS_S,
)
PREFILL_TIME = Histogram(
    name="request_prefill_time_seconds",
    help="From a stream's first step to its first token.",
    buckets=LATENCY_BUCKETS_S,
)
DECODE_TIME = Histogram(
    name="request_decode_time_seconds",
    help="From a stream's first token to its last.",
    buckets=LATENCY_BUCKETS_S,
)
INFERENCE_TIME = Histogram(
    name="request_inference_time_seconds",
    help="From a request's first step to its last token.",
    buckets=LATENCY_BUCKETS_S,
)
REQUEST_PROMPT_TOKENS = Histogram(
    name="request_prompt_tokens",
    help="Prompt tokens of each request that the engine took.",
    buckets=TOKEN_BUCKETS,
)
REQUEST_GENERATION_TOKENS = Histogram(
    name="request_generation_tokens", help="Tokens of each choice.", buckets=TOKEN_BUCKETS
)
REQUEST_PARAMS_N = Histogram(
    name="request_params_n", help="Choices asked for.", buckets=(1, 2, 5, 10, 20, 50, 128)
)
REQUEST_PARAMS_MAX_TOKENS = Histogram(
    name="request_params_max_tokens",
    help="The most tokens that a request asks for, or has room for.",
    buckets=TOKEN_BUCKETS,
)
TRACE_SPANS = Counter(
    name="trace_spans",
    help="Spans of requests. dropped: too many waited to be exported; failed: not taken.",
    labels=("outcome",),
    values=(("exported", "dropped", "failed"),),
)
CONNECTIONS = Gauge(name="connections", help="Open connections.")
REQUESTS_IN_FLIGHT = Gauge(name="requests_in_flight", help="HTTP requests being answered.")
LOOP_LAG = Gauge(
    name="loop_lag_seconds", help="How late the event loop was at its last quarter of a second."
)

# ---- the engine's

ENGINE_STEPS = Counter(name="engine_steps", help="Steps finished.")
ENGINE_STEP_TIME = Histogram(
    name="engine_step_time_seconds", help="How long a step took.", buckets=INTER_TOKEN_BUCKETS_S
)
ENGINE_BATCH_SIZE = Histogram(
    name="engine_batch_size", help="Requests that a step gave a token.", buckets=BATCH_BUCKETS
)
PREFIX_CACHE_QUERIES = Counter(
    name="prefix_cache_queries", help="Prompt tokens that were looked for in the prefix cache."
)
PREFIX_CACHE_HITS = Counter(
    name="prefix_cache_hits", help="Prompt tokens that were found in the prefix cache."
)
ENGINE_UP = Gauge(
    name="engine_up", help="1 while there is an engine that has its model.", of="engine"
)
NUM_RUNNING = Gauge(name="num_requests_running", help="Requests in the running batch.", of="engine")
NUM_WAITING = Gauge(
    name="num_requests_waiting", help="Requests that wait for a place in it.", of="engine"
)
KV_CACHE_USAGE = Gauge(
    name="kv_cache_usage_perc", help="The used share of the KV cache, 0 to 1.", of="engine"
)
LAST_STEP_TIME = Gauge(
    name="engine_last_step_time_seconds", help="How long the last step took.", of="engine"
)
HEARTBEAT_AGE = Gauge(
    name="engine_heartbeat_age_seconds", help="Since the last heartbeat.", of="engine", age=True
)
LANE_FRAMES_HELD = Gauge(
    name="lane_frames_held",
    help="Frames that wait in the engine since the lane's acceptor does not keep up.",
    of="lane",
)

# ---- the supervisor's

RESPAWNS = Counter(
    name="process_respawns",
    help="Processes started again. died: after it ended unasked; replaced: for SIGHUP.",
    labels=("process", "reason"),
    values=(("acceptor", "engine"), ("died", "replaced")),
)

Metric = Counter | Histogram | Gauge

METRICS: tuple[Metric, ...] = (
    HTTP_REQUESTS,
    REQUEST_SUCCESS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    CACHED_TOKENS,
    ABORTS,
    ADMISSION_REJECTIONS,
    UNKNOWN_FIELDS,
    LANE_BAD_FRAMES,
    LANE_DROPS,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    TIME_PER_OUTPUT_TOKEN,
    E2E_REQUEST_LATENCY,
    PREPROCESSING_TIME,
    QUEUE_TIME,
    PREFILL_TIME,
    DECODE_TIME,
    INFERENCE_TIME,
    REQUEST_PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PARAMS_N,
    REQUEST_PARAMS_MAX_TOKENS,
    TRACE_SPANS,
    CONNECTIONS,
    REQUESTS_IN_FLIGHT,
    LOOP_LAG,
    ENGINE_STEPS,
    ENGINE_STEP_TIME,
    ENGINE_BATCH_SIZE,
    PREFIX_CACHE_QUERIES,
    PREFIX_CACHE_HITS,
    ENGINE_UP,
    NUM_RUNNING,
    NUM_WAITING,
    KV_CACHE_USAGE,
    LAST_STEP_TIME,
    HEARTBEAT_AGE,
    LANE_FRAMES_HELD,
    RESPAWNS,
)

# Where each metric's words begin in a row, and where each series of a counter is.
OFFSETS: dict[str, int] = {}
SERIES_AT: dict[tuple[str, tuple[str, ...]], int] = {}
ROW_WORDS = 0
for _metric in METRICS:
    OFFSETS[_metric.name] = ROW_WORDS
    if isinstance(_metric, Counter):
        for _index, _values in enumerate(_metric.series):
            SERIES_AT[_metric.name, _values] = ROW_WORDS + _index
    ROW_WORDS += _metric.words
