"""The adapters under test, and the little that is different about driving each of them.

What a case needs and an adapter cannot be made to do is None here, and the case is skipped.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve.engine.adapters.llamacpp import LlamaCppEngine
from fastserve.engine.adapters.sim import SimEngine
from fastserve.engine.adapters.trtllm import TensorRTLLMEngine
from fastserve.engine.model_files import describe_hf, resolve_model
from fastserve.engine.trtllm_api import TrtLlmOptions
from fastserve.errors import EngineDead, GenerationFailed
from tests.frontend.stage import write_card

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from fastserve.engine.interface import Engine
    from fastserve.generation import ModelCard, RequestId

# Read by OpenMP when the library loads: its threads otherwise spin between decodes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

STANDINS = Path(__file__).parents[1] / "standins"
BATCH = 4
MAX_SEQ_LEN = 128
# A real library, on a real GPU: a Hugging Face directory.
GPU_MODEL = os.environ.get("FASTSERVE_GPU_MODEL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One adapter. `make`: one of BATCH requests at a time and MAX_SEQ_LEN, in a directory that
    may be written to; `make_broken`: one whose `load` raises StartError.

    `ending`: fields of a Submit whose EOS is its n-th token. `fail`: makes a request that runs fail
    by itself. `kill`: makes one of the next steps find the library dead, `death` is what it raises;
    where a script does either, `failing` and `killing` are fields of a Submit. `random`: whether
    tokens are drawn by their probability. `seeds`: whether draws can be repeated.
    `dies_idle`: whether it can be dead, and know of it, with nothing to do.
    """

    name: str
    make: Callable[[Path], Engine]
    make_broken: Callable[[Path], Engine]
    prepare: Callable[[pytest.MonkeyPatch], None] = lambda _: None
    ending: Callable[[ModelCard, int], dict[str, Any]]
    fail: Callable[[Engine, RequestId], None] | None = None
    failing: dict[str, Any] = field(default_factory=dict)
    kill: Callable[[Engine], None] | None = None
    killing: dict[str, Any] = field(default_factory=dict)
    death: type[Exception] = EngineDead
    random: bool = True
    seeds: bool = True
    dies_idle: bool = False


def by_bias(card: ModelCard, number: int) -> dict[str, Any]:
    return {"logit_bias": {card.eos_token_ids[0]: 100.0}, "min_tokens": number - 1}


# --- sim ---


def make_sim(directory: Path, *, card: Callable[[Path], ModelCard] = write_card) -> SimEngine:
    return SimEngine(
        describe=lambda: replace(card(directory), max_seq_len=MAX_SEQ_LEN),
        step_ms=1.0,
        prefill_tokens_per_s=0.0,
        max_batch_size=BATCH,
    )


def card_without_words(directory: Path) -> ModelCard:
    card = write_card(directory)
    path = Path(card.tokenizer_path)
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {text: n for text, n in vocabulary.items() if n < 256}
    path.write_text(json.dumps(tokenizer))
    return card


SIM = Subject(
    name="sim",
    make=make_sim,
    make_broken=partial(make_sim, card=card_without_words),
    # Its words never end a text: a script does.
    ending=lambda card, number: {
        "sim": {"token_ids": [300 % card.vocab_size] * (number - 1) + [card.eos_token_ids[0]] * 9}
    },
    failing={"sim": {"fail_at": 2}},
    killing={"sim": {"die_at": 2, "die_by": "exception"}},
    death=RuntimeError,
    random=False,
)


# --- llamacpp ---


def make_llamacpp(directory: Path, *, model: str | None = None) -> LlamaCppEngine:
    return LlamaCppEngine(model=model, max_seq_len=MAX_SEQ_LEN, max_num_seqs=BATCH, threads=1)


def make_cut_llamacpp(directory: Path) -> LlamaCppEngine:
    """A file that is whole as far as its metadata go, and no further."""
    whole = resolve_model(None).read_bytes()
    (directory / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    return make_llamacpp(directory, model=str(directory / "cut.gguf"))


def fail_llamacpp(engine: Engine, request_id: RequestId) -> None:
    assert isinstance(engine, LlamaCppEngine)
    assert engine._runner is not None

    def sample(*_: Any, **__: Any) -> int:
        raise GenerationFailed("the likeliest token has a logit of nan")

    engine._runner._schedule.running[request_id].sampler.sample = sample  # type: ignore[method-assign] # a bad row


def kill_llamacpp(engine: Engine) -> None:
    assert isinstance(engine, LlamaCppEngine)
    assert engine._runner is not None

    def decode(*_: Any) -> Any:
        raise EngineDead("llama_decode failed with -3")

    engine._runner._context.decode = decode  # type: ignore[method-assign,assignment] # as it would


LLAMACPP = Subject(
    name="llamacpp",
    make=make_llamacpp,
    make_broken=make_cut_llamacpp,
    ending=by_bias,
    fail=fail_llamacpp,
    kill=kill_llamacpp,
)


# --- trtllm ---


def write_model(directory: Path, *, max_seq_len: int = MAX_SEQ_LEN) -> Path:
    """A Hugging Face directory, as far as anybody but the library reads it."""
    card = write_card(directory)
    (directory / "config.json").write_text(
        json.dumps(
            {
                "vocab_size": card.vocab_size,
                "max_position_embeddings": max_seq_len,
                "eos_token_id": list(card.eos_token_ids),
            }
        )
    )
    settings = {"eos_token": card.eos_token, "chat_template": card.chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def make_trtllm(directory: Path, *, model: str | None = None, **options: Any) -> TensorRTLLMEngine:
    path = Path(model) if model is not None else write_model(directory)
    return TensorRTLLMEngine(
        describe=lambda: describe_hf(path, name=None, max_seq_len=MAX_SEQ_LEN),
        model=str(path),
        max_num_seqs=BATCH,
        options=TrtLlmOptions(enable_iter_perf_stats=True, **options),
    )


def make_refused_trtllm(directory: Path) -> TensorRTLLMEngine:
    extra = directory / "extra.yaml"
    extra.write_text("no_such_argument: 1\n")
    return make_trtllm(directory, extra_options_path=str(extra))


def standin(patch: pytest.MonkeyPatch, *, version: str) -> None:
    """Put the package that stands in where the library would be, and have it generate."""
    patch.setenv("TRTLLM_STANDIN", "generates")
    patch.syspath_prepend(str(STANDINS))
    for name in [one for one in sys.modules if one.partition(".")[0] in ("tensorrt_llm", "torch")]:
        patch.delitem(sys.modules, name)
    import tensorrt_llm.version

    patch.setattr(tensorrt_llm.version, "__version__", version)


def fail_standin(engine: Engine, request_id: RequestId) -> None:
    import tensorrt_llm
    from tensorrt_llm.executor.utils import RequestError

    request = tensorrt_llm.LLM.made.requests[-1]
    request.over = True
    request.fail(RequestError("out of blocks"))


def kill_standin(engine: Engine) -> None:
    import tensorrt_llm

    tensorrt_llm.LLM.made.generator.ranks[0].kill()


def trtllm(version: str) -> Subject:
    return Subject(
        name=f"trtllm {version}",
        make=make_trtllm,
        make_broken=make_refused_trtllm,
        prepare=partial(standin, version=version),
        ending=by_bias,
        seeds=version >= "1.4",
        dies_idle=True,
        fail=fail_standin,
        kill=kill_standin,
    )


REAL = Subject(
    name="trtllm, the library itself",
    make=partial(make_trtllm, model=GPU_MODEL),
    make_broken=make_refused_trtllm,
    ending=by_bias,
)

SUBJECTS = [SIM, LLAMACPP, trtllm("1.2.1"), trtllm("1.4.0")]
if GPU_MODEL:
    SUBJECTS.append(REAL)
