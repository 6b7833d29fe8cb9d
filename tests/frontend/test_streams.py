"""The path of a token: what leaves, when, and in how many pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from fastserve.errors import ShuttingDown
from fastserve.generation import Finish, FinishReason, TokenLogprob
from fastserve.lane.messages import Outputs
from tests.frontend.stage import END, FAILED, LENGTH, STOP

if TYPE_CHECKING:
    from tests.frontend.stage import Asked, Stage

TEXT = "Fire 🔥, naïve: ab, abc"
STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
DIALECT = pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])


def ask(stage: Stage, *, chat: bool = False, **fields: Any) -> Asked:
    return stage.chat(**fields) if chat else stage.ask(**fields)


def said(asked: Asked, *, stream: bool, chat: bool = False) -> tuple[str, str, Any]:
    """Text, finish reason and stop reason of an answer with one choice."""
    if stream:
        last = asked.chunks()[-1]["choices"][0]
        assert asked.blocks()[-1] == "data: [DONE]"
        return asked.said(), last["finish_reason"], last["stop_reason"]
    [choice] = asked.json()["choices"]
    text = choice["message"]["content"] if chat else choice["text"]
    return text, choice["finish_reason"], choice["stop_reason"]


# ---- slicing


@DIALECT
@STREAM_OR_WHOLE
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, (TEXT, "length", None)),
        (["🔥, n"], ("Fire ", "stop", "🔥, n")),
        (["abd", "abc"], (TEXT[:-3], "stop", "abc")),
        (["abcd", "bcx"], (TEXT, "length", None)),
    ],
)
def test_a_text_does_not_depend_on_how_its_tokens_came(
    stage: Stage, size: int, stop: Any, expected: Any, *, stream: bool, chat: bool
) -> None:
    asked = ask(stage, chat=chat, stream=stream, max_tokens=40, stop=stop)
    tokens = TEXT.encode()
    for start in range(0, len(tokens), size):
        if not asked.ended:
            last = start + size >= len(tokens)
            stage.say(tokens[start : start + size], LENGTH if last else None)
    assert asked.ended
    assert said(asked, stream=stream, chat=chat) == expected
    assert stage.frontend.num_in_flight == 0


def test_a_token_leaves_in_one_write(stage: Stage) -> None:
    asked = stage.ask(stream=True)
    stage.say(b"a")
    writes = asked.num_writes
    stage.say(b"b")
    assert asked.num_writes == writes + 1
    assert asked.said() == "ab"


def test_half_a_character_does_not_leave(stage: Stage) -> None:
    asked = stage.ask(stream=True)
    stage.say(b"a")
    for byte in "🔥".encode()[:-1]:
        writes = asked.num_writes
        stage.say([byte])
        assert asked.num_writes == writes
    stage.say("🔥".encode()[-1:])
    assert asked.said() == "a🔥"


# ---- ends


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("tokens", "finish", "fields", "expected"),
    [
        pytest.param(b"ab", LENGTH, {}, ("ab", "length", None), id="max_tokens"),
        pytest.param([97, END], STOP, {}, ("a", "stop", None), id="the end token"),
        pytest.param(
            [97, END], LENGTH, {"skip_special_tokens": False},
            ("a<|end|>", "length", None), id="an end token that ended nothing",
        ),
        pytest.param(
            b"ab", Finish(reason=FinishReason.STOP, stop_token_id=98), {"stop_token_ids": [98]},
            ("a", "stop", 98), id="a stop token",
        ),
        pytest.param(
            b"ab", Finish(reason=FinishReason.STOP, stop_token_id=98),
            {"stop_token_ids": [98], "include_stop_str_in_output": True},
            ("ab", "stop", 98), id="a stop token that is included",
        ),
        pytest.param(b"ab", LENGTH, {"stop": "b"}, ("a", "stop", "b"), id="stop string and length"),
        pytest.param(
            [97, 98, END], STOP, {"stop": "b"}, ("a", "stop", "b"), id="stop string and end token"
        ),
        pytest.param(
            b"a\xf0\x9f", LENGTH, {"stop": "\N{REPLACEMENT CHARACTER}"},
            ("a", "stop", "\N{REPLACEMENT CHARACTER}"), id="a stop string that the end completes",
        ),
        pytest.param(b"ab", LENGTH, {"stop": "bc"}, ("ab", "length", None), id="half a stop"),
        pytest.param(b"", STOP, {}, ("", "stop", None), id="nothing"),
    ],
)  # fmt: skip
def test_how_a_text_ends(
    stage: Stage, tokens: Any, finish: Finish, fields: Any, expected: Any, *, stream: bool
) -> None:
    asked = stage.ask(stream=stream, **fields)
    stage.say(tokens, finish)
    assert said(asked, stream=stream) == expected
    assert stage.aborted == []


@STREAM_OR_WHOLE
def test_a_stop_string_ends_the_work(stage: Stage, *, stream: bool) -> None:
    asked = stage.ask(stream=stream, stop="b")
    stage.say(b"a")
    stage.say(b"bcd")
    assert said(asked, stream=stream) == ("a", "stop", "b")
    assert stage.aborted == [stage.submits[0].request_id]
    sent = asked.sent
    stage.say(b"e", LENGTH)  # on its way while the abort was
    assert asked.sent == sent


@STREAM_OR_WHOLE
def test_an_answer_ends_with_its_last_choice(stage: Stage, *, stream: bool) -> None:
    asked = stage.ask(
        stream=stream, n=2, stream_options={"include_usage": True} if stream else None
    )
    stage.say(b"abc", STOP, request=1)
    assert not asked.ended
    stage.say(b"xy", LENGTH, request=0)
    assert asked.ended
    if stream:
        assert (asked.said(0), asked.said(1)) == ("xy", "abc")
        usage = asked.chunks()[-1]["usage"]
    else:
        assert [choice["text"] for choice in asked.json()["choices"]] == ["xy", "abc"]
        usage = asked.json()["usage"]
    counts = {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}
    assert usage == counts | {"prompt_tokens_details": {"cached_tokens": 0}}


@STREAM_OR_WHOLE
def test_the_usage_tells_what_was_cached_of_each_prompt_and_not_of_its_twins(
    stage: Stage, *, stream: bool
) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    asked = stage.ask(prompt=["abcd", "xyz"], n=2, stream=stream, **options)
    for request, cached_tokens in enumerate((2, 3, 1, 2)):
        finish = Finish(reason=FinishReason.LENGTH, cached_tokens=cached_tokens)
        stage.say(b"!", finish, request=request)
    usage = (asked.chunks()[-1] if stream else asked.json())["usage"]
    assert usage["prompt_tokens"] == 7
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2 + 1}


@STREAM_OR_WHOLE
def test_who_stopped_before_the_engine_could_tell_says_nothing_of_the_cache(
    stage: Stage, *, stream: bool
) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    asked = stage.ask(stop="b", stream=stream, **options)
    stage.say(b"ab")
    usage = (asked.chunks()[-1] if stream else asked.json())["usage"]
    assert "prompt_tokens_details" not in usage


@STREAM_OR_WHOLE
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_the_other_dialects_tell_it_in_their_words(
    stage: Stage, path: str, *, stream: bool
) -> None:
    asked = stage.ask(path, stream=stream, **OTHER_DIALECTS[path])
    cached_tokens = 2
    stage.say(b"yes", Finish(reason=FinishReason.STOP, cached_tokens=cached_tokens))
    usage = usage_of(asked, path, stream=stream)
    if path == "/v1/messages":
        assert usage["cache_read_input_tokens"] == cached_tokens
        assert usage["input_tokens"] + cached_tokens == len(stage.submits[0].prompt_token_ids)
    else:
        assert usage["input_tokens"] == len(stage.submits[0].prompt_token_ids)
        assert usage["input_tokens_details"]["cached_tokens"] == cached_tokens


OTHER_DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "bytes",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
    },
    "/v1/responses": {"input": "hi"},
}


def usage_of(asked: Asked, path: str, *, stream: bool) -> dict[str, Any]:
    """The usage of a whole answer, or of the event that tells it last."""
    if not stream:
        usage = asked.json()["usage"]
    else:
        events = [
            orjson.loads(line.removeprefix("data: "))
            for block in asked.blocks()
            for line in block.splitlines()
            if line.startswith("data: {")
        ]
        if path == "/v1/messages":
            [usage] = [event["usage"] for event in events if event["type"] == "message_delta"]
        else:
            usage = events[-1]["response"]["usage"]
    assert isinstance(usage, dict)
    return usage


# ---- failures


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("finish", "status", "code"),
    [
        (FAILED, 500, "generation_failed"),
        (Finish(reason=FinishReason.ABORT), 500, "generation_failed"),
        (Finish(reason=FinishReason.ERROR, error="no", invalid=True), 400, None),
    ],
)
def test_a_failure_before_anything_was_sent_is_a_status(
    stage: Stage, finish: Finish, status: int, code: str | None, *, stream: bool
) -> None:
    asked = stage.ask(stream=stream, n=2)
    stage.say(b"", finish, request=0)
    assert (asked.status, asked.json()["error"]["code"]) == (status, code)
    assert asked.header("content-type") == "application/json"
    assert stage.submits[1].request_id in stage.aborted
    assert stage.frontend.num_in_flight == 0


def test_a_failure_after_that_is_an_event(stage: Stage) -> None:
    asked = stage.ask(stream=True, n=2)
    stage.say(b"a", request=0)
    stage.say(b"", FAILED, request=1)
    assert asked.said() == "a"
    assert asked.chunks()[-1]["error"]["message"] == "out of luck"
    assert "data: [DONE]" not in asked.blocks()
    assert asked.sent.endswith(b"0\r\n\r\n")
    assert stage.submits[0].request_id in stage.aborted


def test_a_token_that_is_none_fails_its_request_alone(stage: Stage) -> None:
    broken, other = stage.ask(stream=True), stage.ask(stream=True)
    ids = [submit.request_id for submit in stage.submits]
    stage.frontend.on_outputs(Outputs(request_ids=list(ids), token_ids=[10**6, 98]))
    assert broken.chunks()[-1]["error"]["type"] == "server_error"
    assert stage.aborted == ids[:1]
    assert other.said() == "b"


def test_outputs_of_nobody_are_passed_over(stage: Stage) -> None:
    asked = stage.ask(stream=True)
    known = stage.submits[0].request_id
    stage.frontend.on_outputs(
        Outputs(
            request_ids=[known + 1, known, known + 2],
            token_ids=[*b"xx", *b"ab", *b"y"],
            counts=[2, 2, 1],
            finishes={0: FAILED},
        )
    )
    assert asked.said() == "ab"


@STREAM_OR_WHOLE
def test_who_goes_away_is_forgotten(stage: Stage, *, stream: bool) -> None:
    asked = stage.ask(stream=stream, n=3)
    stage.say(b"a", LENGTH, request=1)
    asked.exchange.disconnect()
    ids = [submit.request_id for submit in stage.submits]
    assert stage.aborted == [ids[0], ids[2]]
    assert stage.frontend.num_in_flight == 0
    sent = asked.sent
    stage.say(b"b", request=0)
    assert asked.sent == sent


def test_whoever_is_left_hears_an_error(stage: Stage) -> None:
    begun, waiting, whole = stage.ask(stream=True), stage.ask(stream=True), stage.ask()
    stage.say(b"a", request=0)
    stage.frontend.fail_all(ShuttingDown("closing time"))
    assert begun.chunks()[-1]["error"]["code"] == "shutting_down"
    for asked in (waiting, whole):
        assert (asked.status, asked.header("retry-after")) == (503, "5")
    assert sorted(stage.aborted) == [submit.request_id for submit in stage.submits]


# ---- clients that are not ready


def test_what_a_client_is_not_ready_for_is_one_chunk_later(stage: Stage) -> None:
    asked = stage.ask(stream=True)
    stage.say(b"a")
    asked.pause()
    writes = asked.num_writes
    for _ in range(100):
        stage.say(b"bc")
    assert asked.num_writes == writes
    asked.resume()
    assert asked.num_writes == writes + 1
    stage.say(b"d", STOP)
    assert asked.said() == "a" + "bc" * 100 + "d"


def test_what_was_held_and_the_next_token_are_one_chunk(stage: Stage) -> None:
    asked = stage.ask(stream=True)
    stage.say(b"a")
    asked.pause()
    stage.say(b"b")
    asked.exchange.writable = True  # and on_writable comes later, or not at all
    stage.say(b"c")
    assert [chunk["choices"][0]["text"] for chunk in asked.chunks()] == ["a", "bc"]


def test_an_end_does_not_wait(stage: Stage) -> None:
    asked = stage.ask(stream=True, n=2)
    stage.say(b"a", request=0)
    asked.pause()
    stage.say(b"b", request=0)
    stage.say(b"x", LENGTH, request=1)
    stage.say(b"c", LENGTH, request=0)
    assert asked.ended
    assert (asked.said(0), asked.said(1)) == ("abc", "x")
    asked.resume()  # nothing is left to flush, and nobody to flush it to


def test_all_choices_are_flushed_in_one_write(stage: Stage) -> None:
    asked = stage.ask(stream=True, n=2)
    stage.say(b"a", request=0)
    asked.pause()
    stage.say(b"b", request=0)
    stage.say(b"x", request=1)
    writes = asked.num_writes
    asked.resume()
    assert asked.num_writes == writes + 1
    assert (asked.said(0), asked.said(1)) == ("ab", "x")


def test_details_wait_together_with_their_text(stage: Stage) -> None:
    asked = stage.ask(
        stream=True, logprobs=0, return_token_ids=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    stage.say(b"a", logprobs=[TokenLogprob(logprob=-1.0)])
    asked.pause()
    stage.say(b"b", logprobs=[TokenLogprob(logprob=-2.0)])
    stage.say(b"\xc3", logprobs=[TokenLogprob(logprob=-3.0)])
    asked.resume()
    stage.say(b"\xa9", LENGTH, logprobs=[TokenLogprob(logprob=-4.0)])
    prompt, first, held, rest, end, usage = asked.chunks()
    assert prompt["choices"][0]["prompt_token_ids"] == [*b"p"]
    texts = [chunk["choices"][0]["text"] for chunk in (first, held, rest)]
    assert texts == ["a", "b", "é"]
    assert [chunk["choices"][0]["token_ids"] for chunk in (first, held, rest)] == [
        [97], [98, 0xC3], [0xA9],
    ]  # fmt: skip
    assert held["choices"][0]["logprobs"]["token_logprobs"] == [-2.0, -3.0]
    assert held["choices"][0]["logprobs"]["text_offset"] == [1, 2]
    counts = [chunk["usage"]["completion_tokens"] for chunk in (first, held, rest, end, usage)]
    assert counts == [1, 3, 4, 4, 4]


# ---- silence


def test_a_silent_stream_gets_comments(stage: Stage) -> None:
    asked = stage.ask(stream=True)
    stage.frontend.ping_all()
    assert asked.sent == b"", "what fails at once has its status"
    stage.frontend.ping_all()
    stage.frontend.ping_all()
    assert asked.blocks() == [": ping"] * 2
    stage.say(b"a", STOP)
    assert asked.said() == "a"
    assert asked.sent.count(b"HTTP/1.1") == 1


def test_a_comment_takes_the_place_of_a_status(stage: Stage) -> None:
    asked = stage.ask(stream=True)
    for _ in range(2):
        stage.frontend.ping_all()
    stage.say(b"", FAILED)
    assert asked.status == 200
    assert asked.chunks()[0]["error"]["code"] == "generation_failed"


@pytest.mark.parametrize(
    "why", ["it speaks", "it is whole", "nobody reads", "it has ended", "nobody is there"]
)
def test_no_comment_where_none_is_needed(stage: Stage, why: str) -> None:
    asked = stage.ask(stream=why != "it is whole")
    if why == "it speaks":
        stage.say(b"a")
    elif why == "nobody reads":
        asked.pause()
    elif why == "it has ended":
        stage.say(b"a", STOP)
    elif why == "nobody is there":
        asked.exchange.disconnect()
    sent = asked.sent
    stage.frontend.ping_all()
    if why != "it speaks":  # that was in the last interval
        stage.frontend.ping_all()
    assert asked.sent == sent


# ---- echo


@pytest.mark.parametrize("prompt", ["hey", ["hey", "hey"]])
@STREAM_OR_WHOLE
def test_an_echo_alone_asks_the_engine_for_nothing(
    stage: Stage, prompt: Any, *, stream: bool
) -> None:
    asked = stage.ask(prompt=prompt, echo=True, max_tokens=0, stream=stream)
    assert stage.inbox == []
    assert asked.ended
    choices = 2 if isinstance(prompt, list) else 1
    for index in range(choices):
        text = asked.said(index) if stream else asked.json()["choices"][index]["text"]
        assert text == "hey"
    assert stage.frontend.num_in_flight == 0


@STREAM_OR_WHOLE
def test_an_echo_comes_before_its_answer(stage: Stage, *, stream: bool) -> None:
    asked = stage.ask(prompt="hey", echo=True, stream=stream)
    stage.say(b"!", LENGTH)
    assert said(asked, stream=stream) == ("hey!", "length", None)


# ---- another dialect


def test_a_message_that_began_is_kept_open_by_its_own_pings(stage: Stage) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = stage.ask("/v1/messages", messages=messages, max_tokens=9, stream=True)
    for _ in range(2):
        stage.frontend.ping_all()
    assert asked.blocks() == [": ping"]
    stage.say(b"a")
    for _ in range(2):
        stage.frontend.ping_all()
    stage.say(b"b", STOP)
    kinds = [block.split("\n")[0] for block in asked.blocks()]
    assert kinds == [
        ": ping", "event: message_start", "event: content_block_start",
        "event: content_block_delta", "event: ping", "event: content_block_delta",
        "event: content_block_stop", "event: message_delta", "event: message_stop",
    ]  # fmt: skip


def test_a_message_that_fails_ends_with_an_error_of_its_dialect(stage: Stage) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = stage.ask("/v1/messages", messages=messages, max_tokens=9, stream=True)
    stage.say(b"a")
    stage.frontend.on_engine_gone("lightning")
    assert asked.ended
    assert asked.blocks()[-1] == (
        'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"lightning",'
        '"details":{"error_code":"engine_dead"}}}'
    )


def test_a_slow_reader_of_a_message_gets_what_was_held_as_one_delta(stage: Stage) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = stage.ask("/v1/messages", messages=messages, max_tokens=9, stream=True)
    stage.say(b"a")
    asked.pause()
    stage.say(b"b")
    stage.say(b"c")
    asked.resume()
    stage.say(b"d", STOP)
    deltas = [block for block in asked.blocks() if "text_delta" in block]
    assert [orjson.loads(each.partition("data: ")[2])["delta"]["text"] for each in deltas] == [
        "a", "bc", "d",
    ]  # fmt: skip
