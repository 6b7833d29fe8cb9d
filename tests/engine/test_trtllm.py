"""The TensorRT-LLM adapter, driven through a package that stands in for the library."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from fastserve.engine.adapters.trtllm import TensorRTLLMEngine
from fastserve.engine.admission import Queue
from fastserve.engine.trtllm_api import TrtLlmOptions
from fastserve.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    StartError,
)
from fastserve.generation import (
    Finish,
    FinishReason,
    GrammarKind,
    ModelCard,
    RequestId,
    SamplingParams,
    TokenLogprob,
)
from fastserve.lane.messages import Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STANDINS = Path(__file__).parent / "standins"
EOS, EOT, VOCAB_SIZE, MAX_SEQ_LEN = 2, 3, 100, 64
ONE, TWO = RequestId(1), RequestId(2)
STOP, LENGTH = Finish(reason=FinishReason.STOP), Finish(reason=FinishReason.LENGTH)

CARD = ModelCard(
    name="tiny",
    tokenizer_path="tokenizer.json",
    chat_template=None,
    bos_token="<s>",
    eos_token="</s>",
    eos_token_ids=(EOS, EOT),
    vocab_size=VOCAB_SIZE,
    max_seq_len=MAX_SEQ_LEN,
)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package that stands in, imported afresh."""
    monkeypatch.syspath_prepend(str(STANDINS))
    import tensorrt_llm

    yield tensorrt_llm
    for name in [one for one in sys.modules if one.partition(".")[0] in ("tensorrt_llm", "torch")]:
        del sys.modules[name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(f'{{"vocab_size": {VOCAB_SIZE}}}')
    return tmp_path


@contextmanager
def loaded(model: Path, **settings: Any) -> Iterator[tuple[TensorRTLLMEngine, Any]]:
    """An engine that is ready, and the LLM behind it."""
    engine = TensorRTLLMEngine(describe=lambda: CARD, model=str(model), **settings)
    engine.describe()
    try:
        engine.load(lambda _share: None)
        import tensorrt_llm

        yield engine, tensorrt_llm.LLM.made
    finally:
        engine.close()


def submit(request_id: RequestId = ONE, *, prompt: int = 3, **sampling: Any) -> Submit:
    params = SamplingParams(**{"max_tokens": 10, **sampling})
    return Submit(request_id=request_id, prompt_token_ids=[5] * prompt, sampling=params)


def request_of(engine: TensorRTLLMEngine, llm: Any, message: Submit) -> Any:
    """What the library made of `message`."""
    engine.add(message)
    assert llm.arrived.acquire(timeout=10)
    return llm.requests[-1]


def pump(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
    """A pump that has no lanes to serve; nothing here takes as long as a whole wait."""
    assert fd is not None
    return bool(select.select((fd,), (), (), timeout_s)[0])


def read_until_finish(engine: TensorRTLLMEngine) -> tuple[list[int], Finish]:
    """The tokens of the only request, and its end."""
    tokens: list[int] = []
    while True:
        step = engine.step(pump)
        tokens += step.token_ids
        if step.finishes:
            return tokens, next(iter(step.finishes.values()))


# --- what queues ---


def test_what_is_beyond_the_librarys_batch_queues_until_others_end(model: Path) -> None:
    with loaded(model, max_num_seqs=2) as (engine, llm):
        assert engine.queue() == Queue(num_places=2)
        first = request_of(engine, llm, submit(ONE, prompt=3))
        for number, prompt in enumerate((4, 5, 6), 1):
            request_of(engine, llm, submit(RequestId(ONE + number), prompt=prompt))
        assert engine.queue() == Queue(num_places=0, num_requests=2, num_tokens=11)
        first.emit(10)
        engine.step(pump)
        assert engine.queue() == Queue(num_places=0, num_requests=2, num_tokens=11)
        first.emit(11, finish="length")
        engine.step(pump)
        assert engine.queue() == Queue(num_places=0, num_requests=1, num_tokens=6)
        engine.abort([RequestId(ONE + 1), RequestId(ONE + 2)])
        assert engine.queue() == Queue(num_places=1)


# --- what a request is told ---


def test_tokens_come_as_they_are_made_and_each_only_once(model: Path) -> None:
    with loaded(model) as (engine, llm):
        request = request_of(engine, llm, submit())
        request.emit(10)
        assert engine.step(pump).token_ids == [10]
        request.emit(11, 12)
        step = engine.step(pump)
        assert (step.request_ids, step.token_ids, step.counts) == ([ONE], [11, 12], [2])
        request.emit(13, finish="length")
        step = engine.step(pump)
        assert (step.token_ids, step.finishes) == ([13], {0: LENGTH})
        assert not engine.has_work()


def test_a_prompt_goes_in_as_token_ids_and_nothing_needs_a_tokenizer(model: Path) -> None:
    with loaded(model) as (engine, llm):
        request = request_of(engine, llm, submit(prompt=4))
        assert request.prompt_token_ids == [5, 5, 5, 5]
        assert request.sampling_params.detokenize is False
        assert llm.arguments["skip_tokenizer_init"] is True


@pytest.mark.parametrize("takes", [True, False])
def test_a_trace_is_handed_on_where_the_library_takes_it(
    model: Path, library: Any, monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    given: list[Any] = []
    plain = library.LLM.generate_async

    def with_trace(
        self: Any, inputs: Any, sampling_params: Any, streaming: bool, trace_headers: Any = None
    ) -> Any:
        given.append(trace_headers)
        return plain(self, inputs, sampling_params, streaming=streaming)

    if takes:
        monkeypatch.setattr(library.LLM, "generate_async", with_trace)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with loaded(model) as (engine, llm):
        request_of(engine, llm, msgspec.structs.replace(submit(), trace_headers=headers))
        request_of(engine, llm, submit(TWO))
    assert given == ([headers, None] if takes else [])


def test_all_that_has_come_is_one_step(model: Path) -> None:
    with loaded(model) as (engine, llm):
        first = request_of(engine, llm, submit(ONE))
        second = request_of(engine, llm, submit(TWO))
        first.emit(10)
        second.emit(20)
        first.emit(11, finish="stop")
        wait_until(lambda: num_deltas(engine) == 3)
        step = engine.step(pump)
        assert sorted(zip(step.request_ids, step.token_ids, strict=True)) == [
            (ONE, 10),
            (ONE, 11),
            (TWO, 20),
        ]
        assert engine.has_work()


def test_what_the_library_dispatches_together_is_one_step(model: Path) -> None:
    with loaded(model) as (engine, llm):
        requests = [request_of(engine, llm, submit(RequestId(number))) for number in range(50)]
        assert engine._runner is not None
        fd = engine._runner._loop.fd
        told: list[bool] = []
        llm.emit_together(
            {request: [10] for request in requests},
            last=lambda: told.append(bool(select.select((fd,), (), (), 0)[0])),
        )
        assert len(engine.step(pump).request_ids) == 50
        assert told == [False], "the step was announced before it was complete"


@pytest.mark.parametrize(
    ("sampling", "finish_reason", "stop_reason", "finish"),
    [
        pytest.param({}, "stop", None, STOP, id="the end of the text"),
        pytest.param({}, "stop", EOT, STOP, id="another end of the text"),
        pytest.param(
            {"stop_token_ids": (7,)},
            "stop",
            7,
            Finish(reason=FinishReason.STOP, stop_token_id=7),
            id="a stop id of the request",
        ),
        pytest.param(
            {"stop_token_ids": (EOS,)}, "stop", EOS, STOP, id="a stop id that ends any text"
        ),
        pytest.param(
            {"stop_token_ids": (EOS,), "ignore_eos": True},
            "stop",
            EOS,
            Finish(reason=FinishReason.STOP, stop_token_id=EOS),
            id="the same where texts do not end",
        ),
        pytest.param({}, "length", None, LENGTH, id="enough tokens"),
        pytest.param(
            {}, "cancelled", None, Finish(reason=FinishReason.ABORT), id="cancelled by others"
        ),
        pytest.param(
            {},
            "timeout",
            None,
            Finish(
                reason=FinishReason.ERROR,
                error="the request ran into TensorRT-LLM's time limit",
            ),
            id="out of time",
        ),
        pytest.param(
            {},
            "not_finished",
            None,
            Finish(
                reason=FinishReason.ERROR,
                error="TensorRT-LLM ended the request as 'not_finished'",
            ),
            id="a word that means nothing here",
        ),
    ],
)
def test_the_end_is_told_in_our_words(
    model: Path, sampling: dict[str, Any], finish_reason: str, stop_reason: int, finish: Finish
) -> None:
    with loaded(model) as (engine, llm):
        request = request_of(engine, llm, submit(**sampling))
        request.emit(9, finish=finish_reason, stop_reason=stop_reason)
        assert read_until_finish(engine) == ([9], finish)


def test_a_result_that_just_ends_is_a_failure(model: Path) -> None:
    with loaded(model) as (engine, llm):
        request_of(engine, llm, submit()).end()
        _, finish = read_until_finish(engine)
        assert finish.reason is FinishReason.ERROR


def test_a_failed_request_is_alone_in_it(model: Path) -> None:
    from tensorrt_llm.executor.utils import RequestError

    with loaded(model) as (engine, llm):
        first = request_of(engine, llm, submit(ONE))
        second = request_of(engine, llm, submit(TWO))
        first.fail(RequestError("no room in the KV cache"))
        step = engine.step(pump)
        assert step.request_ids == [ONE]
        assert step.finishes[0].error == "RequestError: no room in the KV cache"
        assert not step.finishes[0].invalid
        second.emit(20, finish="stop")
        assert read_until_finish(engine) == ([20], STOP)


def test_what_the_library_finds_wrong_with_a_request_is_the_requests_doing(model: Path) -> None:
    with loaded(model) as (engine, llm):
        llm.refuses_next = ValueError("too long")
        engine.add(submit())
        _, finish = read_until_finish(engine)
        assert finish == Finish(
            reason=FinishReason.ERROR, error="ValueError: too long", invalid=True
        )


def test_a_bug_with_one_result_stops_that_request_in_the_library_too(model: Path) -> None:
    with loaded(model) as (engine, llm):
        request = request_of(engine, llm, submit())
        request.fail(AssertionError("logprobs length"))
        _, finish = read_until_finish(engine)
        assert finish.error == "AssertionError: logprobs length"
        assert request.asked_to_abort.is_set()


# --- aborts ---


def test_after_an_abort_nothing_follows_and_the_result_is_read_to_its_end(model: Path) -> None:
    with loaded(model) as (engine, llm):
        aborted = request_of(engine, llm, submit(ONE))
        other = request_of(engine, llm, submit(TWO))
        aborted.emit(10)
        engine.step(pump)
        aborted.emit(11)  # on its way while the abort is
        engine.abort([ONE])
        assert aborted.asked_to_abort.wait(10)
        aborted.emit(12)
        aborted.emit(finish="cancelled")
        wait_until(lambda: aborted.finished)
        other.emit(20, finish="length")
        wait_until(lambda: 20 in tokens_under_way(engine))
        assert 12 not in tokens_under_way(engine)
        step = engine.step(pump)
        assert (step.request_ids, step.token_ids) == ([TWO], [20])


def test_an_abort_during_a_step_ends_the_step(model: Path) -> None:
    with loaded(model) as (engine, llm):
        request_of(engine, llm, submit())

        def aborting(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
            engine.abort([ONE])
            return True

        step = engine.step(aborting)
        assert step.request_ids == []
        assert not engine.has_work()


def test_aborting_what_is_unknown_or_over_is_no_error(model: Path) -> None:
    with loaded(model) as (engine, llm):
        request = request_of(engine, llm, submit())
        request.emit(9, finish="stop")
        read_until_finish(engine)
        engine.abort([ONE, TWO])
        assert not request.asked_to_abort.is_set()


# --- log probabilities ---


def test_log_probabilities_stand_beside_their_tokens_in_a_step(model: Path) -> None:
    with loaded(model) as (engine, llm):
        request_of(engine, llm, submit(ONE)).emit(10)
        wait_until(lambda: num_deltas(engine) == 1)
        request_of(engine, llm, submit(TWO, logprobs=0)).emit(20, logprobs=[-0.25])
        wait_until(lambda: num_deltas(engine) == 2)
        step = engine.step(pump)
        assert step.request_ids == [ONE, TWO]
        assert step.logprobs == {1: [TokenLogprob(logprob=-0.25)]}


# --- what is asked of the library ---


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        pytest.param({}, {"temperature": 1.0, "top_k": None, "top_p": None}, id="plain"),
        pytest.param({}, {"end_id": EOS, "stop_token_ids": [EOT]}, id="more ends than one"),
        pytest.param(
            {"temperature": 0.0, "top_p": 0.5, "seed": 1, "min_p": 0.1},
            {"temperature": 0.0, "top_k": 1, "top_p": None, "seed": None, "min_p": None},
            id="greedy leaves nothing to chance",
        ),
        pytest.param(
            {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
            {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
            id="random",
        ),
        pytest.param({"min_tokens": 4}, {"min_tokens": 4}, id="a least length"),
        pytest.param({"logprobs": 0}, {"logprobs": 1}, id="zero would be none"),
        pytest.param({"logprobs": 5}, {"logprobs": 5}, id="log probabilities"),
        pytest.param(
            {"stop_token_ids": (7, EOT)},
            {"end_id": EOS, "stop_token_ids": [7, EOT], "include_stop_str_in_output": True},
            id="ends",
        ),
        pytest.param(
            {"ignore_eos": True},
            {"end_id": EOS, "ignore_eos": True, "stop_token_ids": None},
            id="no end",
        ),
        pytest.param({"max_tokens": 1000}, {"max_tokens": MAX_SEQ_LEN - 3}, id="no more than fit"),
    ],
)
def test_sampling_is_put_into_the_librarys_words(
    model: Path, sampling: dict[str, Any], expected: dict[str, Any]
) -> None:
    with loaded(model) as (engine, llm):
        request = request_of(engine, llm, submit(**sampling))
        assert {name: getattr(request.sampling_params, name) for name in expected} == expected


def test_a_bias_is_one_number_for_each_logit(model: Path) -> None:
    (model / "config.json").write_text('{"text_config": {"vocab_size": 128}}')
    with loaded(model) as (engine, llm):
        request = request_of(engine, llm, submit(logit_bias={4: -100.0, 127: 1.5}))
        bias = request.sampling_params.embedding_bias
        assert (len(bias), bias.dtype) == (128, "float32")
        assert {at: value for at, value in enumerate(bias) if value} == {4: -100.0, 127: 1.5}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        pytest.param(submit(prompt=0), "prompt", id="no prompt"),
        pytest.param(submit(max_tokens=0), "max_tokens", id="no answer"),
        pytest.param(submit(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias", id="bias on no token"),
        pytest.param(submit(stop_token_ids=(-1,)), "stop_token_ids", id="stop at no token"),
        pytest.param(submit(top_k=2_000_000), None, id="what the library's own check refuses"),
        pytest.param(
            msgspec.structs.replace(submit(), prompt_token_ids=[VOCAB_SIZE]),
            "prompt",
            id="no token",
        ),
        pytest.param(msgspec.structs.replace(submit(), sim={}), "sim", id="a script"),
        pytest.param(submit(prompt_logprobs=0), "logprobs", id="logprobs of a prompt"),
        pytest.param(submit(priority=-1), "priority", id="out of its turn"),
    ],
)
def test_what_cannot_run_never_reaches_the_library(
    model: Path, message: Submit, param: str | None
) -> None:
    with loaded(model) as (engine, llm):
        with pytest.raises(InvalidRequest) as refused:
            engine.add(message)
        assert refused.value.param == param
        assert not engine.has_work()
        assert llm.requests == []


def test_a_prompt_must_leave_room_for_an_answer(model: Path) -> None:
    with loaded(model) as (engine, llm):
        with pytest.raises(ContextLengthExceeded):
            engine.add(submit(prompt=MAX_SEQ_LEN))
        request = request_of(engine, llm, submit(prompt=MAX_SEQ_LEN - 1))
        assert request.sampling_params.max_tokens == 1


def test_a_prompt_must_fit_into_a_step_unless_it_is_taken_in_chunks(model: Path) -> None:
    short = TrtLlmOptions(max_num_tokens=8)
    with loaded(model, options=short) as (engine, _), pytest.raises(ContextLengthExceeded):
        engine.add(submit(prompt=9))
    chunked = dataclasses.replace(short, enable_chunked_prefill=True)
    with loaded(model, options=chunked) as (engine, llm):
        request_of(engine, llm, submit(prompt=9))


# --- starting ---


def test_every_limit_is_given_to_the_constructor(model: Path) -> None:
    with loaded(model, options=TrtLlmOptions(tensor_parallel_size=2)) as (_, llm):
        assert llm.arguments == {
            "model": str(model),
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "dtype": "auto",
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 1,
            "max_batch_size": 2048,
            "max_num_tokens": 8192,
            "max_seq_len": MAX_SEQ_LEN,
            "max_beam_width": 1,
            "enable_chunked_prefill": False,
            "kv_cache_config": {"free_gpu_memory_fraction": 0.9},
        }


def test_a_file_of_options_wins_key_by_key(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "extra.yaml"
    file.write_text("stream_interval: 4\nkv_cache_config:\n  enable_block_reuse: false\n")
    with loaded(model, options=TrtLlmOptions(extra_options_path=str(file))) as (_, llm):
        assert llm.arguments["stream_interval"] == 4
        assert llm.arguments["kv_cache_config"] == {
            "free_gpu_memory_fraction": 0.9,
            "enable_block_reuse": False,
        }


def test_a_backend_for_grammars_is_announced(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "extra.yaml"
    file.write_text("guided_decoding_backend: xgrammar\n")
    options = TrtLlmOptions(extra_options_path=str(file))
    engine = TensorRTLLMEngine(describe=lambda: CARD, model=str(model), options=options)
    assert engine.describe().grammar_kinds == tuple(GrammarKind)
    plain = TensorRTLLMEngine(describe=lambda: CARD, model=str(model))
    assert plain.describe().grammar_kinds == ()


def test_one_limit_has_one_value(model: Path) -> None:
    with pytest.raises(ConfigError, match="set one of them"):
        TensorRTLLMEngine(
            describe=lambda: CARD,
            model=str(model),
            max_num_seqs=8,
            options=TrtLlmOptions(max_batch_size=16),
        )


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (None, "needs a model"),
        ("model.gguf", "a GGUF file is for the llamacpp engine"),
        ("nowhere", "not a directory"),
        ("empty", "no config.json"),
    ],
)
def test_only_a_hugging_face_directory_is_a_model(
    tmp_path: Path, name: str | None, complaint: str
) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "empty").mkdir()
    model = None if name is None else str(tmp_path / name)
    engine = TensorRTLLMEngine(describe=lambda: CARD, model=model)
    with pytest.raises(StartError, match=complaint):
        engine.describe()
    engine.close()


def test_a_missing_package_is_named_with_what_to_do(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with (
        pytest.raises(StartError, match=r"pip install 'fastserve\[trtllm\]'.*NVIDIA GPU"),
        loaded(model),
    ):
        pass


def test_a_package_that_cannot_be_imported_is_told_from_a_missing_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tensorrt_llm.py").write_text("raise OSError('libcuda.so.1: not found')")
    for name in list(sys.modules):
        if name.startswith("tensorrt_llm"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(StartError, match=r"libcuda.so.1: not found"), loaded(model):
        pass


def test_what_the_constructor_raises_is_why_it_cannot_start(
    model: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.LLM, "refuses", RuntimeError("only 1 GPU, but 8 are required"))
    with pytest.raises(StartError, match="only 1 GPU, but 8 are required"), loaded(model):
        pass


def test_lanes_are_served_while_it_loads(
    model: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    shares: list[float] = []
    real = library.LLM

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert told.wait(10)
        return real(*args, **kwargs)

    slow.generate_async = real.generate_async  # type: ignore[attr-defined]  # a class, but for this
    monkeypatch.setattr(library, "LLM", slow)
    engine = TensorRTLLMEngine(describe=lambda: CARD, model=str(model))
    engine.describe()

    def progress(share: float) -> None:
        shares.append(share)
        told.set()

    engine.load(progress)
    engine.close()
    assert shares[0] == 0.0
    assert shares[-1] == 1.0


# --- the end of the engine ---


def test_a_fatal_error_in_a_result_is_the_end_of_the_engine(model: Path) -> None:
    from tensorrt_llm.executor import CppExecutorError

    with loaded(model) as (engine, llm):
        first = request_of(engine, llm, submit(ONE))
        second = request_of(engine, llm, submit(TWO))
        first.emit(10)
        wait_until(lambda: num_deltas(engine) == 1)
        first.fail(CppExecutorError("CUDA error: an illegal memory access"))
        assert engine._runner is not None
        loop = engine._runner._loop
        second.fail(ValueError("and this is what came of it"))
        wait_until(lambda: second.finished and not loop._readers)
        step = engine.step(pump)
        assert (step.token_ids, step.finishes) == ([10], {})
        with pytest.raises(EngineDead, match="illegal memory access"):
            engine.step(pump)
        assert not llm.shut_down.is_set()
    assert not llm.shut_down.is_set(), "the shutdown of a dead engine never ends"


def test_a_shutdown_met_by_a_new_request_is_the_end_of_the_engine(model: Path) -> None:
    with loaded(model) as (engine, llm):
        llm.refuses_next = RuntimeError("LLM is shutting down")
        engine.add(submit())
        with pytest.raises(EngineDead, match="shutting down"):
            engine.step(pump)


def test_an_idle_engine_that_is_dead_has_work_left_to_say_so(model: Path) -> None:
    clock = Clock()
    with loaded(model, clock=clock) as (engine, llm):
        assert not engine.has_work()
        llm.healthy = False
        clock.now_s += 1.0
        assert engine.has_work()
        with pytest.raises(EngineDead, match="not healthy"):
            engine.step(pump)


def test_a_library_that_hangs_in_its_own_shutdown_is_found_by_its_health(model: Path) -> None:
    clock = Clock()
    released = threading.Event()
    with loaded(model, clock=clock) as (engine, llm):
        request_of(engine, llm, submit()).block(released)
        llm.healthy = False
        with pytest.raises(EngineDead):
            engine.step(clock.pump)
        started_s = time.monotonic()
        engine.close()
        assert time.monotonic() - started_s < 2.0
        released.set()


def test_a_rank_that_is_killed_is_the_end_of_the_engine(model: Path) -> None:
    with rank() as process, loaded(model) as (engine, llm):
        request_of(engine, llm, submit())
        process.kill()

        def woken(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
            assert pump(fd=fd, timeout_s=10), "the kernel told of it, and nobody listened"
            return True

        with pytest.raises(EngineDead, match=rf"MPI rank 0 \(pid {process.pid} on .+\) exited"):
            engine.step(woken)


def test_a_fatal_error_in_an_aborted_result_counts_too(model: Path) -> None:
    with loaded(model) as (engine, llm):
        aborted = request_of(engine, llm, submit(ONE))
        request_of(engine, llm, submit(TWO))
        engine.abort([ONE])
        assert aborted.asked_to_abort.wait(10)
        aborted.fail(RuntimeError("the executor has stopped"))
        with pytest.raises(EngineDead, match="the executor has stopped"):
            engine.step(pump)


def test_an_engine_that_says_nothing_is_waited_for_in_the_pump(model: Path) -> None:
    clock = Clock()
    with loaded(model, clock=clock) as (engine, llm):
        request = request_of(engine, llm, submit())
        clock.at_wait[200] = lambda: request.emit(9, finish="stop")
        step = engine.step(clock.pump)
        assert step.token_ids == [9]
        assert clock.now_s == 199.0, "no step has ended in all that time"


def test_a_pump_that_gives_up_early_ends_the_step(model: Path) -> None:
    with loaded(model, clock=Clock()) as (engine, llm):
        request_of(engine, llm, submit())

        def stopping(*, fd: int | None = None, timeout_s: float = 0.0) -> bool:
            return False

        assert engine.step(stopping).request_ids == []
        assert engine.has_work()


# --- closing ---


def test_closing_shuts_the_library_down(model: Path) -> None:
    with loaded(model) as (_, llm):
        pass
    assert llm.shut_down.is_set()


def test_a_shutdown_that_does_not_end_is_abandoned_and_the_ranks_are_killed(model: Path) -> None:
    with rank() as process:
        with loaded(model, close_timeout_s=0.05) as (_, llm):
            llm.may_shut_down.clear()
        assert llm.shut_down.is_set()
        assert process.wait(10) == -signal.SIGKILL
        llm.may_shut_down.set()


def test_closing_while_it_loads_does_not_wait_for_it(
    model: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(library.LLM, "__init__", lambda self, **_: released.wait(60) and None)
    engine = TensorRTLLMEngine(describe=lambda: CARD, model=str(model))
    engine.describe()

    def terminated(_share: float) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        engine.load(terminated)
    with rank() as process:
        engine.close()
        assert process.wait(10) == -signal.SIGKILL
    released.set()


# --- statistics ---


def test_waiting_is_until_the_first_token(model: Path) -> None:
    with loaded(model) as (engine, llm):
        request = request_of(engine, llm, submit(ONE))
        request_of(engine, llm, submit(TWO))
        assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 2)
        request.emit(10)
        engine.step(pump)
        assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
        engine.abort([ONE, TWO])
        assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)


def test_statistics_are_asked_for_only_where_they_are_wanted(model: Path) -> None:
    for wanted in (False, True):
        options = TrtLlmOptions(enable_iter_perf_stats=wanted)
        with loaded(model, options=options) as (engine, llm):
            request_of(engine, llm, submit())
            names = [thread.name for thread in threading.enumerate()]
            assert ("trtllm-stats" in names) is wanted
        wait_until(lambda: "trtllm-stats" not in [t.name for t in threading.enumerate()])


# --- what the tests are made of ---


class Clock:
    """Time that passes only in its pump, which does something at some of the waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.at_wait: dict[int, Callable[[], None]] = {}
        self._waits = 0

    def __call__(self) -> float:
        return self.now_s

    def pump(self, *, fd: int | None = None, timeout_s: float = 0.0) -> bool:
        self._waits += 1
        action = self.at_wait.get(self._waits)
        if action is not None:
            action()
            return pump(fd=fd, timeout_s=10)
        self.now_s += timeout_s
        return pump(fd=fd, timeout_s=0)


def num_deltas(engine: TensorRTLLMEngine) -> int:
    """How many responses have come and are in no step yet."""
    assert engine._runner is not None
    return len(engine._runner._loop._deltas)


def tokens_under_way(engine: TensorRTLLMEngine) -> list[int]:
    """The tokens of those."""
    assert engine._runner is not None
    return [
        token_id for delta in list(engine._runner._loop._deltas) for token_id in delta.token_ids
    ]


def wait_until(condition: Callable[[], bool]) -> None:
    """For what another thread or process does, and tells nobody of."""
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.001)


@contextmanager
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks as if MPI had started it."""
    process = subprocess.Popen(["sleep", "60"], env=os.environ | {"OMPI_COMM_WORLD_RANK": "0"})
    try:
        # Until it has become what it is to be, it looks like us.
        environ = Path(f"/proc/{process.pid}/environ")
        wait_until(lambda: b"OMPI_COMM_WORLD_RANK" in environ.read_bytes())
        yield process
    finally:
        process.kill()
        process.wait()
