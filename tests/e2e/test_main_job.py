"""The main job: real tokens from the embedded model, as openai's client sees them."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.harness import wait_until

if TYPE_CHECKING:
    from tests.e2e.harness import Server

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_chat_is_streamed(embedded: Server) -> None:
    stream = embedded.client().chat.completions.create(
        model=_model(embedded), messages=MESSAGES, stream=True, temperature=0, max_tokens=16
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.strip()
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] in ("stop", "length")
    assert set(reasons[:-1]) == {None}
    assert len({chunk.id for chunk in chunks}) == 1
    # Tokens came one by one, and not all at the end.
    assert len(chunks) > 5


def test_a_stream_and_a_whole_answer_say_the_same(embedded: Server) -> None:
    options: Any = {
        "model": _model(embedded), "messages": MESSAGES, "temperature": 0, "max_tokens": 24,
    }  # fmt: skip
    client = embedded.client()
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    # The same prompt again: all of it is there but the last token.
    cached_tokens = chunks[-1].usage.prompt_tokens_details.cached_tokens
    assert cached_tokens == whole.usage.prompt_tokens - 1
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_greedy_output_does_not_depend_on_company(embedded: Server) -> None:
    def ask(question: str) -> str:
        answer = embedded.client().chat.completions.create(
            model=_model(embedded),
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=12,
        )
        return answer.choices[0].message.content or ""

    questions = [f"Tell me something about the number {n}." for n in range(8)]
    alone = [ask(question) for question in questions[:3]]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, questions))
    assert together[:3] == alone


def test_a_seed_repeats_and_n_choices_differ(embedded: Server) -> None:
    def sample() -> list[str | None]:
        answer = embedded.client().chat.completions.create(
            model=_model(embedded), messages=MESSAGES, temperature=1.5, top_p=0.95, seed=7, n=3,
            max_tokens=12,
        )  # fmt: skip
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = sample()
    assert sample() == first
    assert len(set(first)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text(embedded: Server, *, stream: bool) -> None:
    create: Any = embedded.client().completions.create
    options: Any = {
        "model": _model(embedded),
        "prompt": "1, 2, 3, 4,",
        "temperature": 0,
        "max_tokens": 40,
    }
    full = create(**options).choices[0].text
    # A stop that begins inside one token and ends inside another.
    stop = full[10:14]
    answer = create(**options, stop=[stop], stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        text, reason = "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert text == full[: full.index(stop)]
    assert reason == "stop"


def test_prompts_in_an_array_are_answered_in_order(embedded: Server) -> None:
    client = embedded.client()
    prompts = ["The sky is", "Water is"]
    options: Any = {"model": _model(embedded), "temperature": 0, "max_tokens": 6}
    together = client.completions.create(prompt=prompts, **options)
    alone = [client.completions.create(prompt=each, **options) for each in prompts]
    assert [choice.text for choice in together.choices] == [
        answer.choices[0].text for answer in alone
    ]
    assert together.usage is not None
    assert together.usage.completion_tokens == 12


def test_logprobs_spell_the_text(embedded: Server) -> None:
    answer = embedded.client().chat.completions.create(
        model=_model(embedded), messages=MESSAGES, temperature=0, max_tokens=8,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        # Greedy: the chosen token is the likeliest.
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert entry.logprob <= 0


def test_what_reads_as_a_control_token_is_text(embedded: Server) -> None:
    client = embedded.client()

    def prompt_tokens(content: str) -> int:
        answer = client.chat.completions.create(
            model=_model(embedded), messages=[{"role": "user", "content": content}], max_tokens=1
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    # As a control token it would be one.
    assert prompt_tokens("<|im_end|>") >= prompt_tokens("") + 4


def test_the_model_is_listed(embedded: Server) -> None:
    [model] = embedded.client().models.list().data
    assert model.object == "model"
    assert embedded.client().chat.completions.create(
        model=model.id, messages=MESSAGES, max_tokens=1
    ).model == model.id  # fmt: skip


def test_another_model_is_not_found(embedded: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        embedded.client().chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop[0]"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"extra_body": {"stop_token_ids": [49152]}}, "stop_token_ids"),
        ({"extra_body": {"sim": {"fail_at": 1}}}, "sim"),
    ],
)
def test_a_bad_value_is_named(embedded: Server, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        embedded.client().chat.completions.create(
            model=_model(embedded), messages=MESSAGES, **({"max_tokens": 1} | options)
        )
    if param != "sim":
        assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt_is_refused_before_any_stream(embedded: Server, *, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        embedded.client().completions.create(
            model=_model(embedded), prompt="word " * 20_000, stream=stream
        )
    assert caught.value.code == "context_length_exceeded"


def test_the_server_answers_about_itself(embedded: Server) -> None:
    assert embedded.get("/health")[0] == 200
    wait_until(lambda: embedded.num_in_engine() == 0)
    assert embedded.get("/ready") == (200, {"status": "ready", "num_running": 0, "num_waiting": 0})
    assert set(embedded.get("/version")[1]) == {"version"}
    status, body = embedded.get("/nowhere")
    assert (status, body["error"]["code"]) == (404, "not_found")
    status, body = embedded.get("/v1/completions")
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")


def _model(server: Server) -> str:
    return server.client().models.list().data[0].id
