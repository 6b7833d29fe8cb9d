"""The long run is for those who ask for it: `pytest -m slow tests/chaos`."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)  # after pytest's own choice by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow, unless the command line speaks of it."""
    if "slow" in config.getoption("markexpr"):
        return
    slow = [
        item for item in items if item.get_closest_marker("slow") and "chaos" in item.path.parts
    ]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
