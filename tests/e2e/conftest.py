"""Servers that a whole module of tests shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def embedded() -> Iterator[Server]:
    """The embedded model behind two acceptors, as the README starts it."""
    with Server("--frontends", "2") as server:
        yield server


@pytest.fixture(scope="module")
def sim() -> Iterator[Server]:
    """The simulated engine with fast steps, behind two acceptors."""
    with Server(
        "--frontends", "2", "--engine", "sim", "--sim-step-ms", "2",
        "--lane-heartbeat-interval-s", "0.05",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def embedder() -> Iterator[Server]:
    """The simulated engine as one that makes embeddings, of eight numbers."""
    with Server(
        "--frontends", "2", "--engine", "sim", "--sim-step-ms", "2", "--sim-embedding-size", "8",
        "--lane-heartbeat-interval-s", "0.05",
    ) as server:  # fmt: skip
        yield server
