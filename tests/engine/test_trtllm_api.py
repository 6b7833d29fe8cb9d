"""What TensorRT-LLM is asked for, and what is refused because it would not do it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fastserve.engine.trtllm_api import (
    SamplingTranslator,
    TrtLlmOptions,
    grammar_kinds,
    import_library,
    llm_arguments,
    read_extra_options,
)
from fastserve.errors import InvalidRequest, StartError
from fastserve.generation import Grammar, GrammarKind, ModelCard, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STANDINS = Path(__file__).parent / "standins"
EOS, VOCAB_SIZE = 2, 100


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package that stands in, imported afresh."""
    monkeypatch.syspath_prepend(str(STANDINS))
    import tensorrt_llm

    yield tensorrt_llm
    for name in [one for one in sys.modules if one.partition(".")[0] in ("tensorrt_llm", "torch")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"seed": 7}, "seed"),
    ],
)
def test_what_the_sampler_would_ignore_is_refused(
    library: Any, sampling: dict[str, Any], param: str
) -> None:
    params = SamplingParams(max_tokens=1, **sampling)

    for version in ("1.2.1", "1.3.0rc23", "nightly"):
        with pytest.raises(InvalidRequest, match=f"{param} is not supported") as refused:
            translate(params, version=version)
        assert refused.value.param == param
    for version, arguments in (
        ("1.4.0rc4", {}),
        ("1.2.1", {"sampler_type": "TRTLLMSampler"}),
        ("1.1.0", {"enable_trtllm_sampler": True}),
    ):
        wanted = translate(params, version=version, arguments=arguments)
        assert getattr(wanted, param) == sampling[param]


def test_a_release_comes_after_its_candidates(library: Any) -> None:
    params = SamplingParams(max_tokens=1, min_p=0.1)
    assert translate(params, version="1.3.0").min_p == 0.1
    assert translate(params, version="1.3.0rc24").min_p == 0.1


@pytest.mark.parametrize(
    ("sampling", "field", "param"),
    [
        ({"min_tokens": 2}, "min_tokens", "min_tokens"),
        ({"logprobs": 2}, "logprobs", "logprobs"),
        ({"logit_bias": {1: 1.0}}, "embedding_bias", "logit_bias"),
    ],
)
def test_what_a_version_does_not_know_is_refused_and_not_dropped(
    library: Any, sampling: dict[str, Any], field: str, param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        translate(SamplingParams(max_tokens=1, **sampling), without=field)
    assert refused.value.param == param
    assert translate(SamplingParams(max_tokens=1), without=field).max_tokens == 1


def test_a_negative_seed_is_made_unsigned(library: Any) -> None:
    wanted = translate(SamplingParams(max_tokens=1, seed=-1), version="1.4.0")
    assert wanted.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("kind", "field"), [("json_schema", "json"), ("regex", "regex"), ("ebnf", "grammar")]
)
def test_a_grammar_goes_where_the_library_has_it(library: Any, kind: str, field: str) -> None:
    grammar = Grammar(kind=GrammarKind(kind), source="source")
    params = SamplingParams(max_tokens=1, grammar=grammar)
    wanted = translate(params, arguments={"guided_decoding_backend": "xgrammar"})
    said = dataclasses.asdict(wanted.guided_decoding)
    assert {name for name, value in said.items() if value} == {field}
    assert said[field] == "source"


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        pytest.param({}, "", id="no backend"),
        pytest.param({"guided_decoding_backend": "llguidance"}, "", id="another language"),
        pytest.param({"guided_decoding_backend": "xgrammar"}, "guided_decoding", id="too old"),
    ],
)
def test_a_grammar_that_would_be_ignored_is_refused(
    library: Any, arguments: dict[str, object], without: str
) -> None:
    grammar = Grammar(kind=GrammarKind.EBNF, source="source", param="ebnf")
    with pytest.raises(InvalidRequest) as refused:
        translate(
            SamplingParams(max_tokens=1, grammar=grammar), arguments=arguments, without=without
        )
    assert refused.value.param == "ebnf"


def test_grammars_are_announced_where_a_backend_is_named() -> None:
    assert grammar_kinds({}) == ()
    assert grammar_kinds({"guided_decoding_backend": None}) == ()
    assert GrammarKind.EBNF in grammar_kinds({"guided_decoding_backend": "xgrammar"})
    assert GrammarKind.EBNF not in grammar_kinds({"guided_decoding_backend": "llguidance"})


def test_the_tokenizer_is_loaded_for_grammars_alone() -> None:
    def skips(extra: dict[str, object]) -> object:
        card = ModelCard(
            name="tiny", tokenizer_path="", chat_template=None, bos_token="", eos_token="",
            eos_token_ids=(), vocab_size=VOCAB_SIZE, max_seq_len=64,
        )  # fmt: skip
        options = TrtLlmOptions()
        return llm_arguments(model="m", card=card, options=options, max_num_seqs=1, extra=extra)[
            "skip_tokenizer_init"
        ]

    assert skips({})
    assert not skips({"guided_decoding_backend": "xgrammar"})


def translate(
    params: SamplingParams,
    *,
    version: str = "1.2.1",
    without: str = "",
    arguments: Mapping[str, object] | None = None,
) -> Any:
    """What the library's SamplingParams are, if it is of that `version` and lacks a field."""
    found = import_library()
    found = dataclasses.replace(
        found, version=version, sampling_fields=found.sampling_fields - {without}
    )
    translator = SamplingTranslator(
        found, arguments=arguments or {}, eos_token_ids=(EOS,), vocab_size=VOCAB_SIZE
    )
    return translator.translate(params, max_tokens=params.max_tokens)


# --- the constructor's arguments ---


def test_options_at_their_defaults_are_left_to_the_library() -> None:
    card = ModelCard(
        name="tiny",
        tokenizer_path="tokenizer.json",
        chat_template=None,
        bos_token="",
        eos_token="",
        eos_token_ids=(),
        vocab_size=VOCAB_SIZE,
        max_seq_len=64,
    )
    options = TrtLlmOptions(
        kv_cache_dtype="fp8", moe_expert_parallel_size=4, enable_iter_perf_stats=True
    )
    arguments = llm_arguments(model="m", card=card, options=options, max_num_seqs=16, extra={})
    assert arguments["kv_cache_config"] == {"free_gpu_memory_fraction": 0.9, "dtype": "fp8"}
    assert arguments["moe_expert_parallel_size"] == 4
    assert arguments["enable_iter_perf_stats"] is True
    assert arguments["max_batch_size"] == 16


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("skip_tokenizer_init: false", "skip_tokenizer_init is fastserve's to set"),
        ("max_seq_len: 8", "max_seq_len is fastserve's to set"),
        ("- a list", "extra.yaml: Expected `object | null`, got `array`"),
        ("{", "extra.yaml: "),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "extra.yaml"
    file.write_text(text)
    with pytest.raises(StartError) as refused:
        read_extra_options(file)
    assert complaint in refused.value.message


def test_a_file_that_is_empty_or_missing(tmp_path: Path) -> None:
    file = tmp_path / "extra.yaml"
    with pytest.raises(StartError, match="No such file"):
        read_extra_options(file)
    file.write_text("")
    assert read_extra_options(file) == {}


def test_a_version_whose_api_lacks_what_is_needed_is_refused(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "SamplingParams", lambda *, max_tokens: None)
    with pytest.raises(StartError, match=r"1\.2\.1 is not supported: .*end_id"):
        import_library()
