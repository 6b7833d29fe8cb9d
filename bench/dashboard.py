"""The Grafana dashboard of a server's metrics: what is on it, and the JSON that Grafana imports.

    python -m bench.dashboard > bench/grafana.json

A panel is a line of the table below, so that a reader sees what is shown, and a test that every
metric exists. Import the JSON into Grafana (10 or later) and choose a Prometheus data source.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_GRID_COLUMNS = 24
_PANEL_HEIGHT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart. `queries` are PromQL by their legends; `width` is in Grafana's 24 columns."""

    title: str
    help: str
    unit: str
    queries: dict[str, str]
    width: int = 8
    kind: str = "timeseries"


def _rate(counter: str, *, by: str = "", of: str = "") -> str:
    """How much a counter grows in a second, over all servers that are chosen."""
    chosen = ",".join(filter(None, ('instance=~"$instance"', of)))
    return f"sum{by and f' by ({by}) '}(rate(fastserve_{counter}{{{chosen}}}[$__rate_interval]))"


def _now(gauge: str, *, how: str = "sum", by: str = "") -> str:
    return f'{how}{by and f" by ({by}) "}(fastserve_{gauge}{{instance=~"$instance"}})'


def _quantiles(histogram: str) -> dict[str, str]:
    buckets = _rate(f"{histogram}_bucket", by="le")
    return {f"p{q:g}": f"histogram_quantile({q / 100:g}, {buckets})" for q in (50, 90, 99)}


def _mean(histogram: str) -> str:
    return f"{_rate(f'{histogram}_sum')} / {_rate(f'{histogram}_count')}"


# fmt: off
ROWS: dict[str, tuple[Panel, ...]] = {
    "What clients get": (
        Panel(title="Requests", help="HTTP requests by status.", unit="reqps",
              queries={"{{code}}": _rate("http_requests_total", by="code") + " > 0"}),
        Panel(title="Requests by endpoint", help="Probes and scrapes among them.", unit="reqps",
              queries={"{{endpoint}}": _rate("http_requests_total", by="endpoint") + " > 0"}),
        Panel(title="How answers end", help="Choices by finish reason.", unit="ops",
              queries={"{{finished_reason}}": _rate("request_success_total",
                                                    by="finished_reason")}),
        Panel(title="Time to first token", help="From the request's head.", unit="s",
              queries=_quantiles("time_to_first_token_seconds")),
        Panel(title="Between tokens", help="Between two deltas of a stream.", unit="s",
              queries=_quantiles("inter_token_latency_seconds")),
        Panel(title="Whole answers", help="From the request's head to the last byte.", unit="s",
              queries=_quantiles("e2e_request_latency_seconds")),
        Panel(title="Time per output token", help="A request's mean after its first.", unit="s",
              queries=_quantiles("request_time_per_output_token_seconds")),
        Panel(title="Refused for what else is going on", help="Load, or no engine.", unit="reqps",
              queries={"{{reason}}": _rate("admission_rejections_total", by="reason")}),
        Panel(title="Aborted", help="What the engine was told to forget, by reason.", unit="ops",
              queries={"{{reason}}": _rate("requests_aborted_total", by="reason")}),
    ),
    "Tokens": (
        Panel(title="Tokens", help="Of prompts, of answers, and of prompts known before.",
              unit="short",
              queries={"prompt": _rate("prompt_tokens_total"),
                       "generated": _rate("generation_tokens_total"),
                       "cached": _rate("prompt_tokens_cached_total")}),
        Panel(title="Sizes", help="The mean request.", unit="short",
              queries={"prompt": _mean("request_prompt_tokens"),
                       "answer": _mean("request_generation_tokens"),
                       "most asked for": _mean("request_params_max_tokens"),
                       "choices": _mean("request_params_n")}),
        Panel(title="Where a request's time goes", help="The mean of each phase.", unit="s",
              queries={"preprocessing": _mean("request_preprocessing_time_seconds"),
                       "queue": _mean("request_queue_time_seconds"),
                       "prefill": _mean("request_prefill_time_seconds"),
                       "decode": _mean("request_decode_time_seconds"),
                       "inference": _mean("request_inference_time_seconds")}),
    ),
    "The engine": (
        Panel(title="Requests in the engine", help="Running and waiting.", unit="short",
              queries={"running": _now("num_requests_running"),
                       "waiting": _now("num_requests_waiting")}),
        Panel(title="Queue time", help="Before a request's first step.", unit="s",
              queries=_quantiles("request_queue_time_seconds")),
        Panel(title="KV cache", help="The used share, and how much of prompts is found in it.",
              unit="percentunit",
              queries={"used": _now("kv_cache_usage_perc", how="max"),
                       "found": f"{_rate('prefix_cache_hits_total')} / "
                                f"{_rate('prefix_cache_queries_total')}"}),
        Panel(title="Step time", help="How long a step takes.", unit="s",
              queries=_quantiles("engine_step_time_seconds")
              | {"last": _now("engine_last_step_time_seconds", how="max")}),
        Panel(title="Batch size", help="Requests that a step gives a token.", unit="short",
              queries=_quantiles("engine_batch_size") | {"mean": _mean("engine_batch_size")}),
        Panel(title="Steps", help="Of the engine, each second.", unit="ops",
              queries={"steps": _rate("engine_steps_total")}),
        Panel(title="Alive", help="1 while there is an engine that has its model.", unit="short",
              queries={"{{instance}}": _now("engine_up", by="instance")}, width=12),
        Panel(title="Heartbeat", help="Since the engine was heard of.", unit="s",
              queries={"age": _now("engine_heartbeat_age_seconds", how="max")}, width=12),
    ),
    "Processes and lanes": (
        Panel(title="Connections", help="Of each acceptor.", unit="short",
              queries={"{{acceptor}}": _now("connections", by="acceptor")}),
        Panel(title="In flight", help="Requests that each acceptor answers.", unit="short",
              queries={"{{acceptor}}": _now("requests_in_flight", by="acceptor")}),
        Panel(title="Loop lag", help="How late an acceptor's event loop is.", unit="s",
              queries={"{{acceptor}}": _now("loop_lag_seconds", how="max", by="acceptor")}),
        Panel(title="Lanes: frames held", help="What acceptors do not take as it comes.",
              unit="short", queries={"{{lane}}": _now("lane_frames_held", by="lane")}),
        Panel(title="Lanes: dropped", help="What nobody waits for, or what we had not signed.",
              unit="ops",
              queries={"{{reason}}": _rate("lane_drops_total", by="reason"),
                       "bad, to {{end}}": _rate("lane_bad_frames_total", by="end")}),
        Panel(title="Started again", help="Processes, by why.", unit="short",
              queries={"{{process}} {{reason}}":
                       'sum by (process, reason) (increase(fastserve_process_respawns_total'
                       '{instance=~"$instance"}[$__rate_interval]))'}),
        Panel(title="Spans", help="Of the tracing, by what became of them.", unit="ops",
              queries={"{{outcome}}": _rate("trace_spans_total", by="outcome")}),
        Panel(title="Unknown fields", help="Of requests; they were ignored.", unit="ops",
              queries={"fields": _rate("request_unknown_fields_total")}),
        Panel(title="What runs", help="Version, model and settings.", unit="short", kind="table",
              queries={"build": _now("build_info", how="max", by="version, model, instance"),
                       "config": _now("config_info", how="max",
                                      by="engine, frontends, instance")}),
    ),
}
# fmt: on


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    panels: list[dict[str, Any]] = []
    ids = itertools.count(1)
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {"id": next(ids), "type": "row", "title": title, "collapsed": False, "panels": []}
            | _place(x=0, y=y, width=_GRID_COLUMNS, height=1)
        )
        y += 1
        x = 0
        for panel in row:
            if x + panel.width > _GRID_COLUMNS:
                x, y = 0, y + _PANEL_HEIGHT
            panels.append({"id": next(ids)} | _panel(panel, x=x, y=y))
            x += panel.width
        y += _PANEL_HEIGHT
    return {
        "uid": "fastserve",
        "title": "fastserve",
        "tags": ["llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _VARIABLES},
        "panels": panels,
    }


_VARIABLES = [
    {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    },
    {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": "label_values(fastserve_build_info, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
    },
]


def _panel(panel: Panel, *, x: int, y: int) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "expr": query,
            "legendFormat": legend,
        }
        | ({"instant": True, "format": "table"} if panel.kind == "table" else {})
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    } | _place(x=x, y=y, width=panel.width, height=_PANEL_HEIGHT)


def _place(*, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
