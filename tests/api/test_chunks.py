"""The events of a stream, byte by byte and as openai's client reads them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from fastserve.api.chunks import DONE, ChatChunks, CompletionChunks
from fastserve.api.logprobs import TokenText
from fastserve.api.responses import Ending, Usage
from fastserve.generation import FinishReason

FLAME = "🔥".encode()

SAME: dict[str, Any] = {"created": 1700000000, "model": "m", "index": 0}


def chat_chunks(**options: Any) -> ChatChunks:
    return ChatChunks(**{"completion_id": "chatcmpl-7f"} | SAME | options)


def completion_chunks(**options: Any) -> CompletionChunks:
    return CompletionChunks(**{"completion_id": "cmpl-7f"} | SAME | options)


def data(event: bytes) -> Any:
    """The object of one event, which must be exactly one line of data and a blank one."""
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    return orjson.loads(event[6:])


def as_chat(event: bytes) -> ChatCompletionChunk:
    data(event)
    return ChatCompletionChunk.model_validate_json(event[6:], strict=True)


def as_completion(event: bytes) -> Completion:
    # As the client does it. It does not validate, for its type claims that the reason is never
    # null, which is not true of a stream.
    return Completion.construct(**data(event))


def test_a_chat_streams_like_this() -> None:
    chunks = chat_chunks(include_usage=True)
    usage = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)
    stream = (
        chunks.first()
        + chunks.text("Hel")
        + chunks.text('lo "you"\n')
        + chunks.finish(Ending(FinishReason.STOP))
        + chunks.usage(usage)
        + DONE
    )
    head = (
        'data: {"id":"chatcmpl-7f","object":"chat.completion.chunk","created":1700000000,'
        '"model":"m","choices":['
    )
    assert stream.decode() == (
        f'{head}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,'
        '"finish_reason":null}],"usage":null}\n\n'
        f'{head}{{"index":0,"delta":{{"content":"Hel"}},"logprobs":null,'
        '"finish_reason":null}],"usage":null}\n\n'
        f'{head}{{"index":0,"delta":{{"content":"lo \\"you\\"\\n"}},"logprobs":null,'
        '"finish_reason":null}],"usage":null}\n\n'
        f'{head}{{"index":0,"delta":{{}},"logprobs":null,'
        '"finish_reason":"stop","stop_reason":null}],"usage":null}\n\n'
        f'{head}],"usage":{{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,'
        '"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
        "data: [DONE]\n\n"
    )


def test_a_completion_streams_like_this() -> None:
    chunks = completion_chunks(index=3)
    stream = (
        chunks.first()
        + chunks.text("Once")
        + chunks.text(" upon")
        + chunks.finish(Ending(FinishReason.LENGTH))
        + DONE
    )
    head = (
        'data: {"id":"cmpl-7f","object":"text_completion","created":1700000000,'
        '"model":"m","choices":[{"index":3,'
    )
    assert stream.decode() == (
        f'{head}"text":"Once","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}"text":" upon","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}}]}}\n\n'
        "data: [DONE]\n\n"
    )


@pytest.mark.parametrize("include_usage", [False, True])
def test_openais_client_reads_every_chunk_of_a_chat(*, include_usage: bool) -> None:
    chunks = chat_chunks(index=1, include_usage=include_usage)
    tokens = [TokenText(token="Hi", raw=b"Hi", logprob=-0.1, top=(("Hi", b"Hi", -0.1),))]
    first, text, told, last = map(
        as_chat,
        (
            chunks.first(),
            chunks.text("Hi"),
            chunks.text_with("Hi", logprobs=tokens),
            chunks.finish(Ending(FinishReason.LENGTH)),
        ),
    )
    for chunk in (first, text, told, last):
        assert (chunk.id, chunk.created, chunk.model) == ("chatcmpl-7f", 1700000000, "m")
        assert chunk.object == "chat.completion.chunk"
        assert [choice.index for choice in chunk.choices] == [1]
        assert chunk.usage is None
        assert ("usage" in chunk.model_fields_set) == include_usage
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert text.choices[0].delta.content == "Hi"
    assert text.choices[0].delta.model_fields_set == {"content"}
    assert last.choices[0].delta.model_fields_set == set()
    reasons = [chunk.choices[0].finish_reason for chunk in (first, text, told, last)]
    assert reasons == [None, None, None, "length"]
    logprobs = told.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].bytes == [72, 105]
    assert logprobs.content[0].top_logprobs[0].token == "Hi"


def test_openais_client_reads_every_chunk_of_a_completion() -> None:
    chunks = completion_chunks()
    tokens = [TokenText(token="Hi", raw=b"Hi", logprob=-0.1, top=(("Hi", b"Hi", -0.1),))]
    told = as_completion(chunks.text_with("Hi", logprobs=tokens))
    assert told.object == "text_completion"
    assert told.choices[0].text == "Hi"
    assert told.choices[0].logprobs is not None
    assert told.choices[0].logprobs.tokens == ["Hi"]
    text = as_completion(chunks.text("Hi"))
    assert text.choices[0].text == "Hi"
    assert text.choices[0].finish_reason is None
    last = as_completion(chunks.finish(Ending(FinishReason.STOP)))
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "stop")


@pytest.mark.parametrize("make", [chat_chunks, completion_chunks])
def test_the_chunk_of_usage_has_no_choices(make: Any) -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=9)
    chunk = data(make(index=7, include_usage=True).usage(usage))
    assert chunk["choices"] == []
    assert chunk["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}


@pytest.mark.parametrize("make", [chat_chunks, completion_chunks])
def test_every_chunk_carries_the_usage_so_far_if_asked(make: Any) -> None:
    chunks = make(include_usage=True, continuous_prompt_tokens=5)
    events = [
        chunks.first(prompt_token_ids=[1, 2, 3, 4, 5]),
        chunks.text_with("a", completion_tokens=1),
        chunks.text_with("bc", completion_tokens=3),
        chunks.finish(Ending(FinishReason.STOP, completion_tokens=3)),
    ]
    assert [data(event)["usage"] for event in events] == [
        {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
        for count in (0, 1, 3, 3)
    ]


def test_token_ids_are_where_vllm_has_them() -> None:
    chat = chat_chunks()
    assert data(chat.first(prompt_token_ids=[1, 2]))["prompt_token_ids"] == [1, 2]
    assert data(chat.text_with("a", token_ids=[3, 4]))["choices"][0]["token_ids"] == [3, 4]
    completion = completion_chunks()
    first = data(completion.first(prompt_token_ids=[1, 2]))["choices"][0]
    assert (first["text"], first["prompt_token_ids"]) == ("", [1, 2])
    told = data(completion.text_with("a", token_ids=[3]))["choices"][0]
    assert (told["text"], told["token_ids"]) == ("a", [3])


@pytest.mark.parametrize("stop_reason", [None, 2, "END\n"])
def test_what_stopped_it_is_told(stop_reason: str | int | None) -> None:
    for chunks in (chat_chunks(), completion_chunks()):
        event = chunks.finish(Ending(FinishReason.STOP, stop_reason=stop_reason))
        assert data(event)["choices"][0]["stop_reason"] == stop_reason


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_failure_is_no_finish(reason: FinishReason) -> None:
    with pytest.raises(AssertionError):
        chat_chunks().finish(Ending(reason))


def test_a_stream_of_usage_so_far_has_no_chunk_without_it() -> None:
    with pytest.raises(AssertionError):
        chat_chunks(continuous_prompt_tokens=5).text_with("a")


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    chunks = completion_chunks()
    offsets = []
    for raw in (b"ab", FLAME[:2], FLAME[2:], b"!"):
        event = chunks.text_with("", logprobs=[TokenText(token="", raw=raw, logprob=-1.0)])
        offsets += data(event)["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 2, 2, 3]


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8")), max_size=5),
    model=st.text(st.characters(codec="utf-8")),
    index=st.integers(0, 2000),
)
def test_any_text_of_any_model_survives(texts: list[str], model: str, index: int) -> None:
    for chunks, path in (
        (chat_chunks(model=model, index=index), ("delta", "content")),
        (completion_chunks(model=model, index=index), ("text",)),
    ):
        for text in texts:
            for event in (chunks.text(text), chunks.text_with(text)):
                chunk = data(event)
                assert (chunk["model"], chunk["choices"][0]["index"]) == (model, index)
                found = chunk["choices"][0]
                for name in path:
                    found = found[name]
                assert found == text


def test_both_ways_to_render_a_plain_text_agree() -> None:
    for make in (chat_chunks, completion_chunks):
        for include_usage in (False, True):
            chunks = make(include_usage=include_usage)
            assert chunks.text("é\u2028") == chunks.text_with("é\u2028")
