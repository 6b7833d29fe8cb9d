"""A model in several files is the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf

from fastserve.engine.model_files import resolve_model
from tests.engine.driving import Driver

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PARTS = 3
PROMPT = "The capital of France is"


def split(source: Path, target: Path) -> None:
    """Write the model again as PARTS files, as llama.cpp's gguf-split does."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(
        target, "llama", split_max_tensors=-(-len(reader.tensors) // PARTS), use_temp_file=False
    )
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != gguf.Keys.General.ARCHITECTURE:
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_directory_or_any_part_of_a_sharded_model_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "sharded"
    directory.mkdir()
    split(resolve_model(None), directory / "model.gguf")
    files = sorted(directory.iterdir())
    assert [file.name for file in files] == [
        f"model-0000{part}-of-0000{PARTS}.gguf" for part in (1, 2, 3)
    ]
    whole = Driver(max_num_seqs=1)
    expected = whole.answer(PROMPT)
    whole.engine.close()
    for model in (directory, files[0], files[2]):
        driver = Driver(model=str(model), max_num_seqs=1)
        assert driver.engine.describe().name == "model"
        assert driver.answer(PROMPT) == expected
        driver.engine.close()
