"""Answers in parts, in each dialect: a stream, put together, is the whole answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fastserve.generation import GrammarKind, TokenLogprob
from tests.frontend.stage import END, LENGTH, STOP, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.generation import ModelCard
    from tests.frontend.stage import Asked

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEMPLATE = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[-1].content }}"
USER = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "g"}}

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é🔥"}}\n</tool_call>'
THOUGHT = "<think>\nHm 🔥.\n</think>\n\n"
STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@pytest.fixture(scope="module")
def tooled(card: ModelCard) -> Stage:
    """A model that writes calls as Hermes does, and thoughts as Qwen does."""
    return staged(card)


def staged(card: ModelCard, **arguments: Any) -> Stage:
    kinds = arguments.pop("grammar_kinds", tuple(GrammarKind))
    card = replace(card, max_seq_len=4096, grammar_kinds=kinds)
    told = {"tool_parser": "hermes", "reasoning_parser": "qwen3", "chat_template": TEMPLATE}
    return Stage(card, **told | arguments)


def have_said(stage: Stage, text: bytes, *, size: int = 1000, cut: bool = False) -> None:
    """Have the last request answered with these bytes, which are tokens, in such pieces."""
    for start in range(0, len(text), size):
        if stage.frontend.num_in_flight:
            stage.say(text[start : start + size])
    if stage.frontend.num_in_flight:
        stage.say([] if cut else [END], LENGTH if cut else STOP)


def chat(stage: Stage, text: str, *, size: int = 1000, cut: bool = False, **fields: Any) -> Any:
    """The message of a chat's answer and its finish reason; a stream is put together."""
    asked = stage.chat(**{"tools": [TOOL, OTHER]} | fields)
    have_said(stage, text.encode(), size=size, cut=cut)
    if not fields.get("stream"):
        ChatCompletion.model_validate(asked.json(), strict=True)
        [choice] = asked.json()["choices"]
        return reduced(choice["message"]), choice["finish_reason"]
    return streamed_chat(asked)


def streamed_chat(asked: Asked) -> Any:
    message: dict[str, Any] = {"content": ""}
    finish = None
    for chunk in asked.chunks():
        ChatCompletionChunk.model_validate_json(orjson.dumps(chunk), strict=True)
        for choice in chunk["choices"]:
            assert finish is None
            finish = choice["finish_reason"]
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append(call)
                else:
                    assert call.keys() == {"index", "function"}
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return reduced(message), finish


def reduced(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what is different each time; calls as (name, arguments)."""
    told = {name: message[name] for name in ("content", "reasoning_content") if message.get(name)}
    calls = message.get("tool_calls", [])
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    if calls:
        told["calls"] = [
            (call["function"]["name"], call["function"]["arguments"]) for call in calls
        ]
    return told


# ---- chats


@STREAM_OR_WHOLE
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "cut", "message", "finish"),
    [
        ("Hi.", False, {"content": "Hi."}, "stop"),
        (CALL, False, {"calls": [("f", '{"a": "é🔥"}')]}, "tool_calls"),
        (
            f"{THOUGHT}Well.\n{CALL}\n{CALL}",
            False,
            {
                "content": "Well.",
                "reasoning_content": "Hm 🔥.",
                "calls": [("f", '{"a": "é🔥"}')] * 2,
            },
            "tool_calls",
        ),
        (CALL[:-14], True, {"calls": [("f", '{"a": "é🔥"}')]}, "length"),
        (THOUGHT[:10], True, {"reasoning_content": "Hm"}, "length"),
        (CALL[:20], True, {"content": CALL[:20]}, "length"),
        ("<tool_call>no", False, {"content": "<tool_call>no"}, "stop"),
    ],
)
def test_a_chat_is_told_in_its_parts(
    tooled: Stage, text: str, message: Any, finish: str, size: int, *, cut: bool, stream: bool
) -> None:
    assert chat(tooled, text, size=size, cut=cut, stream=stream) == (message, finish)


def test_a_message_of_calls_alone_has_no_content(tooled: Stage) -> None:
    asked = tooled.chat(tools=[TOOL])
    have_said(tooled, CALL.encode())
    assert asked.json()["choices"][0]["message"]["content"] is None


@STREAM_OR_WHOLE
def test_without_tools_what_looks_like_a_call_is_text(tooled: Stage, *, stream: bool) -> None:
    without: list[dict[str, Any]] = [{"tools": []}, {"tool_choice": "none"}]
    for fields in without:
        said = chat(tooled, f"{THOUGHT}{CALL}", stream=stream, **fields)
        assert said == ({"content": CALL, "reasoning_content": "Hm 🔥."}, "stop")


@STREAM_OR_WHOLE
def test_thoughts_are_left_out_or_left_in(tooled: Stage, *, stream: bool) -> None:
    text = f"{THOUGHT}Yes."
    assert chat(tooled, text, stream=stream, include_reasoning=False) == (
        {"content": "Yes."},
        "stop",
    )
    assert chat(tooled, text, stream=stream, separate_reasoning=False) == (
        {"content": text},
        "stop",
    )


@STREAM_OR_WHOLE
def test_only_one_call_is_told_if_they_may_not_be_parallel(tooled: Stage, *, stream: bool) -> None:
    text = f"Well.{CALL}{CALL}Done."
    said = chat(tooled, text, stream=stream, parallel_tool_calls=False)
    assert said == ({"content": "Well.", "calls": [("f", '{"a": "é🔥"}')]}, "tool_calls")


@STREAM_OR_WHOLE
def test_a_stop_string_ends_a_call_too(tooled: Stage, *, stream: bool) -> None:
    said = chat(tooled, CALL, stream=stream, stop=["🔥"], size=1)
    assert said == ({"calls": [("f", '{"a": "é')]}, "tool_calls")
    assert tooled.aborted


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("choice", "text", "calls", "finish"),
    [
        (
            "required",
            '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]',
            [("f", '{"a": 1}'), ("g", "{}")],
            "tool_calls",
        ),
        ({"type": "function", "function": {"name": "g"}}, '{"a": 1}', [("g", '{"a": 1}')], "stop"),
    ],
)
def test_calls_that_must_be_made_are_read_from_json(
    card: ModelCard, choice: Any, text: str, calls: Any, finish: str, *, stream: bool
) -> None:
    # Neither the template nor a parser has to know of tools, and nobody thinks aloud.
    stage = staged(card, tool_parser=None, chat_template="{{ messages[0].content }}")
    for size in (1, 1000):
        said = chat(stage, text, stream=stream, tool_choice=choice, size=size)
        assert said == ({"calls": calls}, finish)
    grammar = stage.submits[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA


def test_arguments_leave_as_they_come(tooled: Stage) -> None:
    asked = tooled.chat(tools=[TOOL], stream=True)
    tooled.say(b'<tool_call>{"name": "f", "arguments": {"a')
    num_chunks = len(asked.chunks())
    tooled.say(b'": "b')
    [chunk] = asked.chunks()[num_chunks:]
    [call] = chunk["choices"][0]["delta"]["tool_calls"]
    assert call == {"index": 0, "function": {"arguments": '": "b'}}
    have_said(tooled, b"")


def test_what_says_nothing_yet_writes_nothing(tooled: Stage) -> None:
    asked = tooled.chat(tools=[TOOL], stream=True)
    tooled.say(b"a")
    writes = asked.num_writes
    tooled.say(b"<tool_call>")
    assert asked.num_writes == writes
    have_said(tooled, b"")
    assert asked.said() == "a<tool_call>"


def test_a_slow_reader_gets_the_same_in_fewer_pieces(tooled: Stage) -> None:
    asked = tooled.chat(tools=[TOOL], stream=True)
    tooled.say(b"W")
    asked.pause()
    for byte in f"ell.\n{CALL}".encode():
        tooled.say([byte])
    num_chunks = len(asked.chunks())
    asked.resume()
    assert len(asked.chunks()) == num_chunks + 3  # text, the call, its arguments
    have_said(tooled, b"")
    assert streamed_chat(asked) == (
        {"content": "Well.", "calls": [("f", '{"a": "é🔥"}')]},
        "tool_calls",
    )


@STREAM_OR_WHOLE
def test_logprobs_and_ids_are_of_every_token(tooled: Stage, *, stream: bool) -> None:
    text = f"Well.{CALL}".encode()
    asked = tooled.chat(
        tools=[TOOL], stream=stream, logprobs=True, return_token_ids=True,
        **{"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if stream else {},
    )  # fmt: skip
    for byte in text:
        tooled.say([byte], logprobs=[TokenLogprob(logprob=-1.0)])
    tooled.say([END], STOP, logprobs=[TokenLogprob(logprob=-1.0)])
    answers = asked.chunks() if stream else [asked.json()]
    choices = [choice for answer in answers for choice in answer["choices"]]
    told = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    assert bytes(byte for entry in told for byte in entry["bytes"]) == text
    assert [each for choice in choices for each in choice.get("token_ids") or ()] == list(text)
    if stream:
        assert all(answer["usage"]["prompt_tokens"] > 0 for answer in answers)


def test_a_template_that_insists_on_the_length_of_ids_gets_them_so(card: ModelCard) -> None:
    stage = staged(card, tool_parser="mistral")
    asked = stage.chat(tools=[TOOL])
    have_said(stage, b'[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    [call] = asked.json()["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


def test_the_model_is_told_of_tools_and_of_no_more_than_may_be_called(tooled: Stage) -> None:
    for choice, prompt in (("auto", "fghi"), ("none", "hi")):
        tooled.chat(tools=[TOOL, OTHER], tool_choice=choice)
        assert bytes(tooled.submits[-1].prompt_token_ids).decode() == prompt
        have_said(tooled, b"")


def test_what_reads_as_control_in_a_tool_is_text(tooled: Stage) -> None:
    tooled.chat(tools=[TOOL], messages=[{"role": "user", "content": "<|end|>"}])
    assert END not in tooled.submits[-1].prompt_token_ids
    have_said(tooled, b"")


def test_a_parser_sees_tokens_that_are_hidden_from_others(card: ModelCard) -> None:
    vocabulary = orjson.loads(Path(card.tokenizer_path).read_bytes())
    control = vocabulary["added_tokens"][1]
    control["content"] = "[TOOL_CALLS]"
    path = Path(card.tokenizer_path).with_name("mistral.json")
    path.write_bytes(orjson.dumps(vocabulary))
    stage = staged(replace(card, tokenizer_path=str(path)), tool_parser="mistral")
    array = b'[{"name": "f", "arguments": {}}]'
    for fields in ({"tools": [TOOL]}, {}):
        asked = stage.chat(**fields)
        stage.say([control["id"], *array, END], STOP)
        message = asked.json()["choices"][0]["message"]
        assert ("tool_calls" in message) == bool(fields)
        assert message["content"] == (None if fields else array.decode())


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "fields", "param"),
    [
        ({"tool_parser": None}, {"tools": [TOOL]}, "tools"),
        ({"chat_template": "{{ messages[0].content }}"}, {"tools": [TOOL]}, "tools"),
        ({"reasoning_parser": None}, {"include_reasoning": False}, "include_reasoning"),
        ({"grammar_kinds": ()}, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_the_server_was_not_told_is_refused(
    card: ModelCard, arguments: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    asked = staged(card, **arguments).chat(**fields)
    assert (asked.status, asked.json()["error"]["param"]) == (400, param)


def test_logprobs_of_a_response_in_parts_are_refused(tooled: Stage) -> None:
    asked = tooled.ask("/v1/responses", input="hi", include=["message.output_text.logprobs"])
    assert (asked.status, asked.json()["error"]["param"]) == (400, "include")


# ---- the other dialects


def respond(stage: Stage, text: bytes, *, size: int, cut: bool, stream: bool) -> Any:
    """The output of a response, without ids, and its status."""
    tools = [{"type": "function"} | each["function"] for each in (TOOL, OTHER)]
    asked = stage.ask("/v1/responses", input="hi", tools=tools, stream=stream)
    have_said(stage, text, size=size, cut=cut)
    response = streamed_response(asked) if stream else asked.json()
    Response.model_validate_json(orjson.dumps(response))
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids)
    without = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    return without, response["status"]


def streamed_response(asked: Asked) -> Any:
    """The response that a stream ends with, whose events must add up to it."""
    items: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    last: Any = None
    for number, block in enumerate(asked.blocks()):
        name, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        EVENT.validate_json(orjson.dumps(event))
        assert (name, number) == (f"event: {event['type']}", event["sequence_number"])
        index = event.get("output_index")
        match event["type"].rsplit(".", 1):
            case [_, "added"] if "item" in event:
                assert index == len(items)
                items.append(event["item"])
            case [_, "delta"]:
                assert event["item_id"] == items[index]["id"]
                texts[index] = texts.get(index, "") + event["delta"]
            case [_, "done"] if "item" in event:
                items[index] = event["item"]
            case ["response.function_call_arguments", "done"]:
                assert event["arguments"] == texts.get(index, "")
            case [("response.output_text" | "response.reasoning_text"), "done"]:
                assert event["text"] == texts.get(index, "")
        last = event
    assert last["response"]["output"] == items
    return last["response"]


def message_of(stage: Stage, text: bytes, *, size: int, cut: bool, stream: bool) -> Any:
    """The blocks of a message, without ids, and its stop reason."""
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]
    asked = stage.ask(
        "/v1/messages", messages=USER, tools=tools, max_tokens=3000, stream=stream
    )  # fmt: skip
    have_said(stage, text, size=size, cut=cut)
    message = streamed_message(asked) if stream else asked.json()
    Message.model_validate_json(orjson.dumps(message))
    for block in message["content"]:
        block.pop("id", None)
    return message["content"], message["stop_reason"]


def streamed_message(asked: Asked) -> Any:
    message: Any = {}
    open_block: dict[str, Any] | None = None
    pieces = last_kind = ""
    for block in asked.blocks():
        event = orjson.loads(block.split("data: ", 1)[1])
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert open_block is None
                assert event["index"] == len(message["content"])
                open_block, pieces, last_kind = event["content_block"], "", ""
                message["content"].append(open_block)
            case "content_block_delta":
                last_kind = event["delta"].pop("type")
                [piece] = event["delta"].values()
                pieces += piece
            case "content_block_stop":
                assert open_block is not None
                kind = open_block["type"]
                assert (last_kind == "signature_delta") == (kind == "thinking")
                if kind == "tool_use":
                    open_block["input"] = as_input(pieces)
                else:
                    open_block[kind] = pieces
                open_block = None
            case "message_delta":
                message |= event["delta"]
    assert open_block is None
    return message


def as_input(arguments: str) -> Any:
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def test_a_response_is_told_in_its_parts(tooled: Stage) -> None:
    text = f"{THOUGHT}Well.{CALL}".encode()
    output, status = respond(tooled, text, size=4, cut=False, stream=True)
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm 🔥."}]
    assert output[1]["content"][0]["text"] == "Well."
    assert (output[2]["name"], output[2]["arguments"]) == ("f", '{"a": "é🔥"}')
    assert status == "completed"


def test_a_message_is_told_in_its_parts(tooled: Stage) -> None:
    text = f"{THOUGHT}Well.{CALL}".encode()
    assert message_of(tooled, text, size=4, cut=False, stream=True) == (
        [
            {"type": "thinking", "thinking": "Hm 🔥.", "signature": ""},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "name": "f", "input": {"a": "é🔥"}},
        ],
        "tool_use",
    )


PIECES: Sequence[str] = [
    "<think>", "</think>", "\n", " ", "Well.", "é🔥", "<tool_call>", "</tool_call>", CALL, THOUGHT,
    '{"name": "g", "arguments": ', '{"name": "f"}', "{}", '{"a": ["\\"}', "}", "<", "<tool_",
]  # fmt: skip


@given(
    text=st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    size=st.integers(1, 12),
    cut=st.booleans(),
)
@settings(max_examples=60)
def test_a_stream_is_the_whole(tooled: Stage, text: str, size: int, *, cut: bool) -> None:
    raw = text.encode()
    assert chat(tooled, text, size=size, cut=cut, stream=True) == chat(tooled, text, cut=cut)
    for ask in (respond, message_of):
        streamed = ask(tooled, raw, size=size, cut=cut, stream=True)
        assert streamed == ask(tooled, raw, size=1000, cut=cut, stream=False)


@given(
    text=st.lists(st.sampled_from([*PIECES, "STOP", "ST"]), max_size=8).map("".join),
    size=st.integers(1, 12),
)
@settings(max_examples=40)
def test_a_stream_with_a_stop_string_is_the_whole(tooled: Stage, text: str, size: int) -> None:
    streamed = chat(tooled, text, size=size, stream=True, stop=["STOP"])
    assert streamed == chat(tooled, text, stop=["STOP"], size=1)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_thoughts_are_counted_in_the_usage(tooled: Stage, size: int, *, stream: bool) -> None:
    """Every byte is a token here."""
    text = f"{THOUGHT}Well.".encode()
    number = len(THOUGHT[: THOUGHT.index("</think>")].encode()) + len("</think>")
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    asked = tooled.chat(**options)
    have_said(tooled, text, size=size)
    usage = (asked.chunks()[-1] if stream else asked.json())["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": number}
    assert usage["completion_tokens"] == len(text) + 1
    response = tooled.ask("/v1/responses", input="hi", stream=stream)
    have_said(tooled, text, size=size)
    answer = streamed_response(response) if stream else response.json()
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": number}


def test_where_nobody_looks_for_thoughts_none_are_told(card: ModelCard) -> None:
    stage = Stage(card)
    asked = stage.chat()
    have_said(stage, f"{THOUGHT}Well.".encode())
    assert "completion_tokens_details" not in asked.json()["usage"]
