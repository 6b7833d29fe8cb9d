"""Stop strings, over the whole way: found wherever they lie, and not a character of them shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.harness import wait_until
from tests.e2e.scripted import Said, assert_settled, card, ids_of, say, tokens
from tests.e2e.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Server

STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
FLAME = (b"\xf0\x9f", b"\x94", b"\xa5")


@pytest.fixture(scope="module")
def client(sim: Server) -> Iterator[openai.OpenAI]:
    with sim.client() as client:
        yield client
    assert_settled(sim)


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("pieces", "stop", "text", "found"),
    [
        pytest.param(
            ("ABC", "DEF", "GH", "I", "J", "x"), "DEFGHIJ", "ABC", "DEFGHIJ", id="over tokens"
        ),
        pytest.param(
            ("ok", "\n", "\n", "User", ":", "x"), "\n\nUser:", "ok", "\n\nUser:", id="in pieces"
        ),
        pytest.param(("hello", "x"), "ell", "h", "ell", id="inside one token"),
        pytest.param(("hello", " world"), "lo wo", "hel", "lo wo", id="from inside to inside"),
        pytest.param(("x", "ab"), "abcd", "xab", None, id="begun and not completed"),
        pytest.param(("ab", "ab", "cd", "x"), "abcd", "ab", "abcd", id="begun twice"),
        pytest.param(("hello", "x"), ["lo", "ell"], "h", "ell", id="complete first, not listed"),
        pytest.param(
            (" The", " user", " is", " a"), [" a", "is"], " The user ", "is", id="order of the text"
        ),
        pytest.param(("hello",), ["hello", "he"], "", "he", id="the shorter is complete first"),
        pytest.param(("a", *FLAME, "b"), "🔥", "a", "🔥", id="a character of several tokens"),
        pytest.param(("a", "b"), "c", "ab", None, id="absent"),
        pytest.param(("a", "b", "c"), "c", "ab", "c", id="the last token"),
    ],
)
def test_the_text_ends_before_the_first_stop(
    client: openai.OpenAI,
    pieces: tuple[str, ...],
    stop: str | list[str],
    text: str,
    found: str | None,
    *,
    stream: bool,
) -> None:
    [said] = say(client, tokens(*pieces), stop=stop, stream=stream)
    assert (said.text, said.finish_reason, said.stop_reason) == (text, "stop", found)


@STREAM_OR_WHOLE
def test_a_stop_may_be_included(client: openai.OpenAI, *, stream: bool) -> None:
    [said] = say(
        client, tokens("x", "ab", "cd", "y"), stop="abc", stream=stream,
        extra_body={"include_stop_str_in_output": True},
    )  # fmt: skip
    assert (said.text, said.finish_reason, said.stop_reason) == ("xabc", "stop", "abc")


def test_only_what_may_become_a_stop_is_held_back(client: openai.OpenAI) -> None:
    [said] = say(client, tokens("x", "ab", "x", "a", "b"), stop="abcd", stream=True)
    assert said.pieces == ["x", "abx", "ab"]


@STREAM_OR_WHOLE
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
def test_a_stop_in_the_last_token_is_a_stop(
    client: openai.OpenAI, *, stream: bool, chat: bool
) -> None:
    """Also where that token is the last that was asked for: the text ended by itself."""
    [said] = say(
        client, tokens("x", "ab", "cd", "y"), stop="cd", max_tokens=3, stream=stream, chat=chat
    )
    assert said.same() == ("xab", "stop", "cd", 3)


@STREAM_OR_WHOLE
def test_each_choice_stops_by_itself(client: openai.OpenAI, *, stream: bool) -> None:
    """Choices that differ, and a stop that only some of them meet."""
    options: dict[str, Any] = {"n": 4, "seed": 3, "max_tokens": 24, "prompt": "Some words"}
    full = [said.text for said in say(client, None, stream=False, **options)]
    stop = full[1].split()[11]
    expected = [
        Said([text.split(stop)[0]], "stop" if stop in text else "length",
             stop if stop in text else None)
        for text in full
    ]  # fmt: skip
    assert {said.finish_reason for said in expected} == {"stop", "length"}
    said = say(client, None, stream=stream, stop=[stop], **options)
    assert [each.same()[:3] for each in said] == [each.same()[:3] for each in expected]


@STREAM_OR_WHOLE
def test_logprobs_and_ids_come_with_a_stop(client: openai.OpenAI, *, stream: bool) -> None:
    """What else was asked for is told of every token, in chunks that may have waited."""
    script = tokens("x", "ab", "y", "cd", "z")
    answer: Any = client.completions.create(
        model=card().name, prompt="x", stop=["yc"], stream=stream, logprobs=1,
        extra_body={"sim": {"token_ids": script}, "return_token_ids": True},
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    assert "".join(choice.text for choice in choices) == "xab"
    told = [choice.logprobs.tokens for choice in choices if choice.logprobs]
    assert [token for each in told for token in each] == ["x", "ab", "y", "cd"]
    ids = [token for choice in choices for token in getattr(choice, "token_ids", [])]
    assert ids == script[:4]


@STREAM_OR_WHOLE
def test_a_stop_ends_the_work_too(sim: Server, *, stream: bool) -> None:
    """The engine is told: it would go on for thousands of tokens."""
    with Wire(sim.port) as wire:
        script = tokens("a", "b", "c") + tokens("z") * 8000
        wire.complete(script, stop="bc", stream=stream, max_tokens=8000)
        text = wire.text() if stream else wire.read_json()["choices"][0]["text"]
        assert text == "a"
    wait_until(lambda: sim.num_in_engine() == 0, deadline_s=5.0)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_an_empty_stop_is_refused(client: openai.OpenAI, stop: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=card().name, prompt="x", stop=stop)
    assert str(caught.value.param).startswith("stop")


def test_a_long_text_with_many_stops_is_sliced_alike(client: openai.OpenAI) -> None:
    text = "the cat sat on the mat and the rat ran at the hat, that was that. " * 4
    stops = ["the bat", "that wasp", "mat and a", "was that. The", "ran at the hat, that was it"]
    streamed, whole = (
        say(client, ids_of(text), stop=stops, stream=stream)[0].same() for stream in (True, False)
    )
    assert streamed == whole == (text, "stop", None, len(ids_of(text)))
