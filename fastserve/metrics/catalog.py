"""Every metric: its name, what it counts, its labels and buckets. Declared here once.

A series is a place in an acceptor's row of numbers (board.py), so the values of a label are listed:
there are no others, and no client can make one up. Names are those of the field (STYLE: vLLM's,
under our prefix): a dashboard needs its prefix changed and nothing else.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

PREFIX = "fastserve_"

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/responses", "/v1/responses/{response}",
    "/tokenize", "/detokenize", "/v1/models", "/v1/models/{model}", "/health", "/ready",
    "/version", "/metrics", "/openapi.json", "/", "other",
)  # fmt: skip
CODES = (
    "200", "204", "400", "401", "404", "405", "408", "413", "414", "415", "417", "429", "431",
    "499", "500", "501", "503", "505", "other",
)  # fmt: skip
FINISH_REASONS = ("stop", "length", "abort", "error")

# Seconds. What people feel lies between 1 ms and a minute; the last are for prompts of books.
LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 600.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25,
    0.5, 1.0, 2.5, 10.0,
)  # fmt: skip


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
    """Durations in seconds. A row has a count for each bucket, one for beyond, and the sum."""

    name: str
    help: str
    buckets: tuple[float, ...]

    @property
    def words(self) -> int:
        return len(self.buckets) + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A number as it is now, one for each acceptor."""

    name: str
    help: str

    @property
    def words(self) -> int:
        return 1


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
PROMPT_TOKENS = Counter(name="prompt_tokens", help="Prompt tokens of submitted requests.")
GENERATION_TOKENS = Counter(name="generation_tokens", help="Tokens that came back.")
ABORTS = Counter(
    name="requests_aborted",
    help="Requests that the engine was told to forget, by reason.",
    labels=("reason",),
    values=(("client_gone", "stop_string", "failed"),),
)
ADMISSION_REJECTIONS = Counter(
    name="admission_rejections",
    help="Requests refused for what else is going on, by reason.",
    labels=("reason",),
    values=(("overloaded", "engine_starting", "engine_dead", "connections"),),
)
UNKNOWN_FIELDS = Counter(
    name="request_unknown_fields", help="Fields of requests that nobody knows, and were ignored."
)
LANE_BAD_FRAMES = Counter(
    name="lane_bad_frames", help="Frames on a lane that we had not signed, and dropped."
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
CONNECTIONS = Gauge(name="connections", help="Open connections.")
REQUESTS_IN_FLIGHT = Gauge(name="requests_in_flight", help="HTTP requests being answered.")
LOOP_LAG = Gauge(
    name="loop_lag_seconds", help="How late the event loop was at its last quarter of a second."
)

Metric = Counter | Histogram | Gauge

METRICS: tuple[Metric, ...] = (
    HTTP_REQUESTS,
    REQUEST_SUCCESS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    ABORTS,
    ADMISSION_REJECTIONS,
    UNKNOWN_FIELDS,
    LANE_BAD_FRAMES,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    TIME_PER_OUTPUT_TOKEN,
    E2E_REQUEST_LATENCY,
    PREPROCESSING_TIME,
    CONNECTIONS,
    REQUESTS_IN_FLIGHT,
    LOOP_LAG,
)

# Where each metric's words begin in a row.
OFFSETS: dict[str, int] = {}
ROW_WORDS = 0
for _metric in METRICS:
    OFFSETS[_metric.name] = ROW_WORDS
    ROW_WORDS += _metric.words
