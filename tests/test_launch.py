"""What is refused before the first process."""

from __future__ import annotations

import importlib.util

import pytest

from fastserve.errors import ConfigError
from fastserve.launch import check_tracing

ENDPOINT = "http://127.0.0.1:4318/v1/traces"


@pytest.mark.parametrize("missing", [None, ModuleNotFoundError("opentelemetry")])
def test_spans_need_the_extra(
    monkeypatch: pytest.MonkeyPatch, missing: ModuleNotFoundError | None
) -> None:
    def find_spec(name: str) -> None:
        if missing is not None:
            raise missing  # as for a module whose package is not there

    check_tracing(ENDPOINT)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError, match="the extra otel"):
        check_tracing(ENDPOINT)
    check_tracing(None)
