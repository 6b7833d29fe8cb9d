"""Small models that make embeddings, written with random weights: for tests of several files."""

from __future__ import annotations

import string
from functools import cache
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from fastserve.engine.llama import read_gguf_metadata
from fastserve.engine.model_files import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EMBEDDING_SIZE = 64
TRAINED_SEQ_LEN = 128
VOCAB_SIZE = 2000
_HIDDEN, _HEADS, _LAYERS = 96, 4, 2
MEAN, CLS, LAST = 1, 2, 3


def write_decoder(
    path: Path,
    *,
    pooling: int | None,
    add_eos: bool = False,
    add_vocabulary: Callable[[Any], int] | None = None,
) -> None:
    """A causal model of the architecture `llama`, which embeds as the Qwen3 embedding models do.

    `pooling` None: it generates instead. `add_vocabulary` writes one, and tells its size.
    """
    writer, vocab_size = _begun(path, "llama", pooling=pooling)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(EMBEDDING_SIZE // _HEADS)
    writer.add_add_eos_token(add_eos)
    if add_vocabulary is None:
        _add_bpe(writer)
    else:
        vocab_size = add_vocabulary(writer)
    weights = _Weights(writer)
    weights.matrix("token_embd.weight", vocab_size, EMBEDDING_SIZE)
    weights.ones("output_norm.weight")
    for layer in range(_LAYERS):
        weights.ones(f"blk.{layer}.attn_norm.weight", f"blk.{layer}.ffn_norm.weight")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights.matrix(f"blk.{layer}.{name}.weight", EMBEDDING_SIZE, EMBEDDING_SIZE)
        weights.matrix(f"blk.{layer}.ffn_gate.weight", _HIDDEN, EMBEDDING_SIZE)
        weights.matrix(f"blk.{layer}.ffn_up.weight", _HIDDEN, EMBEDDING_SIZE)
        weights.matrix(f"blk.{layer}.ffn_down.weight", EMBEDDING_SIZE, _HIDDEN)
    _end(writer)


def write_encoder(path: Path, *, pooling: int) -> None:
    """A model of the architecture `bert`, in which every token sees every other, with WordPiece."""
    writer, vocab_size = _begun(path, "bert", pooling=pooling)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_token_type_count(2)
    _add_wordpiece(writer)
    weights = _Weights(writer)
    weights.matrix("token_embd.weight", vocab_size, EMBEDDING_SIZE)
    weights.matrix("position_embd.weight", TRAINED_SEQ_LEN, EMBEDDING_SIZE)
    weights.matrix("token_types.weight", 2, EMBEDDING_SIZE)
    weights.norm("token_embd_norm")
    for layer in range(_LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights.linear(f"blk.{layer}.{name}", EMBEDDING_SIZE, EMBEDDING_SIZE)
        weights.norm(f"blk.{layer}.attn_output_norm")
        weights.linear(f"blk.{layer}.ffn_up", _HIDDEN, EMBEDDING_SIZE)
        weights.linear(f"blk.{layer}.ffn_down", EMBEDDING_SIZE, _HIDDEN)
        weights.norm(f"blk.{layer}.layer_output_norm")
    _end(writer)


class _Weights:
    """Random, the same in each run; by the names that GGUF gives them."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._random = np.random.default_rng(1)

    def matrix(self, name: str, rows: int, columns: int) -> None:
        values = self._random.normal(0, 0.3, (rows, columns))
        # As they are in real files; a table of positions is added to, which takes whole floats.
        table = name.startswith(("position", "token_types"))
        self._writer.add_tensor(name, values.astype(np.float32 if table else np.float16))

    def linear(self, name: str, rows: int, columns: int) -> None:
        self.matrix(f"{name}.weight", rows, columns)
        self._writer.add_tensor(f"{name}.bias", self._random.normal(0, 0.1, rows).astype("f"))

    def ones(self, *names: str) -> None:
        for name in names:
            self._writer.add_tensor(name, np.ones(EMBEDDING_SIZE, np.float32))

    def norm(self, name: str) -> None:
        self.ones(f"{name}.weight")
        self._writer.add_tensor(f"{name}.bias", np.zeros(EMBEDDING_SIZE, np.float32))


def _begun(path: Path, architecture: str, *, pooling: int | None) -> tuple[Any, int]:
    """A writer with all that concerns no layer, and the size of the vocabulary."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(TRAINED_SEQ_LEN)
    writer.add_embedding_length(EMBEDDING_SIZE)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_HIDDEN)
    writer.add_head_count(_HEADS)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    return writer, VOCAB_SIZE


def _add_bpe(writer: Any) -> None:
    """The first tokens of the default model."""
    metadata = _metadata()
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    tokens = metadata["tokenizer.ggml.tokens"][:VOCAB_SIZE]
    known = set(tokens)
    writer.add_token_list(tokens)
    writer.add_token_types(metadata["tokenizer.ggml.token_type"][:VOCAB_SIZE])
    # A vocabulary is in the order of its merges, so the first tokens need no later one.
    merges = metadata["tokenizer.ggml.merges"]
    writer.add_token_merges([each for each in merges if each.replace(" ", "") in known])
    writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])


def _add_wordpiece(writer: Any) -> None:
    """BERT's control tokens where BERT has them, and every letter, at the beginning of a word and
    within one."""
    tokens = ["[PAD]", *(f"[unused{number}]" for number in range(99))]
    tokens += ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens += [f"▁{each}" for each in string.printable[:62]] + list(string.printable[:62])
    tokens += [f"[unused{number}]" for number in range(99, 99 + VOCAB_SIZE - len(tokens))]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    # As the first converters wrote them: every token is a normal one, and none has a role.
    writer.add_token_types([1] * VOCAB_SIZE)


@cache
def _metadata() -> Any:
    """The default model's."""
    return read_gguf_metadata(str(resolve_model(None)))


def _end(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
