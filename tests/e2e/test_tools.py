"""Tools and thoughts over real sockets, as openai's and anthropic's own clients read them.

The simulated engine says what a model would, and the clients put the streams together.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

from tests.e2e.harness import DEADLINE_S, Server, failing
from tests.e2e.scripted import assert_settled, card, ids_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% for call in message.tool_calls or [] %}{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}
{% endfor %}{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""

USER: Any = [{"role": "user", "content": "What is the weather in Paris and Oslo?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TOOLS: Any = [{"type": "function", "function": WEATHER}]
PARIS, OSLO = {"city": "Paris 🌧"}, {"city": "Oslo"}

STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


def called(arguments: dict[str, str]) -> str:
    call = json.dumps({"name": "get_weather", "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


ANSWER = f"<think>\nTwo cities 🤔.\n</think>\n\nI ask.\n{called(PARIS)}\n{called(OSLO)}"
NUM_TOKENS = len(ids_of(ANSWER))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    with Server(
        "--frontends", "2", "--engine", "sim", "--sim-step-ms", "1",
        "--lane-heartbeat-interval-s", "0.05", "--chat-template", str(template),
        "--tool-parser", "hermes", "--reasoning-parser", "qwen3",
    ) as server:  # fmt: skip
        yield server
        assert_settled(server)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE_S
    ) as client:
        yield client


def script(text: str) -> dict[str, Any]:
    return {"sim": {"token_ids": ids_of(text)}}


def ask(client: openai.OpenAI, text: str, *, stream: bool, **options: Any) -> Any:
    """The choice of a chat whose answer is `text`; the client puts a stream together."""
    asked: Any = {
        "model": card().name, "messages": USER, "tools": TOOLS, "extra_body": script(text),
    } | options  # fmt: skip
    if not stream:
        return client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0]


# ---- openai's chats


@STREAM_OR_WHOLE
def test_a_chat_has_thoughts_content_and_calls(client: openai.OpenAI, *, stream: bool) -> None:
    choice = ask(client, ANSWER, stream=stream)
    message = choice.message
    assert message.reasoning_content == "Two cities 🤔."
    assert message.content == "I ask."
    assert choice.finish_reason == "tool_calls"
    calls = message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [PARIS, OSLO]
    assert [(call.type, call.function.name) for call in calls] == [("function", "get_weather")] * 2
    assert len({call.id for call in calls}) == 2


@STREAM_OR_WHOLE
def test_a_chat_goes_on_with_what_the_tool_returned(client: openai.OpenAI, *, stream: bool) -> None:
    message = ask(client, called(PARIS), stream=stream).message
    assert message.content in (None, "")
    result = {
        "role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It rains.",
    }  # fmt: skip
    turn = message.model_dump(exclude_none=True)
    choice = ask(client, "It rains.", stream=stream, messages=[*USER, turn, result])
    assert (choice.message.content, choice.finish_reason) == ("It rains.", "stop")
    assert not choice.message.tool_calls


def test_the_arguments_come_in_pieces(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=card().name, messages=USER, tools=TOOLS, extra_body=script(ANSWER)
    ) as events:
        kinds = [event.type for event in events]
    assert kinds.count("tool_calls.function.arguments.delta") > 10
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("content.delta") >= 2


@STREAM_OR_WHOLE
def test_the_usage_counts_every_token(client: openai.OpenAI, *, stream: bool) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer: Any = client.chat.completions.create(
        model=card().name, messages=USER, tools=TOOLS, extra_body=script(ANSWER), **options
    )
    usage = list(answer)[-1].usage if stream else answer.usage
    assert usage.completion_tokens == NUM_TOKENS


# ---- openai's responses


@STREAM_OR_WHOLE
def test_a_response_has_an_item_for_each_part(client: openai.OpenAI, *, stream: bool) -> None:
    tools: Any = [{"type": "function"} | WEATHER]
    asked: Any = {"model": card().name, "tools": tools}
    first: Any = asked | {"input": USER, "extra_body": script(ANSWER)}
    if stream:
        with client.responses.stream(**first) as events:
            for _ in events:
                pass
            response: Any = events.get_final_response()
    else:
        response = client.responses.create(**first)
    thoughts, text, *calls = response.output
    assert isinstance(thoughts, ResponseReasoningItem)
    assert thoughts.content is not None
    assert thoughts.content[0].text == "Two cities 🤔."
    assert isinstance(text, ResponseOutputMessage)
    assert response.output_text == "I ask."
    assert all(isinstance(call, ResponseFunctionToolCall) for call in calls)
    assert [json.loads(call.arguments) for call in calls] == [PARIS, OSLO]
    # What it says again is the whole conversation, calls and all.
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        for call in calls
    ]
    second: Any = client.responses.create(
        previous_response_id=response.id, input=results, extra_body=script("It rains."), **asked
    )
    assert second.output_text == "It rains."
    given = [item.model_dump(exclude_none=True) for item in response.output]
    third: Any = client.responses.create(
        input=[*USER, *given, *results], extra_body=script("It rains."), **asked
    )
    assert third.usage.input_tokens == second.usage.input_tokens


# ---- anthropic's messages


@STREAM_OR_WHOLE
def test_a_message_has_a_block_for_each_part(claude: anthropic.Anthropic, *, stream: bool) -> None:
    tool: Any = {
        "name": "get_weather",
        "description": "Weather.",
        "input_schema": WEATHER["parameters"],
    }
    asked: Any = {"model": card().name, "max_tokens": 500, "tools": [tool]}
    first = asked | {"messages": USER, "extra_body": script(ANSWER)}
    if stream:
        with claude.messages.stream(**first) as events:
            message: Any = events.get_final_message()
    else:
        message = claude.messages.create(**first)
    thoughts, text, *calls = message.content
    assert (thoughts.type, thoughts.thinking) == ("thinking", "Two cities 🤔.")
    assert (text.type, text.text) == ("text", "I ask.")
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "get_weather", PARIS), ("tool_use", "get_weather", OSLO),
    ]  # fmt: skip
    assert message.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."} for call in calls
    ]
    turns = [*USER, {"role": "assistant", "content": message.content},
             {"role": "user", "content": results}]  # fmt: skip
    second = claude.messages.create(messages=turns, extra_body=script("It rains."), **asked)
    assert second.content[0].text == "It rains."
    assert second.stop_reason == "end_turn"
    assert claude.messages.count_tokens(
        model=card().name, messages=turns, tools=[tool]
    ).input_tokens == second.usage.input_tokens  # fmt: skip


# ---- where a server was not told how its model writes calls


def test_calls_that_may_or_may_not_be_made_are_refused(sim: Server) -> None:
    with sim.client() as client, pytest.raises(openai.BadRequestError) as caught:
        ask(client, ANSWER, stream=False)
    assert caught.value.param == "tools"
    assert "--tool-parser" in caught.value.message


@pytest.mark.parametrize(
    ("flag", "named"),
    [("--tool-parser", "hermes, llama3_json"), ("--reasoning-parser", "deepseek_r1, qwen3")],
)
def test_a_parser_that_nobody_knows_ends_the_start(flag: str, named: str) -> None:
    with failing("--engine", "sim", flag, "telepathy") as server:
        assert server.wait_exit() == 2
        assert named in server.log


def test_a_template_that_is_not_there_ends_the_start() -> None:
    with failing("--engine", "sim", "--chat-template", "/nowhere/chat.jinja") as server:
        assert server.wait_exit() == 2
        assert "server.chat_template" in server.log


def test_a_template_that_is_faulty_ends_the_start(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for %}")
    with failing("--engine", "sim", "--chat-template", str(template)) as server:
        assert server.wait_exit() == 2
        assert "chat template is faulty" in server.log
