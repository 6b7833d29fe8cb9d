"""The settings of what the server tells of itself: log lines, metrics, traces.

A part of config.py, which has the rest and puts all of it together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from fastserve.config_http import seconds
from fastserve.errors import ConfigError
from fastserve.settings import Section, did_you_mean, setting

# The names of metrics.names, which a configuration need not import.
METRICS_NAMES = ("fastserve", "vllm", "trtllm")

URL = re.compile(r"https?://[!-~]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(Section):
    """What is written to stderr: a line for each event."""

    section: ClassVar[str] = "log"

    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "The least severe events to write; info: one line for each request."
    )
    format: Literal["text", "json"] = setting(
        "text", "Lines of key=value for people, or of JSON for machines."
    )
    prompts: bool = setting(
        False, "Whether to write each prompt's text, too, cut where it is longer than a line."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig(Section):
    """What /metrics and /perf_metrics tell."""

    section: ClassVar[str] = "metrics"

    names: tuple[str, ...] = setting(
        ("fastserve",),
        "Under which names /metrics tells everything: fastserve, and those that dashboards of vllm "
        "or trtllm read.",
        placeholder="NAME",
    )
    perf_requests_max: int = setting(
        1000,
        "The last requests whose timings /perf_metrics tells; older ones are forgotten. 0: none. "
        "256 bytes each, for each acceptor.",
        unit="requests",
        at_least=0,
        at_most=100_000,
    )

    def check(self) -> None:
        if not self.names:
            raise ConfigError("metrics.names: must not be empty")
        for name in self.names:
            if name not in METRICS_NAMES:
                raise ConfigError(
                    f"metrics.names: {name!r} is not one of {', '.join(METRICS_NAMES)}"
                    f"{did_you_mean(name, METRICS_NAMES)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig(Section):
    """A span for each request, exported over OTLP; needs the extra otel."""

    section: ClassVar[str] = "tracing"

    otlp_endpoint: str | None = setting(
        None,
        "Where a collector takes spans over HTTP, such as http://127.0.0.1:4318/v1/traces; not "
        "set: no spans. OTEL_EXPORTER_OTLP_HEADERS may have its key.",
        placeholder="URL",
    )
    service_name: str = setting("fastserve", "The service that spans are of.", placeholder="NAME")
    sample_ratio: float = setting(
        1.0,
        "How many of the requests get a span that come without a traceparent; one that has it says "
        "so itself.",
        unit="share",
        at_least=0,
        at_most=1,
    )
    spans_waiting_max: int = setting(
        4096,
        "Spans that wait to be exported; beyond it they are dropped, and counted.",
        unit="spans",
        at_least=1,
        at_most=1_000_000,
    )
    export_interval_s: float = seconds(1.0, "How long spans are gathered.", at_most=60)
    export_timeout_s: float = seconds(
        5.0, "Spans that the collector has not taken by then are dropped, and counted.", at_most=60
    )

    def check(self) -> None:
        if self.otlp_endpoint is not None and not URL.fullmatch(self.otlp_endpoint):
            raise ConfigError(f"tracing.otlp_endpoint: {self.otlp_endpoint!r} is no http URL")
