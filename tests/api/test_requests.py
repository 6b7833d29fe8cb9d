"""What a body must be to become a request, and what the request then says."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.api.prompts import PROMPTS_MAX
from fastserve.api.requests import (
    CHOICES_MAX,
    LOGIT_BIAS_MAX,
    STOP_CHARS_MAX,
    STOP_TOKEN_IDS_MAX,
    STOPS_MAX,
    ChatRequest,
    CompletionRequest,
    check_vocabulary,
    parse_chat,
    parse_completion,
)
from fastserve.errors import ContextLengthExceeded, InvalidRequest
from fastserve.generation import SamplingParams

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(orjson.dumps({"messages": HELLO} | fields))


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(orjson.dumps({"prompt": "Once"} | fields))


def both(**fields: Any) -> list[ChatRequest | CompletionRequest]:
    return [chat(**fields), completion(**fields)]


def test_a_chat_of_nothing_but_a_message_has_openais_defaults() -> None:
    request = chat()
    assert request.messages == HELLO
    assert request.model is None
    assert not request.stream
    assert not request.include_usage
    assert request.n == 1
    assert request.stop == ()
    assert request.logprobs is None
    assert request.sim is None
    assert not request.add_special_tokens
    assert request.add_generation_prompt
    assert request.skip_special_tokens
    assert request.unknown_fields == ()
    assert request.sampling(prompt_tokens=10, max_seq_len=100, choice=0) == SamplingParams(
        max_tokens=90
    )


def test_a_completion_of_nothing_but_a_prompt_has_openais_defaults() -> None:
    request = completion()
    assert request.prompts == ("Once",)
    assert not request.echo
    assert request.add_special_tokens
    assert request.logprobs is None
    assert request.sampling(prompt_tokens=1, max_seq_len=100, choice=0) == SamplingParams(
        max_tokens=16
    )


def test_every_sampling_field_arrives() -> None:
    fields = {
        "max_tokens": 32,
        "min_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": -1.5,
        "frequency_penalty": 1,
        "repetition_penalty": 1.1,
        "seed": 7,
        "logit_bias": {"5": -100, "6": 1.5},
        "stop_token_ids": [2, 3],
        "ignore_eos": True,
        "priority": -5,
    }
    expected = SamplingParams(
        max_tokens=32,
        min_tokens=4,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=-1.5,
        frequency_penalty=1.0,
        repetition_penalty=1.1,
        seed=7,
        logit_bias={5: -100.0, 6: 1.5},
        stop_token_ids=(2, 3),
        ignore_eos=True,
        priority=-5,
    )
    for request in both(**fields):
        assert request.sampling(prompt_tokens=1, max_seq_len=100, choice=0) == expected


def test_null_means_absent_in_every_field() -> None:
    for parse, needed in ((parse_chat, {"messages": HELLO}), (parse_completion, {"prompt": "x"})):
        plain = parse(orjson.dumps(needed))
        names = {*plain.__struct_encode_fields__, "best_of", "response_format", "tools"}
        names -= {"messages", "prompt", "unknown_fields"}
        assert parse(orjson.dumps(needed | dict.fromkeys(names))) == plain


def test_the_options_of_the_text_arrive() -> None:
    for request in both(
        stop=["\n", "END"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        add_special_tokens=False,
        return_token_ids=True,
        sim={"tokens": [1, 2]},
        model="m",
    ):
        assert request.stop == ("\n", "END")
        assert request.include_stop_str_in_output
        assert not request.skip_special_tokens
        assert not request.add_special_tokens
        assert request.return_token_ids
        assert request.sim == {"tokens": [1, 2]}
        assert request.model == "m"
    assert chat(stop="END").stop == ("END",)
    assert chat(stop=[]).stop == ()
    assert chat(add_special_tokens=True).add_special_tokens


@pytest.mark.parametrize(
    ("options", "include", "continuous"),
    [
        ({}, False, False),
        ({"include_usage": None}, False, False),
        ({"include_usage": True, "include_obfuscation": False}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
def test_stream_options(options: dict[str, Any], *, include: bool, continuous: bool) -> None:
    for request in both(stream=True, stream_options=options):
        assert request.stream
        assert (request.include_usage, request.continuous_usage) == (include, continuous)


def test_the_newer_name_of_the_token_limit_wins() -> None:
    for request in both(max_tokens=5, max_completion_tokens=9):
        assert request.sampling(prompt_tokens=1, max_seq_len=99, choice=0).max_tokens == 9


def test_minus_one_is_another_way_to_turn_top_k_off() -> None:
    assert chat(top_k=-1).sampling(prompt_tokens=1, max_seq_len=9, choice=0).top_k == 0


def test_chat_logprobs_are_a_switch_and_a_number() -> None:
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).logprobs is None
    sampling = chat(logprobs=True, top_logprobs=2).sampling(
        prompt_tokens=1, max_seq_len=9, choice=0
    )
    assert sampling.logprobs == 2


def test_completion_logprobs_are_a_number() -> None:
    request = completion(logprobs=5)
    assert request.logprobs == 5
    assert request.sampling(prompt_tokens=1, max_seq_len=9, choice=0).logprobs == 5
    assert completion(logprobs=0).logprobs == 0


def test_what_a_template_gets() -> None:
    request = chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert request.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert chat().template_kwargs == {}
    assert not chat(add_generation_prompt=False).add_generation_prompt


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        pytest.param("Once", ("Once",), id="a text"),
        pytest.param(["Once", "Twice"], ("Once", "Twice"), id="texts"),
        pytest.param([1, 2, 3], ([1, 2, 3],), id="token ids"),
        pytest.param([[1, 2], [3]], ([1, 2], [3]), id="lists of token ids"),
        pytest.param(["Once", [3]], ("Once", [3]), id="both"),
    ],
)
def test_forms_of_a_prompt(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_echo_may_ask_for_no_tokens_at_all() -> None:
    request = completion(echo=True, max_tokens=0)
    assert request.echo
    assert request.sampling(prompt_tokens=9, max_seq_len=9, choice=0).max_tokens == 0


@pytest.mark.parametrize(
    ("fields", "prompt_logprobs"),
    [
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 0, "max_tokens": 0}, 0),
        ({"echo": True}, None),
        ({"logprobs": 3}, None),
    ],
)
def test_an_echo_has_logprobs_where_the_answer_has(
    fields: dict[str, Any], prompt_logprobs: int | None
) -> None:
    sampling = completion(**fields).sampling(prompt_tokens=9, max_seq_len=99, choice=0)
    assert sampling.prompt_logprobs == prompt_logprobs


def test_a_chat_may_be_token_ids_alone() -> None:
    request = parse_chat(b'{"prompt_token_ids":[5,6]}')
    assert (request.prompt_token_ids, request.messages) == ([5, 6], [])


@pytest.mark.parametrize(
    ("fields", "generation_prompt"),
    [
        ({}, True),
        ({"continue_final_message": False}, True),
        ({"continue_final_message": True}, False),
        ({"continue_final_message": True, "add_generation_prompt": False}, False),
    ],
)
def test_a_message_that_is_continued_has_no_prompt_after_it(
    fields: dict[str, Any], *, generation_prompt: bool
) -> None:
    assert chat(**fields).add_generation_prompt is generation_prompt


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"truncate_prompt_tokens": 3}, [5, 6, 7]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [5, 6, 7]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": 8}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"truncate_prompt_tokens": 2**63 - 1}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 6}, [4, 5, 6, 7]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 6, "truncation_side": "right"}, [0, 1, 2, 3]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 99}, [7]),
    ],
)
def test_what_is_left_of_a_prompt(fields: dict[str, Any], left: list[int]) -> None:
    for request in both(**fields):
        assert request.truncated(list(range(8)), max_seq_len=10) == left


def test_as_many_as_fit_leaves_the_room_of_an_answer_of_default_length() -> None:
    ids = list(range(50))
    assert chat(truncate_prompt_tokens=-1).truncated(ids, max_seq_len=30) == ids[-29:]
    assert completion(truncate_prompt_tokens=-1).truncated(ids, max_seq_len=30) == ids[-14:]


def test_unknown_fields_are_named_and_known_ones_are_not() -> None:
    request = chat(user="u", metadata={"a": "b"}, store=False, frobnicate=1, unknown_fields=["x"])
    assert sorted(request.unknown_fields) == ["frobnicate", "unknown_fields"]


IN_BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"model": 5}, "model", "invalid_type"),
    ({"stream": "true"}, "stream", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream": False, "stream_options": {}}, "stream_options", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": 5}, "stream_options", "invalid_type"),
    (
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
        "invalid_type",
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_value",
    ),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "invalid_value",
    ),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"n": 1.5}, "n", "invalid_type"),
    ({"n": True}, "n", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": "16"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 2**63}, "max_tokens", "integer_above_max_value"),
    ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "integer_above_max_value"),
    ({"min_tokens": -1}, "min_tokens", "integer_below_min_value"),
    ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
    ({"temperature": 999999}, "temperature", "decimal_above_max_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "decimal_below_min_value"),
    ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
    ({"top_p": -1}, "top_p", "decimal_below_min_value"),
    ({"top_k": -5}, "top_k", "integer_below_min_value"),
    ({"top_k": 2**31}, "top_k", "integer_above_max_value"),
    ({"min_p": 2}, "min_p", "decimal_above_max_value"),
    ({"min_p": -0.5}, "min_p", "decimal_below_min_value"),
    ({"presence_penalty": 2.5}, "presence_penalty", "decimal_above_max_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "decimal_below_min_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"repetition_penalty": 2.1}, "repetition_penalty", "decimal_above_max_value"),
    ({"seed": 2**63}, "seed", "integer_above_max_value"),
    ({"seed": -(2**63) - 1}, "seed", "invalid_value"),
    ({"seed": 0.5}, "seed", "invalid_type"),
    ({"seed": "7"}, "seed", "invalid_type"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "integer_below_min_value"),
    ({"logit_bias": {"9" * 30: 1}}, "logit_bias", "integer_above_max_value"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias", "decimal_above_max_value"),
    ({"logit_bias": {"5": "much"}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"5": None}}, "logit_bias", "invalid_type"),
    ({"logit_bias": []}, "logit_bias", "invalid_type"),
    (
        {"logit_bias": {str(i): 1 for i in range(LOGIT_BIAS_MAX + 1)}},
        "logit_bias",
        "object_above_max_length",
    ),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": [""]}, "stop[0]", "invalid_value"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"stop": [5]}, "stop[0]", "invalid_type"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": ["a"] * (STOPS_MAX + 1)}, "stop", "array_above_max_length"),
    ({"stop": ["a" * (STOP_CHARS_MAX + 1)]}, "stop[0]", "string_above_max_length"),
    ({"stop_token_ids": 5}, "stop_token_ids", "invalid_type"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "integer_below_min_value"),
    ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]", "invalid_type"),
    (
        {"stop_token_ids": [1] * (STOP_TOKEN_IDS_MAX + 1)},
        "stop_token_ids",
        "array_above_max_length",
    ),
    ({"ignore_eos": "no"}, "ignore_eos", "invalid_type"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "integer_below_min_value"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "integer_below_min_value"),
    ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens", "invalid_type"),
    ({"truncation_side": "up"}, "truncation_side", "invalid_value"),
    ({"priority": 2**63}, "priority", "integer_above_max_value"),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids", "invalid_type"),
    ({"sim": []}, "sim", "invalid_type"),
    ({"sim": "fast"}, "sim", "invalid_type"),
]

IN_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 5}, "logprobs", "invalid_type"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "integer_below_min_value"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "invalid_value"),
    ({"reasoning_effort": 3}, "reasoning_effort", "invalid_type"),
    ({"add_generation_prompt": "no"}, "add_generation_prompt", "invalid_type"),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"prompt_token_ids": []}, "prompt_token_ids", "invalid_value"),
    ({"prompt_token_ids": [5, -1]}, "prompt_token_ids[1]", "integer_below_min_value"),
    ({"prompt_token_ids": [10**30]}, "prompt_token_ids[0]", "invalid_type"),
    ({"prompt_token_ids": [1], "messages": []}, "messages", "empty_array"),
    ({"continue_final_message": 1}, "continue_final_message", "invalid_type"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "invalid_value",
    ),
    ({"echo": "yes"}, "echo", "invalid_type"),
]

IN_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 21}, "logprobs", "integer_above_max_value"),
    ({"logprobs": -1}, "logprobs", "integer_below_min_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"echo": True, "max_tokens": -1}, "max_tokens", "integer_below_min_value"),
    ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens", "integer_above_max_value"),
    ({"min_tokens": 17}, "min_tokens", "integer_above_max_value"),
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": {}}, "prompt", "invalid_type"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [""]}, "prompt[0]", "invalid_value"),
    ({"prompt": [[]]}, "prompt[0]", "invalid_value"),
    ({"prompt": [[1], []]}, "prompt[1]", "invalid_value"),
    ({"prompt": [-1, 5]}, "prompt[0]", "integer_below_min_value"),
    ({"prompt": [[1], [5, -1]]}, "prompt[1][1]", "integer_below_min_value"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt[1]", "invalid_type"),
    ({"prompt": ["a", None]}, "prompt[1]", "invalid_type"),
    ({"prompt": [True]}, "prompt[0]", "invalid_type"),
    ({"prompt": [1.5]}, "prompt[0]", "invalid_type"),
    ({"prompt": [[1, 1.5]]}, "prompt[0][1]", "invalid_type"),
    ({"prompt": [10**25]}, "prompt[0]", "invalid_type"),
    ({"prompt": [2**64 - 1]}, "prompt[0]", "integer_above_max_value"),
    ({"prompt": [[[1]]]}, "prompt[0][0]", "invalid_type"),
    ({"prompt": ["a"] * (PROMPTS_MAX + 1)}, "prompt", "array_above_max_length"),
    ({"prompt": ["a"] * (CHOICES_MAX // 128 + 1), "n": 128}, "n", "integer_above_max_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), [*IN_BOTH, *IN_CHAT])
def test_a_chat_is_refused_for(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(json.dumps({"messages": HELLO} | fields).encode())
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert param.removesuffix("[...]") in caught.value.message


@pytest.mark.parametrize(("fields", "param", "code"), [*IN_BOTH, *IN_COMPLETIONS])
def test_a_completion_is_refused_for(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(json.dumps({"prompt": "x"} | fields).encode())
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "'temperature' must be at most 2; it is 3."),
        ({"top_p": 0}, "'top_p' must be more than 0; it is 0."),
        ({"n": "2"}, "'n' must be an integer, not a string."),
        ({"stream": "true"}, "'stream' must be true or false, not a string."),
        ({"seed": 1e30}, "'seed' does not fit a 64-bit integer."),
        ({"logit_bias": {"a": 1}}, "A key of 'logit_bias' must be an integer, not a string."),
        ({"logit_bias": {"1": "a"}}, "A value of 'logit_bias' must be a number, not a string."),
        ({"stop": ["a"] * 17}, "'stop' must have at most 16 items."),
        ({"stop": ["a" * 1025]}, "'stop[0]' must have at most 1024 characters."),
        ({"stop": [""]}, "'stop[0]' must not be empty."),
        ({"prompt": ["a", 1]}, "'prompt[1]' must be a string or an array, not an integer."),
        ({"prompt": None}, "'prompt' is required."),
    ],
)
def test_the_message_says_what_is_wrong_in_plain_words(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.message == message


def test_a_limit_that_is_exactly_reached_is_not_passed() -> None:
    request = completion(
        prompt=["a"] * 8,
        n=CHOICES_MAX // 8,
        stop=["a" * STOP_CHARS_MAX] * STOPS_MAX,
        stop_token_ids=[1] * STOP_TOKEN_IDS_MAX,
        logit_bias={str(i): 100 for i in range(LOGIT_BIAS_MAX)},
        temperature=2,
        top_p=1,
        min_p=1,
        repetition_penalty=2,
        presence_penalty=-2,
        frequency_penalty=2,
        seed=-(2**63),
        logprobs=20,
    )
    assert len(request.prompts) * request.n == CHOICES_MAX


@pytest.mark.parametrize(
    ("seed", "choice", "expected"),
    [(None, 3, None), (7, 0, 7), (7, 3, 10), (-1, 1, 0), (2**63 - 1, 1, -(2**63))],
)
def test_choices_have_seeds_of_their_own(
    seed: int | None, choice: int, expected: int | None
) -> None:
    for request in both(seed=seed):
        sampling = request.sampling(prompt_tokens=1, max_seq_len=100, choice=choice)
        assert sampling.seed == expected


@pytest.mark.parametrize(
    ("fields", "prompt_tokens", "max_tokens"),
    [
        pytest.param({}, 99, 1, id="one token of room is enough"),
        pytest.param({"max_tokens": 10}, 90, 10, id="an exact fit"),
    ],
)
def test_what_fits_the_context(fields: dict[str, Any], prompt_tokens: int, max_tokens: int) -> None:
    for request in both(**fields):
        sampling = request.sampling(prompt_tokens=prompt_tokens, max_seq_len=100, choice=0)
        assert sampling.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("fields", "prompt_tokens"),
    [
        pytest.param({}, 100, id="no room for an answer"),
        pytest.param({}, 5000, id="a prompt longer than the context"),
        pytest.param({"max_tokens": 11}, 90, id="one token too many"),
        pytest.param({"max_completion_tokens": 2**63 - 1}, 1, id="far too many"),
        pytest.param({"min_tokens": 16}, 85, id="no room for the least that was asked for"),
    ],
)
def test_what_does_not_fit_the_context(fields: dict[str, Any], prompt_tokens: int) -> None:
    for request, param in zip(both(**fields), ("messages", "prompt"), strict=True):
        with pytest.raises(ContextLengthExceeded, match=r"context length is 100 tokens") as caught:
            request.sampling(prompt_tokens=prompt_tokens, max_seq_len=100, choice=0)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [50]}, "prompt"),
        ({"prompt": [[1], [49, 10**9]]}, "prompt"),
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"stop_token_ids": [1, 50]}, "stop_token_ids"),
    ],
)
def test_ids_beyond_the_vocabulary(fields: dict[str, Any], param: str) -> None:
    request = completion(**fields)
    with pytest.raises(InvalidRequest) as caught:
        check_vocabulary(request, vocab_size=50)
    assert caught.value.param == param


def test_ids_within_the_vocabulary() -> None:
    fields: dict[str, Any] = {"logit_bias": {"49": 1}, "stop_token_ids": [49]}
    check_vocabulary(chat(**fields), vocab_size=50)
    check_vocabulary(completion(prompt=["x", [0, 49]], **fields), vocab_size=50)


TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(
    {
        *ChatRequest.__struct_encode_fields__,
        *CompletionRequest.__struct_encode_fields__,
        *("best_of", "response_format", "tool_choice", "tools", "user"),
    }
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id"]),
        st.sampled_from(["user", "assistant", "tool"]) | JSON,
    ),
    max_size=3,
)


@given(st.dictionaries(st.sampled_from(FIELDS) | TEXT, JSON), MESSAGES | JSON, JSON)
def test_an_object_is_a_request_or_refused(fields: Any, messages: Any, prompt: Any) -> None:
    body = orjson.dumps(fields | {"messages": messages, "prompt": prompt})
    with contextlib.suppress(InvalidRequest):
        assert parse_chat(body).messages
    with contextlib.suppress(InvalidRequest):
        assert parse_completion(body).prompts


@given(JSON.filter(lambda value: not isinstance(value, dict)))
def test_what_is_no_object_is_refused(value: Any) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(InvalidRequest):
            parse(orjson.dumps(value))


@given(st.binary())
def test_no_bytes_raise_anything_but_invalid_request(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(InvalidRequest):
            parse(body)
