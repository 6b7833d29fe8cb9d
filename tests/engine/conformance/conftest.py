"""One engine for all cases that leave it as it was, and a new one for each that ends it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.engine.conformance.driving import Driver
from tests.engine.conformance.subjects import SUBJECTS, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastserve.engine.interface import Engine


@pytest.fixture(scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tokenizer, which describing a model makes, out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=SUBJECTS, ids=lambda subject: subject.name)
def subject(request: pytest.FixtureRequest, _cache: None) -> Iterator[Subject]:
    found: Subject = request.param
    with pytest.MonkeyPatch.context() as patch:
        found.prepare(patch)
        yield found


@pytest.fixture
def make(
    subject: Subject, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Engine]]:
    """Engines that are yet to be described; whatever a case leaves of them is closed."""
    engines: list[Engine] = []

    def make() -> Engine:
        engines.append(subject.make(tmp_path_factory.mktemp("model")))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        _end_standin()


@pytest.fixture(scope="module")
def shared(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    engine = subject.make(tmp_path_factory.mktemp("model"))
    card = engine.describe()
    engine.load(lambda _: None)
    yield Driver(engine, card)
    engine.close()
    _end_standin()


@pytest.fixture
def driver(shared: Driver) -> Iterator[Driver]:
    yield shared
    shared.abort_all()


def _end_standin() -> None:
    """A dead library is not shut down; the thread that plays it is a thread of ours."""
    library = sys.modules.get("tensorrt_llm")
    made = getattr(getattr(library, "LLM", None), "made", None)
    if made is not None and getattr(made, "generator", None) is not None:
        made.generator.close()
