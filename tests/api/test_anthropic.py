"""Anthropic's dialect: what a body means as a chat, and how answers look, byte by byte."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from anthropic.types import Message

from fastserve.api.anthropic_answers import MessagesDialect, error_body, token_count
from fastserve.api.anthropic_requests import parse_count, parse_messages
from fastserve.api.messages import MESSAGES_MAX
from fastserve.api.requests import ChatRequest
from fastserve.api.responses import Choice, Ending, Usage
from fastserve.errors import (
    EngineDead,
    EngineStarting,
    FastserveError,
    GenerationFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestError,
    RequestTimeout,
)
from fastserve.generation import FinishReason

HELLO: Any = [{"role": "user", "content": "Hello"}]
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}


def read(**fields: Any) -> ChatRequest:
    body = orjson.dumps({"messages": HELLO, "max_tokens": 5} | fields)
    return parse_messages(body).as_chat(max_tokens=5)


def text(content: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": content} | more


# ---- requests


def test_a_message_of_nothing_but_a_question_has_the_apis_defaults() -> None:
    assert read() == ChatRequest(messages=HELLO, max_tokens=5)


def test_every_field_arrives() -> None:
    chat = read(
        model="m", stream=True, temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["\n", "x"],
        sim={"fail_at": 1},
    )  # fmt: skip
    assert chat == ChatRequest(
        messages=HELLO, max_tokens=5, model="m", stream=True, temperature=0.5, top_p=0.9,
        top_k=4, stop=("\n", "x"), sim={"fail_at": 1},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("system", "messages", "turns"),
    [
        pytest.param("Be brief.", HELLO, ["system: Be brief.", "user: Hello"], id="a string"),
        pytest.param(
            [text("Be"), text("brief.", cache_control={"type": "ephemeral"})],
            [{"role": "user", "content": [text("He"), text("llo")]}],
            ["system: Be\nbrief.", "user: He\nllo"],
            id="blocks",
        ),
        pytest.param(
            None,
            [*HELLO, *HELLO, {"role": "assistant", "content": "Hi"}, *HELLO],
            ["user: Hello\nHello", "assistant: Hi", "user: Hello"],
            id="turns in a row of one role are one",
        ),
    ],
)
def test_a_conversation_is_read(system: Any, messages: Any, turns: list[str]) -> None:
    chat = read(system=system, messages=messages)
    assert [f"{turn['role']}: {turn['content']}" for turn in chat.messages] == turns


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"max_tokens": None}, "max_tokens", id="no limit"),
        pytest.param({"max_tokens": 0}, "max_tokens", id="a limit of nothing"),
        pytest.param({"temperature": 1.1}, "temperature", id="too hot"),
        pytest.param({"top_p": 0}, "top_p", id="no mass"),
        pytest.param({"top_k": -1}, "top_k", id="a negative count"),
        pytest.param({"stop_sequences": [""]}, "stop_sequences[0]", id="an empty stop"),
        pytest.param({"stop_sequences": "x"}, "stop_sequences", id="a stop that is no array"),
        pytest.param({"messages": None}, "messages", id="no messages"),
        pytest.param({"messages": []}, "messages", id="empty messages"),
        pytest.param({"messages": HELLO * (MESSAGES_MAX + 1)}, "messages", id="too many"),
        pytest.param({"messages": "hi"}, "messages", id="messages that are a text"),
        pytest.param({"messages": ["hi"]}, "messages[0]", id="a message that is a text"),
        pytest.param(
            {"messages": [{"content": "x"}]}, "messages[0].role", id="a message of nobody"
        ),
        pytest.param(
            {"messages": [{"role": "system", "content": "x"}]}, "messages[0].role", id="a role"
        ),
        pytest.param({"messages": [{"role": "user"}]}, "messages[0].content", id="no content"),
        pytest.param(
            {"messages": [{"role": "user", "content": [text("see"), IMAGE]}]},
            "messages[0].content[1].type",
            id="an image",
        ),
        pytest.param(
            {"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages", id="prefill"
        ),
        pytest.param({"system": 3}, "system", id="a system prompt that is a number"),
        pytest.param({"system": [IMAGE]}, "system[0].type", id="an image for a system prompt"),
        pytest.param({"tools": [{"name": "f"}]}, "tools[0].input_schema", id="tools"),
        pytest.param({"tool_choice": {"type": "any"}}, "tool_choice", id="a tool that must be"),
        pytest.param(
            {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking", id="thinking"
        ),
        pytest.param({"output_config": {"effort": "low"}}, "output_config.effort", id="an effort"),
        pytest.param({"mcp_servers": [{}]}, "mcp_servers", id="servers"),
        pytest.param({"container": "c"}, "container", id="a container"),
        pytest.param({"speed": "fast"}, "speed", id="haste"),
    ],
)
def test_what_we_cannot_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_what_may_only_be_null_is_refused_in_words() -> None:
    with pytest.raises(InvalidRequest, match=r"^'output_config\.effort' is not supported\.$"):
        read(output_config={"effort": "low"})


def test_what_asks_for_nothing_is_taken() -> None:
    chat = read(
        metadata={"user_id": "u"}, service_tier="auto", tools=[], thinking={"type": "adaptive"},
        cache_control={"type": "ephemeral"}, speed="standard", output_config={},
    )  # fmt: skip
    assert chat == ChatRequest(messages=HELLO, max_tokens=5)


def test_a_template_is_told_not_to_let_the_model_think() -> None:
    kwargs = read(thinking={"type": "disabled"}).template_kwargs
    assert kwargs == {"enable_thinking": False, "thinking": False}


def test_what_we_tell_a_template_is_not_for_clients_to_say() -> None:
    request = read(template_kwargs={"tools": 1}, parallel_tool_calls=False)
    assert (request.template_kwargs, request.parallel_tool_calls) == ({}, True)


def test_tools_that_must_not_be_called_need_not_be_heard_of() -> None:
    request = read(tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "none"})
    assert (request.messages, request.tools) == (HELLO, [])


def test_what_nobody_knows_is_told_apart() -> None:
    assert read(betas=1).unknown_fields == ("betas",)


def test_counting_takes_the_conversation_alone() -> None:
    request = parse_count(orjson.dumps({"messages": HELLO, "system": "S", "model": "m"}))
    assert request.as_chat() == ChatRequest(
        messages=[{"role": "system", "content": "S"}, *HELLO], model="m"
    )
    assert orjson.loads(token_count(7)) == {"input_tokens": 7}


# ---- answers


SAME: dict[str, Any] = {"completion_id": "msg_7f", "created": 1700000000, "model": "m"}


def test_a_message_streams_like_this() -> None:
    chunks = MessagesDialect(max_tokens=9).chunks(**SAME, index=0, prompt_tokens=5)
    stream = (
        chunks.first()
        + chunks.text("Hel")
        + chunks.text('lo "you"\n')
        + chunks.finish(Ending(FinishReason.STOP, completion_tokens=2))
    )
    usage = (
        '{{"input_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,'
        '"output_tokens":{}}}'
    )
    assert stream.decode() == (
        "event: message_start\n"
        'data: {"type":"message_start","message":{"id":"msg_7f","type":"message",'
        '"role":"assistant","model":"m","content":[],"stop_reason":null,"stop_sequence":null,'
        f'"usage":{usage.format(0)}}}}}\n\n'
        "event: content_block_start\n"
        'data: {"type":"content_block_start","index":0,'
        '"content_block":{"type":"text","text":""}}\n\n'
        "event: content_block_delta\n"
        'data: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"Hel"}}\n\n'
        "event: content_block_delta\n"
        'data: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"lo \\"you\\"\\n"}}\n\n'
        "event: content_block_stop\n"
        'data: {"type":"content_block_stop","index":0}\n\n'
        "event: message_delta\n"
        'data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        f'"usage":{usage.format(2)}}}\n\n'
        "event: message_stop\n"
        'data: {"type":"message_stop"}\n\n'
    )


@pytest.mark.parametrize(
    ("reason", "stop_reason", "tokens", "word", "sequence"),
    [
        pytest.param(FinishReason.STOP, None, 3, "end_turn", None, id="the model ended it"),
        pytest.param(FinishReason.STOP, 7, 3, "end_turn", None, id="by one of its tokens"),
        pytest.param(FinishReason.STOP, "\n", 3, "stop_sequence", "\n", id="a stop"),
        pytest.param(FinishReason.LENGTH, None, 9, "max_tokens", None, id="the limit"),
        pytest.param(
            FinishReason.LENGTH, None, 3, "model_context_window_exceeded", None, id="no room"
        ),
    ],
)
def test_how_a_message_ended(
    reason: FinishReason, stop_reason: Any, tokens: int, word: str, sequence: str | None
) -> None:
    dialect = MessagesDialect(max_tokens=9)
    whole = dialect.whole(
        [Choice(text="Hi", finish_reason=reason, stop_reason=stop_reason)],
        **SAME,
        usage=Usage(prompt_tokens=5, completion_tokens=tokens),
    )
    message = Message.model_validate_json(whole, strict=True)
    assert [block.type == "text" and block.text for block in message.content] == ["Hi"]
    assert (message.stop_reason, message.stop_sequence) == (word, sequence)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, tokens)
    chunks = dialect.chunks(**SAME, index=0, prompt_tokens=5)
    events = chunks.finish(Ending(reason, stop_reason=stop_reason, completion_tokens=tokens))
    delta = orjson.loads(events.split(b"data: ")[2].split(b"\n")[0])
    assert delta["delta"] == {"stop_reason": word, "stop_sequence": sequence}
    assert delta["usage"] == orjson.loads(whole)["usage"]


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InvalidRequest("no"), "invalid_request_error", None),
        (ModelNotFound("no"), "not_found_error", "model_not_found"),
        (RequestError("no", code="x"), "invalid_request_error", "x"),
        (Overloaded("no", rejection="lane_full"), "rate_limit_error", "overloaded"),
        (EngineStarting("no"), "overloaded_error", "engine_starting"),
        (RequestTimeout("no"), "timeout_error", "request_timeout"),
        (EngineDead("no"), "api_error", "engine_dead"),
        (GenerationFailed("no"), "api_error", "generation_failed"),
        (FastserveError("no"), "api_error", None),
    ],
)
def test_errors_are_in_the_apis_words(error: FastserveError, kind: str, code: str | None) -> None:
    told: dict[str, object] = {"type": kind, "message": "no"}
    if code is not None:
        told["details"] = {"error_code": code}
    assert orjson.loads(error_body(error)) == {"type": "error", "error": told}
    event = MessagesDialect(max_tokens=1).error_event(error)
    assert event == b"event: error\ndata: %b\n\n" % error_body(error)
