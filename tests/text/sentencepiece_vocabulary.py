"""A vocabulary as SentencePiece trains them, trained here: for tests of several files."""

from __future__ import annotations

import json
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.models import BPE
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.trainers import BpeTrainer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
UNK, BOS, EOS, INST, TOOL = range(5)
_NAMED = [
    ("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("[INST]", CONTROL),
    ("<tool>", USER_DEFINED), ("\n\n\n", USER_DEFINED),
]  # fmt: skip
_LEARNT_MAX = 2500


@cache
def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Texts, scores and types: named tokens, bytes, then pieces as they were learnt, characters
    last."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-c]*.py"))[:30]
    lines = [line for path in library for line in path.read_text("utf-8", "ignore").split("\n")]
    lines += ["naïve café déçu Über größeren 天地玄黃 いろは Привет мир — “so” 🔥"] * 20
    learner = tokenizers.Tokenizer(BPE())
    learner.normalizer = Replace("\t", " ")
    learner.pre_tokenizer = Metaspace(prepend_scheme="always")
    trainer = BpeTrainer(vocab_size=_LEARNT_MAX, show_progress=False)
    learner.train_from_iterator(lines, trainer)
    made: dict[str, None] = {}
    for left, right in _merges(learner):
        made.setdefault(left + right)
    characters = sorted({each for line in lines for each in line if each > " "} | {"▁"})
    tokens = [name for name, _ in _NAMED] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [kind for _, kind in _NAMED] + [BYTE] * 256
    pieces = [piece for piece in [*made, *characters] if piece not in tokens]
    scores = [0.0] * len(tokens) + [float(-rank) for rank in range(len(pieces))]
    return tokens + pieces, scores, types + [NORMAL] * len(pieces)


def _merges(learner: Any) -> list[list[str]]:
    merges: list[list[str]] = json.loads(learner.to_str())["model"]["merges"]
    return merges


def add_to(writer: Any) -> int:
    """Put it in a GGUF file; return its size."""
    tokens, scores, types = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNK)
    return len(tokens)


def metadata(**changes: object) -> dict[str, object]:
    """What a file says of it; `changes` are by names without their prefix, None to leave out."""
    tokens, scores, types = vocabulary()
    said: dict[str, object] = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": types,
        "bos_token_id": BOS, "eos_token_id": EOS, "unknown_token_id": UNK,
    } | changes  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in said.items() if value is not None}
