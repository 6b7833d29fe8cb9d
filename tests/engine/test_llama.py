"""The binding of llama.cpp: finding it, refusing what does not fit, metadata, decoding."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from fastserve.engine import libllama, llama
from fastserve.engine.model_files import resolve_model
from fastserve.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Read by OpenMP when the library loads: its threads otherwise spin between decodes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

MODEL = str(resolve_model(None))
TEXT = "The capital of France is"
STORY = "Once upon a time, in a land far away, there was a king who had three daughters. "
THREADS = 2


@pytest.fixture(scope="module")
def model() -> Iterator[llama.Model]:
    loaded = llama.Model(MODEL)
    yield loaded
    loaded.close()


@pytest.fixture
def context(model: llama.Model) -> Iterator[llama.Context]:
    made = llama.Context(
        model, num_sequences=4, sequence_tokens_max=256, batch_rows_max=512, threads=THREADS
    )
    yield made
    made.close()


# --- finding and checking the library


def load_afresh() -> libllama.Library:
    return libllama.library.__wrapped__()


def only(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Leave one provider, the preferred, changed like this."""
    provider = dataclasses.replace(libllama.PROVIDERS[0], **changes)
    monkeypatch.setattr(libllama, "PROVIDERS", (provider,))


def test_nothing_installed_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, distribution="no-such-distribution")
    with pytest.raises(StartError, match=r"pip install fastserve\[cpu\]"):
        load_afresh()


def test_another_version_is_refused_with_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version("xllamacpp")
    only(monkeypatch, layouts={"1.2.3": libllama.ContextParams})
    with pytest.raises(
        StartError, match=rf"xllamacpp {installed} .*pip install xllamacpp==1\.2\.3"
    ):
        load_afresh()


def test_a_layout_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version("xllamacpp")
    only(monkeypatch, layouts={installed: libllama.ContextParams})
    with pytest.raises(StartError, match=r"does not lay out .*pip install xllamacpp=="):
        load_afresh()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("libgomp.so.1: cannot open shared object file", "install the system package libgomp1"),
        ("version `GLIBC_2.38' not found", "GLIBC_2.38"),
    ],
)
def test_a_library_that_does_not_load_says_what_is_missing(
    error: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> ctypes.CDLL:
        raise OSError(error)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    with pytest.raises(StartError, match=message):
        load_afresh()


def test_a_symbol_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {**libllama.LLAMA_FUNCTIONS, "llama_no_such_function": (None, [])}
    monkeypatch.setattr(libllama, "LLAMA_FUNCTIONS", functions)
    with pytest.raises(StartError, match="llama_no_such_function"):
        load_afresh()


def test_a_wheel_without_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, llama="xllamacpp/no_such*.so")
    with pytest.raises(StartError, match=r"no_such.*force-reinstall"):
        load_afresh()


SECOND_PROVIDER = """
import sys
from fastserve.engine import libllama, llama
libllama.PROVIDERS = libllama.PROVIDERS[1:]
assert "llama.context_length" in llama.read_gguf_metadata(sys.argv[1])
model = llama.Model(sys.argv[1])
context = llama.Context(
    model, num_sequences=1, sequence_tokens_max=256, batch_rows_max=64, threads=1
)
batch = llama.Batch(64)
ids = model.tokenize(sys.argv[2])
batch.add(ids, position=0, sequence=0, logits=True)
assert context.decode(batch) is llama.Decoded.DONE
print(model.token_to_piece(int(context.logits(1)[0].argmax())).decode())
"""


def test_the_second_provider_answers_the_same() -> None:
    try:
        importlib.metadata.distribution(libllama.PROVIDERS[1].distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llama-cpp-python is not installed")
    # Two copies of the library in one process are asking for trouble.
    ran = run_alone(SECOND_PROVIDER, MODEL, TEXT)
    assert (ran.stdout, ran.returncode) == (" Paris\n", 0), ran.stderr[-2000:]


def run_alone(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- metadata


def write_gguf(path: Path) -> dict[str, object]:
    """A file with a value of every kind; returns what it should read as."""
    writer = gguf.GGUFWriter(path, "test")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "naïve 🙂")
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("flags", [True, False, True])
    writer.add_array("strings", ["a", "", "é"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {
        "general.architecture": "test",
        "u8": 200,
        "i8": -100,
        "u16": 60_000,
        "i16": -30_000,
        "u32": 4_000_000_000,
        "i32": -2_000_000_000,
        "u64": 2**63,
        "i64": -(2**62),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "no": False,
        "text": "naïve 🙂",
        "numbers": [1, -2, 3],
        "floats": [0.5, -1.5],
        "flags": [True, False, True],
        "strings": ["a", "", "é"],
    }


def test_metadata_of_every_kind_reads_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "every kind.gguf"
    expected = write_gguf(path)
    found = llama.read_gguf_metadata(str(path))
    assert found == expected
    assert {key: type(value) for key, value in found.items()} == {
        key: type(value) for key, value in expected.items()
    }


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        if length > len(whole) - gguf.GGUF_DEFAULT_ALIGNMENT:
            continue  # The end is padding, which nothing needs.
        with pytest.raises(StartError, match=r"whole\.gguf"):
            llama.read_gguf_metadata(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04 and so on", "is not a GGUF file"),
        (b"GGUF" + b"\xff" * 100, "cut short or damaged"),
        (b"GGUF\x03\x00\x00\x00" + b"\x00" * 8 + b"\xff" * 7 + b"\x7f", "cut short or damaged"),
    ],
    ids=["empty", "a zip", "an absurd version", "an absurd count"],
)
def test_a_file_that_is_no_gguf_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(StartError, match=message):
        llama.read_gguf_metadata(str(path))


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        llama.read_gguf_metadata(str(tmp_path / "none.gguf"))
    with pytest.raises(StartError, match="directory"):
        llama.read_gguf_metadata(str(tmp_path))


def test_a_vocabulary_is_read_whole() -> None:
    metadata = llama.read_gguf_metadata(MODEL)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert (len(tokens), tokens[2]) == (49_152, "<|im_end|>")
    assert metadata["llama.context_length"] == 8192


# --- the model


def test_text_becomes_tokens_and_their_pieces_are_the_text(model: llama.Model) -> None:
    text = "<|im_start|>user\nHéllo 🙂<|im_end|>"
    ids = model.tokenize(text)
    assert ids[0] == 1
    assert ids[-1] == 2
    assert b"".join(map(model.token_to_piece, ids)).decode() == text
    assert (model.is_eog(2), model.is_eog(ids[1])) == (True, False)
    assert (model.vocab_size, model.trained_seq_len) == (49_152, 8192)


def test_a_piece_longer_than_the_first_buffer_is_whole(model: llama.Model) -> None:
    pieces = [model.token_to_piece(token_id) for token_id in range(model.vocab_size)]
    assert max(map(len, pieces)) > 16
    assert all(pieces)


def test_loading_tells_its_progress() -> None:
    shares: list[float] = []
    llama.Model(MODEL, progress=shares.append).close()
    assert shares == sorted(shares)
    assert len(shares) > 1
    assert shares[-1] == 1.0


def test_what_progress_raises_ends_the_load() -> None:
    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llama.Model(MODEL, progress=stop)


def test_weights_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(Path(MODEL).read_bytes()[:4_000_000])
    assert llama.read_gguf_metadata(str(path))["general.architecture"] == "llama"
    with pytest.raises(StartError, match=r"cut\.gguf does not load: "):
        llama.Model(str(path))


def test_a_file_without_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "unknown.gguf"
    write_gguf(path)
    with pytest.raises(StartError, match=r"does not load: .*architecture"):
        llama.Model(str(path))


# --- decoding


def batch_of(*parts: tuple[list[int], int, int]) -> llama.Batch:
    """Parts are (tokens, position, sequence), of which each wants its last logits."""
    batch = llama.Batch(600)
    for ids, position, sequence in parts:
        batch.add(ids, position=position, sequence=sequence, logits=True)
    return batch


def next_logits(context: llama.Context, *parts: tuple[list[int], int, int]) -> Any:
    assert context.decode(batch_of(*parts)) is llama.Decoded.DONE
    return context.logits(len(parts)).copy()


@pytest.mark.parametrize("length", [15, 100, 520])
def test_a_sequence_is_computed_the_same_in_any_company_and_in_any_pieces(
    length: int, model: llama.Model
) -> None:
    context = llama.Context(
        model, num_sequences=4, sequence_tokens_max=600, batch_rows_max=600, threads=THREADS
    )
    ids = (model.tokenize(STORY) * 40)[:length]
    others = model.tokenize(TEXT)
    alone = next_logits(context, (ids, 0, 0))[0]
    next_logits(context, (ids[:5], 0, 1), (others[:2], 0, 2))
    next_logits(context, (ids[5:6], 5, 1), (others[2:], 2, 2))
    next_logits(context, (ids[6:-1], 6, 1))
    assert np.array_equal(next_logits(context, (ids[-1:], length - 1, 1))[0], alone)
    context.truncate(1, length=length - 1)
    in_company = next_logits(context, (others, 0, 3), (ids[-1:], length - 1, 1))[1]
    assert np.array_equal(in_company, alone)
    context.close()


def test_a_sequence_that_is_truncated_goes_on_from_there(
    model: llama.Model, context: llama.Context
) -> None:
    ids = model.tokenize(TEXT)
    first = next_logits(context, (ids, 0, 0))
    next_logits(context, (ids, len(ids), 0))
    assert context.truncate(0, length=len(ids) - 1)
    assert np.array_equal(next_logits(context, (ids[-1:], len(ids) - 1, 0)), first)


def test_a_sequence_that_is_moved_goes_on_there(model: llama.Model, context: llama.Context) -> None:
    ids = model.tokenize(TEXT)
    whole = next_logits(context, (ids, 0, 0))
    next_logits(context, (ids[:-1], 0, 3), (ids, 0, 1))
    context.move(3, target=1)
    # The place that it left is used at once.
    moved, other = next_logits(context, (ids[-1:], len(ids) - 1, 1), (ids[:-1], 0, 3))
    assert np.array_equal(moved, whole[0])
    assert not np.array_equal(other, moved)


def test_a_sequence_that_was_saved_goes_on_anywhere_and_from_any_length(
    model: llama.Model, context: llama.Context
) -> None:
    ids = model.tokenize(STORY)
    half = len(ids) // 2
    whole = next_logits(context, (ids, 0, 0))
    state = context.save(0)
    context.truncate(0)
    next_logits(context, (ids[half:], 0, 0), (ids, 0, 2))
    for sequence in (2, 3):
        assert context.restore(sequence, state)
        assert context.truncate(sequence, length=half)
        assert np.array_equal(next_logits(context, (ids[half:], half, sequence)), whole)


def test_a_saved_nothing_and_a_broken_state_leave_nothing(
    model: llama.Model, context: llama.Context
) -> None:
    ids = model.tokenize(TEXT)
    alone = next_logits(context, (ids, 0, 0))
    state, nothing = context.save(0), context.save(1)
    assert context.restore(0, nothing)
    assert np.array_equal(next_logits(context, (ids, 0, 0)), alone)
    assert not context.restore(0, state[: len(state) // 2].copy())
    context.truncate(0)
    assert np.array_equal(next_logits(context, (ids, 0, 0)), alone)


def test_a_batch_that_finds_no_room_leaves_what_was_there(
    model: llama.Model, context: llama.Context
) -> None:
    ids = model.tokenize(TEXT)
    next_logits(context, (ids, 0, 0))
    assert context.decode(batch_of(([5] * 300, len(ids), 0))) is llama.Decoded.FULL
    next_logits(context, ([5] * 200, len(ids), 0))


def test_the_likeliest_word_follows(model: llama.Model, context: llama.Context) -> None:
    logits = next_logits(context, (model.tokenize(TEXT), 0, 0))[0]
    assert model.token_to_piece(int(logits.argmax())) == b" Paris"


def test_an_interrupted_decode_returns_at_once_and_the_next_runs(
    model: llama.Model, context: llama.Context
) -> None:
    batch = batch_of(([5] * 250, 0, 0), ([6] * 250, 0, 1))
    ended_s: list[float] = []
    results: list[llama.Decoded] = []

    def decode() -> None:
        results.append(context.decode(batch))
        ended_s.append(time.monotonic())

    thread = threading.Thread(target=decode)
    thread.start()
    context.interrupt()
    interrupted_s = time.monotonic()
    thread.join(30)
    assert results == [llama.Decoded.INTERRUPTED]
    assert ended_s[0] - interrupted_s < 1.0
    context.resume()
    context.truncate(0)
    context.truncate(1)
    next_logits(context, (model.tokenize(TEXT), 0, 0))


LITTLE_MEMORY = """
import resource, sys
from fastserve.engine import llama
from fastserve.errors import StartError
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
model = llama.Model(sys.argv[1])
try:
    llama.Context(
        model, num_sequences=32, sequence_tokens_max=8192, batch_rows_max=32, threads=1
    )
except StartError as error:
    print(error)
"""


def test_a_context_that_memory_does_not_hold_is_refused() -> None:
    ran = run_alone(LITTLE_MEMORY, MODEL)
    assert ran.stdout.startswith("no context of 32 sequences of 8192 tokens: "), ran.stderr[-2000:]
    assert "memory" in ran.stdout


def test_closing_twice_does_no_harm() -> None:
    model = llama.Model(MODEL)
    context = llama.Context(
        model, num_sequences=1, sequence_tokens_max=256, batch_rows_max=64, threads=1
    )
    for _ in range(2):
        context.close()
        model.close()
