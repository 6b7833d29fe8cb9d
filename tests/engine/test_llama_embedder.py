"""The embedded engine with models that make embeddings: small ones, of random weights."""

from __future__ import annotations

import ctypes
import math
import os
import select
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastserve.engine import libllama, llama
from fastserve.engine.adapters.llamacpp import LlamaCppEngine
from fastserve.errors import ContextLengthExceeded, InvalidRequest, StartError
from fastserve.frontend.model import Model
from fastserve.generation import FinishReason, RequestId, SamplingParams, embedding_values
from fastserve.lane.messages import Submit
from tests.engine.embedding_models import (
    CLS,
    EMBEDDING_SIZE,
    LAST,
    MEAN,
    TRAINED_SEQ_LEN,
    write_decoder,
    write_encoder,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fastserve.generation import Finish

# Read by OpenMP when the library loads: its threads otherwise spin between decodes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

MODELS: dict[str, Callable[[Path], None]] = {
    "decoder, last token": lambda path: write_decoder(path, pooling=LAST),
    "decoder, mean": lambda path: write_decoder(path, pooling=MEAN, add_eos=True),
    "encoder, mean": lambda path: write_encoder(path, pooling=MEAN),
    "encoder, first token": lambda path: write_encoder(path, pooling=CLS),
}
TEXTS = [[5, 6, 7, 8], [100] * 50, [9], [1000, 1500, 1999], [8, 7, 6, 5], [5, 6, 7, 8]]


def wait(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
    """A pump that has nothing else to serve."""
    return bool(select.select([fd] if fd is not None else [], [], [], timeout_s)[0])


class Driver:
    """An engine, and how its requests ended, in the order in which they did."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.engine = LlamaCppEngine(model=str(path), threads=2, **settings)
        self.card = self.engine.describe()
        self.engine.load(lambda share: None)
        self.finishes: dict[RequestId, Finish] = {}
        self._number = 0

    def submit(self, ids: Sequence[int], *, embed: bool = True, **sampling: Any) -> RequestId:
        self._number += 1
        params = SamplingParams(**{"max_tokens": 0, **sampling})
        number = RequestId(self._number)
        self.engine.add(
            Submit(request_id=number, prompt_token_ids=ids, sampling=params, embed=embed)
        )
        return number

    def step(self, pump: Any = wait) -> list[RequestId]:
        outputs = self.engine.step(pump)
        assert outputs.token_ids == []
        numbers = [RequestId(number) for number in outputs.request_ids]
        for index, number in enumerate(numbers):
            assert number not in self.finishes, "nothing follows a finish"
            self.finishes[number] = outputs.finishes[index]
        return numbers

    def finish_all(self) -> None:
        while self.engine.has_work():
            self.step()

    def embeddings(self, *texts: Sequence[int]) -> list[NDArray[np.float64]]:
        numbers = [self.submit(text) for text in texts]
        self.finish_all()
        return [self.vector(number) for number in numbers]

    def vector(self, number: RequestId) -> NDArray[np.float64]:
        finish = self.finishes[number]
        assert finish.reason is FinishReason.STOP, finish.error
        assert finish.embedding is not None
        return np.array(embedding_values(finish.embedding))


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tokenizers, which describing a model makes, out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    MODELS[request.param](path)
    return path


@pytest.fixture(scope="module")
def any_model(path: Path) -> Iterator[Driver]:
    driver = Driver(path)
    yield driver
    driver.engine.close()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """One that embeds at most three texts at once, and as many tokens as the longest has."""
    write_decoder(tmp_path / "model.gguf", pooling=LAST)
    driver = Driver(tmp_path / "model.gguf", max_num_seqs=3, prefill_chunk_tokens=1)
    yield driver
    driver.engine.close()


def by_llama_cpp(path: Path, ids: Sequence[int]) -> NDArray[np.float64]:
    """What the library makes of one text by its own defaults, divided by its length."""
    lib = libllama.library().llama
    model = llama.Model(str(path))
    params = lib.llama_context_default_params()
    params.embeddings = True
    context = lib.llama_init_from_model(model._model, params)
    batch = llama.Batch(len(ids))
    batch.add(ids, position=0, sequence=0, logits=True)
    assert lib.llama_decode(context, batch.struct) == 0
    address = lib.llama_get_embeddings_seq(context, 0)
    vector = np.array((ctypes.c_float * EMBEDDING_SIZE).from_address(address), np.float64)
    lib.llama_free(context)
    model.close()
    return vector / np.linalg.norm(vector)


def test_embeddings_are_those_of_llama_cpp(path: Path, any_model: Driver) -> None:
    assert any_model.card.embedding_size == EMBEDDING_SIZE
    for ids, vector in zip(TEXTS, any_model.embeddings(*TEXTS), strict=True):
        assert math.isclose(np.linalg.norm(vector), 1, abs_tol=1e-6)
        assert vector @ by_llama_cpp(path, ids) > 1 - 1e-4


def test_a_text_becomes_the_same_alone_and_in_company(any_model: Driver) -> None:
    together = any_model.embeddings(*TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        [alone] = any_model.embeddings(text)
        assert np.abs(alone - vector).max() < 1e-3
    assert np.abs(together[0] - together[-1]).max() < 1e-3
    assert abs(together[0] @ together[1]) < 0.99, "different texts have different directions"


def test_a_text_becomes_the_tokens_that_llama_cpp_makes_of_it(any_model: Driver) -> None:
    text = "Hello wOrld  42"
    model, frontend = any_model.engine._model, Model(any_model.card, template_bytes_max=1)
    assert model is not None
    assert frontend.embedding_prompt(text) == model.tokenize(text, add_special=True)


def test_texts_that_fit_are_computed_at_once_and_nobody_overtakes(driver: Driver) -> None:
    short = [driver.submit([5] * 10) for _ in range(2)]
    long = driver.submit([5] * TRAINED_SEQ_LEN)
    late = [driver.submit([5] * 10) for _ in range(4)]
    urgent = driver.submit([5], priority=-1)
    assert driver.engine.queue().num_requests == 8 - 3
    assert driver.step() == [urgent, *short]
    assert driver.step() == [long]
    assert driver.step() == late[:3]
    assert driver.step() == late[3:]
    assert not driver.engine.has_work()
    waits = [driver.finishes[number].queue_time_s for number in (short[0], long, late[-1])]
    assert waits == sorted(waits)


def test_who_goes_while_it_is_computed_gets_nothing_and_the_others_do(driver: Driver) -> None:
    stays, goes, waits = (driver.submit([5] * length) for length in (20, 30, 40))
    never = driver.submit([5] * 50)

    def pump(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
        assert driver.engine.stats().num_running == 3
        driver.engine.abort([goes, never, RequestId(99)])
        return wait(fd=fd, timeout_s=timeout_s)

    assert driver.step(pump) == [stays, waits]
    assert not driver.engine.has_work()
    [alone] = driver.embeddings([5] * 20)
    assert np.abs(alone - driver.vector(stays)).max() < 1e-3


def test_what_nobody_waits_for_is_interrupted(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = driver.engine._embedder
    assert embedder is not None
    interruptions: list[int] = []
    interrupt = embedder._context.interrupt

    def interrupting() -> None:
        interruptions.append(1)
        interrupt()

    monkeypatch.setattr(embedder._context, "interrupt", interrupting)
    numbers = [driver.submit([5] * 40) for _ in range(2)]

    def pump(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
        driver.engine.abort(numbers)
        return wait(fd=fd, timeout_s=timeout_s)

    assert driver.step(pump) == []
    assert interruptions
    # And the next is not.
    [vector] = driver.embeddings([7, 8])
    assert math.isclose(np.linalg.norm(vector), 1, abs_tol=1e-6)


def test_the_longest_text_is_embedded_and_a_longer_one_refused(driver: Driver) -> None:
    driver.embeddings([5] * TRAINED_SEQ_LEN)
    with pytest.raises(ContextLengthExceeded):
        driver.submit([5] * (TRAINED_SEQ_LEN + 1))


@pytest.mark.parametrize(
    ("ids", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([10**6], {}, "prompt"),
        ([5], {"embed": False, "max_tokens": 4}, "model"),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    driver: Driver, ids: list[int], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        driver.submit(ids, **fields)
    assert refusal.value.param == param
    assert not driver.engine.has_work()


def test_numbers_without_a_direction_fail_their_text_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = driver.engine._embedder
    assert embedder is not None
    embedding = embedder._context.embedding
    monkeypatch.setattr(
        embedder._context,
        "embedding",
        lambda sequence: [math.nan, 1.0] if sequence == 0 else embedding(sequence),
    )
    bad, good = driver.submit([5]), driver.submit([6])
    driver.finish_all()
    assert driver.finishes[bad].reason is FinishReason.ERROR
    driver.vector(good)


def test_a_file_that_does_not_say_how_it_pools_generates(tmp_path: Path) -> None:
    write_decoder(tmp_path / "model.gguf", pooling=0)
    engine = LlamaCppEngine(model=str(tmp_path / "model.gguf"), max_num_seqs=1, threads=1)
    assert engine.describe().embedding_size == 0
    engine.load(lambda share: None)
    submit = Submit(
        request_id=RequestId(1),
        prompt_token_ids=[5],
        sampling=SamplingParams(max_tokens=0),
        embed=True,
    )
    with pytest.raises(InvalidRequest, match="makes no embeddings"):
        engine.add(submit)
    engine.close()


def test_a_file_that_is_wrong_about_its_size_does_not_start(tmp_path: Path) -> None:
    write_decoder(tmp_path / "model.gguf", pooling=LAST)
    engine = LlamaCppEngine(model=str(tmp_path / "model.gguf"))
    engine.describe()
    assert engine._card is not None
    object.__setattr__(engine._card, "embedding_size", 3)
    with pytest.raises(StartError, match="3 numbers"):
        engine.load(lambda share: None)
    engine.close()
