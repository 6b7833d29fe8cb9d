"""The C API of llama.cpp as a few typed classes, and a reader for the metadata of model files.

Thin: what the library calls a sequence is a slot of the KV cache here too, a batch is rows, and a
context decodes on whatever thread calls it. A decode that is told to stop returns within
milliseconds. Two files own the library: this one and libllama.py, which loads it.

Knows nothing of requests, sampling or scheduling: see adapters/llamacpp.py.
"""

from __future__ import annotations

import ctypes
import enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.engine import libllama
from fastserve.errors import EngineDead, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

# enum gguf_type, in its order. Strings and arrays are no numbers.
_GGUF_SCALARS: dict[int, type[ctypes._SimpleCData[Any]]] = {
    0: ctypes.c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: ctypes.c_uint32,
    5: ctypes.c_int32,
    6: ctypes.c_float,
    7: ctypes.c_bool,
    10: ctypes.c_uint64,
    11: ctypes.c_int64,
    12: ctypes.c_double,
}
_GGUF_STRING = 8
_GGUF_ARRAY = 9


def read_gguf_metadata(path: str) -> dict[str, object]:
    """The key-value pairs of a GGUF file: numbers, booleans, strings, and lists of those.

    Reads no weights (100,000 strings take about 0.1 s). Bytes that are no UTF-8 are replaced.
    Source: the GGUF specification in ggml's docs. Raises StartError for a file that is missing,
    cut short, or no GGUF.
    """
    # The library says only that it failed, so what the system can say is asked first.
    try:
        with Path(path).open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise StartError(f"{path}: {error.strerror or error}") from error
    if magic != b"GGUF":
        begins = f"it begins with {magic!r}" if magic else "it is empty"
        raise StartError(f"{path} is not a GGUF file: {begins}")
    lib = libllama.library()
    lib.log.clear()
    gguf = lib.ggml.gguf_init_from_file(str(path).encode(), libllama.GgufInitParams(True, None))
    if not gguf:
        raise StartError(f"{path} is cut short or damaged, fetch it anew: {lib.log.reason()}")
    try:
        return {
            lib.ggml.gguf_get_key(gguf, key).decode(errors="replace"): _gguf_value(
                lib.ggml, gguf, key
            )
            for key in range(lib.ggml.gguf_get_n_kv(gguf))
        }
    finally:
        lib.ggml.gguf_free(gguf)


def _gguf_value(ggml: ctypes.CDLL, gguf: int, key: int) -> object:
    kind = ggml.gguf_get_kv_type(gguf, key)
    if kind == _GGUF_STRING:
        return ggml.gguf_get_val_str(gguf, key).decode(errors="replace")
    if kind != _GGUF_ARRAY:
        return _GGUF_SCALARS[kind].from_address(ggml.gguf_get_val_data(gguf, key)).value
    kind = ggml.gguf_get_arr_type(gguf, key)
    count = ggml.gguf_get_arr_n(gguf, key)
    if kind == _GGUF_STRING:
        get = ggml.gguf_get_arr_str
        return [get(gguf, key, i).decode(errors="replace") for i in range(count)]
    if count == 0:
        return []
    return list((_GGUF_SCALARS[kind] * count).from_address(ggml.gguf_get_arr_data(gguf, key)))


class Model:
    """A loaded model and its vocabulary. Outlives every Context made of it; then `close` it."""

    def __init__(self, path: str, *, progress: Callable[[float], None] = lambda _: None) -> None:
        """Load the weights, telling `progress` the share done, 0 to 1. Raises StartError.

        What `progress` raises ends the load and is raised here.
        """
        lib = libllama.library()
        self._llama = lib.llama
        raised: list[BaseException] = []

        def on_progress(share: float, _: object) -> bool:
            try:
                progress(share)
            # An exception cannot cross the C frames of the loader: it is carried around them.
            except BaseException as error:
                raised.append(error)
            return not raised

        params = lib.llama.llama_model_default_params()
        # Named, so that it lives until the load has ended.
        callback = libllama.PROGRESS_CALLBACK(on_progress)
        params.progress_callback = ctypes.cast(callback, libllama.pointer)
        params.use_extra_bufts = lib.provider.extra_bufts
        lib.log.clear()
        self._model = lib.llama.llama_model_load_from_file(str(path).encode(), params)
        if raised:
            self.close()
            raise raised[0]
        if not self._model:
            raise StartError(f"{path} does not load: {lib.log.reason()}")
        if lib.llama.llama_model_has_encoder(self._model) or not lib.llama.llama_model_has_decoder(
            self._model
        ):
            self.close()
            raise StartError(f"{path} is not a model that generates text from a prompt alone")
        self._vocab = lib.llama.llama_model_get_vocab(self._model)
        self.vocab_size: int = lib.llama.llama_vocab_n_tokens(self._vocab)
        self.trained_seq_len: int = lib.llama.llama_model_n_ctx_train(self._model)
        self.embedding_size: int = lib.llama.llama_model_n_embd_out(self._model)

    @property
    def keeps_all_positions(self) -> bool:
        """Whether a sequence can go back to any earlier length: not in a window or a recurrence."""
        lib = self._llama
        return not (
            lib.llama_model_n_swa(self._model)
            or lib.llama_model_is_recurrent(self._model)
            or lib.llama_model_is_hybrid(self._model)
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """About what a token takes in the KV cache: a key and a value of 2 bytes a number.

        For the usual form of attention, in which a head is an even share of the embedding.
        """
        lib = self._llama
        head = lib.llama_model_n_embd(self._model) // max(lib.llama_model_n_head(self._model), 1)
        heads = lib.llama_model_n_head_kv(self._model) * lib.llama_model_n_layer(self._model)
        return max(1, 2 * 2 * int(head * heads))

    def is_eog(self, token_id: int) -> bool:
        """Whether the token ends a generation: of a turn, a message, or the text."""
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token_id))

    def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of `text`, in which special tokens may be spelled out."""
        raw = text.encode()
        # A token stands for one byte at least; the rest is what `add_special` may add.
        ids = (libllama.int32 * (len(raw) + 8))()
        count = self._llama.llama_tokenize(
            self._vocab, raw, len(raw), ids, len(ids), add_special, True
        )
        assert count >= 0, f"{len(ids)} ids do not hold {len(raw)} bytes"
        return ids[:count]

    def token_to_piece(self, token_id: int) -> bytes:
        """The bytes of one token, special ones spelled out; not always whole characters."""
        size = 64
        while True:
            piece = ctypes.create_string_buffer(size)
            count = self._llama.llama_token_to_piece(self._vocab, token_id, piece, size, 0, True)
            if count >= 0:
                return piece.raw[:count]
            size = -count

    def close(self) -> None:
        """Free the weights. No harm when done twice."""
        model, self._model = self._model, None
        if model:
            self._llama.llama_model_free(model)


class Batch:
    """The rows of one decode: tokens, each with its position in its sequence."""

    def __init__(self, rows_max: int) -> None:
        self._tokens = np.zeros(rows_max, np.int32)
        self._positions = np.zeros(rows_max, np.int32)
        self._sequences = np.zeros(rows_max, np.int32)
        self._sequence_counts = np.ones(rows_max, np.int32)
        self._wants_logits = np.zeros(rows_max, np.int8)
        # Each row points to its list of sequences, which is one entry of `_sequences`.
        pointers = self._sequences.ctypes.data + 4 * np.arange(rows_max, dtype=np.uint64)
        self._sequence_pointers = pointers.astype(np.uint64)
        self.struct = libllama.BatchStruct(
            0,
            self._tokens.ctypes.data,
            None,
            self._positions.ctypes.data,
            self._sequence_counts.ctypes.data,
            self._sequence_pointers.ctypes.data,
            self._wants_logits.ctypes.data,
        )

    def __len__(self) -> int:
        return int(self.struct.n_tokens)

    def clear(self) -> None:
        self.struct.n_tokens = 0

    def add(
        self,
        token_ids: Sequence[int],
        *,
        position: int,
        sequence: int,
        logits: bool,
        first_logits: int = 0,
    ) -> None:
        """Append consecutive tokens of one sequence.

        `logits`: the last one's are wanted; also those of the `first_logits` first.
        """
        start = len(self)
        end = start + len(token_ids)
        assert end <= len(self._tokens), f"{end} rows in a batch of {len(self._tokens)}"
        self._tokens[start:end] = token_ids
        self._positions[start:end] = np.arange(position, position + len(token_ids))
        self._sequences[start:end] = sequence
        self._wants_logits[start:end] = 0
        self._wants_logits[end - 1] = logits
        self._wants_logits[start : start + first_logits] = 1
        self.struct.n_tokens = end


class Decoded(enum.IntEnum):
    """What llama_decode returns when nothing is broken."""

    DONE = 0
    FULL = 1  # no room in the KV cache; nothing of the batch is in it
    INTERRUPTED = 2  # parts of the batch may be in the KV cache


# enum llama_flash_attn_type and enum ggml_type.
_FLASH_ATTN_ENABLED = 1
_TYPE_F16, _TYPE_BF16 = 1, 30


def _strlen_address() -> int | None:
    return ctypes.cast(ctypes.CDLL(None).strlen, libllama.pointer).value


class Context:
    """A KV cache of `num_sequences` sequences, and the decoding into it.

    One thread at a time, but for `interrupt`, which is for all others.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_sequences: int,
        sequence_tokens_max: int,
        batch_rows_max: int,
        logits_rows_max: int | None = None,
        threads: int,
        embeds: bool = False,
    ) -> None:
        """Reserve the whole KV cache. Raises StartError where memory does not suffice.

        A batch has room for a row of each sequence, and wants the logits of one each at most. With
        `embeds` its sequences are whole texts, which `embedding` tells of and the next one forgets.
        """
        # The library asserts as much, which would end the process.
        assert num_sequences <= batch_rows_max, f"{num_sequences} rows in {batch_rows_max}"
        lib = libllama.library()
        self._llama = lib.llama
        self._log = lib.log
        self._vocab_size = model.vocab_size
        self._embedding_size = model.embedding_size
        params = lib.llama.llama_context_default_params()
        params.n_ctx = num_sequences * sequence_tokens_max
        params.n_seq_max = num_sequences
        params.n_batch = params.n_ubatch = batch_rows_max
        params.n_outputs_max = logits_rows_max or num_sequences
        params.n_threads = params.n_threads_batch = threads
        # What a sequence answers must not depend on its company or on the pieces it came in. So no
        # cache that sequences share; and of the kernels for attention the one that goes row by row,
        # which flash attention takes where keys and values differ in type. Those it takes else
        # round differently for 64 rows and more, and for one row alone of 512 tokens and more.
        # Costs nothing in decode, and half as much again in the prefill of 1,500 tokens.
        params.kv_unified = False
        params.flash_attn_type = _FLASH_ATTN_ENABLED
        params.type_k, params.type_v = _TYPE_F16, _TYPE_BF16
        if embeds:
            # What a text becomes is pooled over the rows of one pass, through which the library
            # sends a batch only where its sequences share a cache: here, one of a batch's size.
            params.embeddings = params.kv_unified = True
            params.n_ctx = params.n_outputs_max = batch_rows_max
        params.no_perf = True
        lib.log.clear()
        self._context = lib.llama.llama_init_from_model(model._model, params)  # noqa: SLF001
        if not self._context:
            raise StartError(
                f"no context of {num_sequences} sequences of {sequence_tokens_max} tokens: "
                f"{lib.log.reason()}; fewer or shorter ones, --engine-max-num-seqs or "
                "--engine-max-seq-len, take less memory"
            )
        self._memory = lib.llama.llama_get_memory(self._context)
        # The callback is polled at every node of the graph, thousands of times in a decode, and
        # a Python function there would take the GIL each time. C's strlen does not: of the bytes
        # "\0\0" it returns 0 and of "\1\0" 1. It returns size_t where bool is expected, but on
        # x86-64 (System V ABI 3.2.3: a bool is the low byte of rax) and aarch64 (AAPCS64 6.9: of
        # w0) the caller looks at the low byte alone, and that is the byte we mean.
        self._flag = ctypes.create_string_buffer(2)
        lib.llama.llama_set_abort_callback(
            self._context, _strlen_address(), ctypes.addressof(self._flag)
        )

    def decode(self, batch: Batch) -> Decoded:
        """Compute the batch. Raises EngineDead if the library fails in a way that will not pass."""
        result = self._llama.llama_decode(self._context, batch.struct)
        if result < 0:
            raise EngineDead(
                f"llama_decode failed with {result}: {libllama.library().log.reason()}"
            )
        return Decoded(result)

    def interrupt(self) -> None:
        """Make a decode under way return within milliseconds, and every next, until `resume`."""
        self._log.interrupted = True
        self._flag[0] = b"\x01"

    def resume(self) -> None:
        """Let decodes run again."""
        self._log.interrupted = False
        self._flag[0] = b"\x00"

    def logits(self, rows: int) -> NDArray[np.float32]:
        """A view of (rows, vocab_size), one row per wanted row of the last batch, in its order.

        Valid until the next decode.
        """
        address = self._llama.llama_get_logits(self._context)
        flat = (ctypes.c_float * (rows * self._vocab_size)).from_address(address)
        return np.ctypeslib.as_array(flat).reshape(rows, self._vocab_size)

    def embedding(self, sequence: int) -> list[float]:
        """What the last batch's rows of a sequence became together, of whatever length."""
        address = self._llama.llama_get_embeddings_seq(self._context, sequence)
        assert address, f"sequence {sequence} was in the batch"
        return list((ctypes.c_float * self._embedding_size).from_address(address))

    def truncate(self, sequence: int, *, length: int = 0) -> bool:
        """Forget all but the first `length` tokens. False: this model can only forget them all."""
        return bool(self._llama.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def save(self, sequence: int) -> NDArray[np.uint8]:
        """A copy of all that the cache holds of a sequence, of no more than its length."""
        state = np.empty(self._llama.llama_state_seq_get_size(self._context, sequence), np.uint8)
        address, size = state.ctypes.data, state.nbytes
        copied = self._llama.llama_state_seq_get_data(self._context, address, size, sequence)
        assert copied == size, f"{copied} of {size} bytes of sequence {sequence}"
        return state

    def restore(self, sequence: int, state: NDArray[np.uint8]) -> bool:
        """Make a sequence what `save` found, also of another. False: it now holds nothing."""
        address, size = state.ctypes.data, state.nbytes
        # The library clears the sequence too, but not where there is nothing to put into it.
        self.truncate(sequence)
        return bool(
            self._llama.llama_state_seq_set_data(self._context, address, size, sequence) == size
        )

    def move(self, sequence: int, *, target: int) -> None:
        """Move all of a sequence to `target`, whatever that held.

        Not by the library's own copy: that comes with the next decode only, and reads then what is
        in the old place by that time.
        """
        moved = self.restore(target, self.save(sequence))
        assert moved, f"sequence {target} has no room for {sequence}"
        self.truncate(sequence)

    def close(self) -> None:
        """Free the KV cache. No harm when done twice."""
        context, self._context = self._context, None
        self._log.interrupted = False
        if context:
            self._llama.llama_free(context)
