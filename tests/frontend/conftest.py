"""The small model that the frontend's tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.frontend.stage import Stage, write_card

if TYPE_CHECKING:
    from fastserve.generation import ModelCard


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return write_card(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stage(card: ModelCard) -> Stage:
    return Stage(card)
