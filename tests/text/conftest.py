"""llama.cpp's own tokenizer to compare with, and a corpus on which to compare."""

from __future__ import annotations

import ctypes
import random
import struct
import sysconfig
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fastserve.engine import libllama
from fastserve.engine.llama import read_gguf_metadata
from fastserve.engine.model_files import resolve_model
from fastserve.text.gguf_tokenizer import build_tokenizer_json
from fastserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The metadata of the default model lies in this much of it.
_METADATA_BYTES_MAX = 6 << 20

_LINES = """
Hello, world!  Two  spaces, three   and a trailing one
I'm you're we've they'll he'd it's; DON'T SHOUT, I'LL see: 'tis the '90s
3.14159 1,000,000 0x1F 1234567890 v2.0.1-rc3 10kg 2nd ½ Ⅷ ٣٤٥
def area(r):\n    return 3.14 * r**2  # square\n\n\n\tif r < 0:\n\t\traise ValueError\n
for (int i = 0; i < 10; ++i) { a[i] += b[i] << 2; }\r\n\r\n
{"a": [1, 2.5e-3, {"b": null}], "c": "\\u00e9\\n"}
<p class="x">&nbsp;caf\u00e9</p><!-- x --> https://example.com/?q=a%20b#c
Le cœur déçu mais l’âme plutôt naïve, Louÿs rêva — « ainsi »…
Falsches Üben von Xylophonmusik quält jeden größeren Zwerg ẞ
В чащах юга жил бы цитрус? Да, но фальшивый экземпляр!
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία
いろはにほへと ちりぬるを カタカナ 漢字。「引用」
天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。
키스의 고유조건은 입술끼리 만나야 하고
صِف خَلقَ خَودٍ كَمِثلِ الشَمسِ إِذ بَزَغَت
דג סקרן שט בים מאוכזב ולפתע מצא לו חברה
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า
\U0001f525\U0001f469\u200d\U0001f4bb\U0001f44d\U0001f3fd \U0001f1eb\U0001f1f7\U0001f1ef\U0001f1f5 ❤️
1️⃣ a\U0001f600b \x01\x04\x06\x1b[0m\x7f \u200b\u200d\ufeff\u00a0nbsp\u3000wide\u2028\u0085.
!!!??? ----- ===== ***__~~`` "'«»„“” (a)[b]{c}<d> @user #tag $5 €20 50%
camelCase PascalCase snake_case SCREAMING_CASE kebab-case ЖЁЛТЫЙдом éCOLEécole
\t\t\n \n  \n   x \r \r\n y
<|im_start|>user\nhi<|im_end|>\n <|endoftext|><repo_name>a<file_sep> <|im_start| <im_end>
"""


class LlamaVocabulary:
    """The vocabulary of a GGUF file, loaded without weights."""

    def __init__(self, path: Path) -> None:
        self._llama = libllama.library().llama
        params = self._llama.llama_model_default_params()
        params.vocab_only = True
        self._model = self._llama.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"llama.cpp does not load {path}"
        self._vocab = self._llama.llama_model_get_vocab(self._model)

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self._llama.llama_tokenize(
            self._vocab, data, len(data), ids, len(ids), False, parse_special
        )
        assert count >= 0
        return list(ids[:count])

    def piece(self, token_id: int) -> bytes:
        buffer = ctypes.create_string_buffer(1024)
        count = self._llama.llama_token_to_piece(
            self._vocab, token_id, buffer, len(buffer), 0, True
        )
        return buffer.raw[:count]

    def close(self) -> None:
        self._llama.llama_model_free(self._model)

    def is_end(self, token_id: int) -> bool:
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token_id))


@cache
def _metadata() -> dict[str, object]:
    return read_gguf_metadata(str(resolve_model(None)))


def _tokenizer(directory: Path, pre: str) -> Tokenizer:
    path = directory / f"{pre}.json"
    path.write_text(
        build_tokenizer_json(_metadata() | {"tokenizer.ggml.pre": pre}), encoding="utf-8"
    )
    return Tokenizer.from_file(str(path))


@pytest.fixture(scope="session")
def metadata() -> dict[str, object]:
    """The default model's."""
    return _metadata()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The default model's, built from its GGUF metadata."""
    return _tokenizer(tmp_path_factory.mktemp("tokenizer"), "smollm")


@pytest.fixture
def tokenizer_with(tmp_path: Path) -> Callable[[str], Tokenizer]:
    """The default model's vocabulary under another pre-tokenizer."""
    return lambda pre: _tokenizer(tmp_path, pre)


@pytest.fixture
def llama_vocabulary(tmp_path: Path) -> Iterator[Callable[[str], LlamaVocabulary]]:
    """llama.cpp's tokenizer of the default model's vocabulary, under any pre-tokenizer."""
    loaded: list[LlamaVocabulary] = []

    def load(pre: str) -> LlamaVocabulary:
        key = b"tokenizer.ggml.pre" + struct.pack("<I", 8)
        with resolve_model(None).open("rb") as file:
            head = file.read(_METADATA_BYTES_MAX)
        before, after = head.split(key + struct.pack("<Q", len("smollm")) + b"smollm")
        renamed = before + key + struct.pack("<Q", len(pre)) + pre.encode() + after
        # GGUF: magic, version, then the number of tensors: none, as a vocabulary has none.
        path = tmp_path / f"{pre}.gguf"
        path.write_bytes(renamed[:8] + struct.pack("<Q", 0) + renamed[16:])
        loaded.append(LlamaVocabulary(path))
        path.unlink()
        return loaded[-1]

    yield load
    for vocabulary in loaded:
        vocabulary.close()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Over a thousand: many scripts, code, controls, runs of spaces, and mixtures of all."""
    lines = _LINES.strip("\n").split("\n")
    mixer = random.Random(7)
    snippets = [line[i : i + 7] for line in lines for i in range(0, len(line), 3)]
    mixed = ["".join(mixer.choices(snippets, k=mixer.randint(2, 12))) for _ in range(500)]
    letters = "".join(lines)
    shuffled = ["".join(mixer.choices(letters, k=mixer.randint(1, 60))) for _ in range(300)]
    blanks = [
        "".join(mixer.choices(" \t\n\r\u00a0a1.", k=mixer.randint(1, 30))) for _ in range(200)
    ]
    code = [
        path.read_text(encoding="utf-8", errors="ignore")[:2000]
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))[:30]
    ]
    return ["", *lines, "x" * 500, " " * 300, "\n" * 50, *mixed, *shuffled, *blanks, *code]


@pytest.fixture
def chat_template(metadata: dict[str, object]) -> Any:
    """The default model's."""
    return metadata["tokenizer.chat_template"]
