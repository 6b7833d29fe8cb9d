"""Text as it is streamed: the same as the whole, whatever tokens it is made of.

The simulated engine says scripted tokens; openai's client, or the bytes themselves, are the judge.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.scripted import assert_settled, card, ids_of, say, tokenizer, tokens
from tests.e2e.wire import Wire, in_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Server

BAD = "\N{REPLACEMENT CHARACTER}"
KOREAN = "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. "
MIXED = "Fire 🔥 and 👩‍💻, naïve café, 天地玄黃; ½ × €5\n\tend"
FLAME = (b"\xf0\x9f", b"\x94", b"\xa5")

STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
CHAT_OR_COMPLETION = pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])


@pytest.fixture(scope="module")
def client(sim: Server) -> Iterator[openai.OpenAI]:
    with sim.client() as client:
        yield client
    assert_settled(sim)


# ---- characters


@CHAT_OR_COMPLETION
@STREAM_OR_WHOLE
@pytest.mark.parametrize("text", [KOREAN * 5, MIXED, "plain words, and plain words"])
def test_a_text_is_said_as_it_is(
    client: openai.OpenAI, text: str, *, stream: bool, chat: bool
) -> None:
    [said] = say(client, ids_of(text), stream=stream, chat=chat)
    assert said.same() == (text, "stop", None, len(ids_of(text)))


def test_a_character_leaves_when_it_is_complete(client: openai.OpenAI) -> None:
    [said] = say(client, tokens("a", *FLAME, "b", *FLAME), stream=True)
    assert said.pieces == ["a", "🔥", "b", "🔥"]
    assert said.completion_tokens == 8


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        pytest.param((b"\x94", b"\x80", "ok"), f"{BAD}{BAD}ok", id="no beginning"),
        pytest.param((b"\xf0\x9f", b"\x94", "ok"), f"{BAD}ok", id="broken off"),
        pytest.param(("ok", b"\xf0\x9f", b"\x94"), f"ok{BAD}", id="cut by the end"),
        pytest.param((b"\xf0\x9f", *FLAME), f"{BAD}🔥", id="begun twice"),
        pytest.param((b"\x80",) * 9, BAD * 9, id="nothing else"),
    ],
)
def test_bytes_that_are_no_text_do_no_harm(
    client: openai.OpenAI, pieces: tuple[str | bytes, ...], text: str, *, stream: bool
) -> None:
    whole = b"".join(p.encode() if isinstance(p, str) else p for p in pieces)
    assert text == whole.decode(errors="replace")
    [said] = say(client, tokens(*pieces), stream=stream)
    assert said.same() == (text, "stop", None, len(pieces))


@STREAM_OR_WHOLE
def test_nothing_of_the_prompt_leaks_into_the_answer(
    client: openai.OpenAI, *, stream: bool
) -> None:
    """The prompt ends inside a character, and the answer begins with the rest of it."""
    prompt = tokens("secret", FLAME[0])
    [said] = say(client, tokens(*FLAME[1:], "out"), prompt=prompt, stream=stream)
    assert said.text == f"{BAD}{BAD}out"


@CHAT_OR_COMPLETION
def test_max_tokens_cuts_inside_a_character(client: openai.OpenAI, *, chat: bool) -> None:
    script = tokens("a", *FLAME)
    streamed, whole = (
        say(client, script, stream=stream, chat=chat, max_tokens=3)[0].same()
        for stream in (True, False)
    )
    assert streamed == whole == (f"a{BAD}", "length", None, 3)


# ---- special tokens, and tokens that end


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("options", "text"),
    [({}, "ab"), ({"skip_special_tokens": False}, "a<|im_start|>b")],
)
def test_control_tokens_are_shown_on_request(
    client: openai.OpenAI, options: dict[str, Any], text: str, *, stream: bool
) -> None:
    [said] = say(client, tokens("a", "<|im_start|>", "b"), stream=stream, extra_body=options)
    assert said.same() == (text, "stop", None, 3)


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("options", "text", "stop_reason", "counted"),
    [
        pytest.param({}, "a", None, 2, id="the end of the text is no text"),
        pytest.param({"skip_special_tokens": False}, "a", None, 2, id="not even when shown"),
        pytest.param({"ignore_eos": True}, "ab c", None, 4, id="ignored"),
        pytest.param(
            {"ignore_eos": True, "skip_special_tokens": False},
            "a<|im_end|>b c", None, 4, id="ignored and shown",
        ),
        pytest.param(
            {"ignore_eos": True, "stop_token_ids": ["b"]}, "a", "b", 3, id="a stop token",
        ),
        pytest.param(
            {"ignore_eos": True, "stop_token_ids": ["b"], "include_stop_str_in_output": True},
            "ab", "b", 3, id="a stop token that is included",
        ),
    ],
)  # fmt: skip
def test_tokens_that_end_a_text(
    client: openai.OpenAI,
    options: dict[str, Any],
    text: str,
    stop_reason: str | None,
    counted: int,
    *,
    stream: bool,
) -> None:
    if "stop_token_ids" in options:
        options = options | {"stop_token_ids": tokens(*options["stop_token_ids"])}
    script = tokens("a", "<|im_end|>", "b", " c")
    [said] = say(client, script, stream=stream, extra_body=options)
    stop_id = None if stop_reason is None else tokens(stop_reason)[0]
    assert said.same() == (text, "stop", stop_id, counted)


# ---- more than one choice


@CHAT_OR_COMPLETION
@STREAM_OR_WHOLE
def test_each_of_n_choices_is_whole(client: openai.OpenAI, *, stream: bool, chat: bool) -> None:
    said = say(client, ids_of(MIXED), stream=stream, chat=chat, n=3)
    assert [each.text for each in said] == [MIXED] * 3
    assert [each.finish_reason for each in said] == ["stop"] * 3
    assert said[0].completion_tokens == 3 * len(ids_of(MIXED))


@STREAM_OR_WHOLE
def test_the_choices_of_several_prompts_are_numbered_prompt_by_prompt(
    client: openai.OpenAI, *, stream: bool
) -> None:
    """Without a script the answer depends on prompt and seed alone."""

    def ask(prompt: str | list[str], *, n: int) -> list[str]:
        said = say(client, None, prompt=prompt, n=n, seed=5, max_tokens=6, stream=stream)
        return [each.text for each in said]

    first, second = ask("The sky", n=2), ask("Some water", n=2)
    assert len({*first, *second}) == 4
    assert ask(["The sky", "Some water"], n=2) == first + second


@STREAM_OR_WHOLE
def test_prompts_of_token_ids_and_of_text_are_the_same(
    client: openai.OpenAI, *, stream: bool
) -> None:
    by_text, by_ids, by_lists = (
        [said.text for said in say(client, None, prompt=prompt, max_tokens=6, stream=stream)]
        for prompt in ("The sky", ids_of("The sky"), [ids_of("The sky"), ids_of("A")])
    )
    assert by_text == by_ids == by_lists[:1]
    assert len(by_lists) == 2


# ---- echo


@STREAM_OR_WHOLE
@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize(
    "prompt", [" Tell me ", ids_of(" Tell me "), [" Tell me ", " Tell me "]], ids=["t", "i", "tt"]
)
def test_echo_says_the_prompt_once_and_first(
    client: openai.OpenAI, prompt: Any, max_tokens: int, *, stream: bool
) -> None:
    said = say(
        client, tokens("a", "b", "c"), prompt=prompt, echo=True, max_tokens=max_tokens,
        stream=stream,
    )  # fmt: skip
    choices = 2 if isinstance(prompt[0], str) and isinstance(prompt, list) else 1
    text = " Tell me " + "ab"[:max_tokens]
    assert [each.same() for each in said] == [
        (text, "length", None, max_tokens * choices)
    ] * choices


# ---- usage


@CHAT_OR_COMPLETION
def test_usage_comes_once_and_last(client: openai.OpenAI, *, chat: bool) -> None:
    chunks = _create(
        client, tokens("a", "b"), chat=chat, stream=True, stream_options={"include_usage": True}
    )
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage.completion_tokens == 2
    assert usage.total_tokens == usage.prompt_tokens + 2
    assert usage.prompt_tokens > 0


def test_without_being_asked_for_no_usage_comes(client: openai.OpenAI) -> None:
    chunks = _create(client, tokens("a", "b"), chat=True, stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


@CHAT_OR_COMPLETION
def test_running_usage_counts_up_to_each_chunk(client: openai.OpenAI, *, chat: bool) -> None:
    chunks = _create(
        client, tokens("a", *FLAME, "b"), chat=chat, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    # A chat begins with a chunk without text; the character of three tokens is one chunk.
    assert counts == [0] * chat + [1, 4, 5, 5, 5]
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
    for chunk in chunks:
        total = chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        assert chunk.usage.total_tokens == total


# ---- the form of a stream


def test_a_chat_begins_with_a_role_and_ends_with_a_reason(sim: Server) -> None:
    with Wire(sim.port) as wire:
        chunks = wire.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            sim={"token_ids": tokens("a", "b")},
        ).chunks()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "stop"]


def test_a_stream_is_not_to_be_buffered(sim: Server) -> None:
    with Wire(sim.port) as wire:
        assert wire.complete(tokens("a"), stream=True).text() == "a"
        assert wire.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert wire.headers["cache-control"] == "no-cache"
        assert wire.headers["x-accel-buffering"] == "no"
        assert wire.headers["transfer-encoding"] == "chunked"
        assert "content-length" not in wire.headers
        # The connection is in order: the next request is answered on it.
        assert wire.complete(tokens("b")).read_json()["choices"][0]["text"] == "b"


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
def test_options_of_a_stream_need_a_stream(client: openai.OpenAI, options: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=card().name, prompt="x", stream_options=options)
    assert caught.value.param == "stream_options"


# ---- logprobs and token ids


@CHAT_OR_COMPLETION
@STREAM_OR_WHOLE
def test_logprobs_spell_the_text(client: openai.OpenAI, *, stream: bool, chat: bool) -> None:
    """Of each token in turn, also of those that are only a part of a character."""
    script = ids_of(MIXED)
    raws = [tokenizer().token_bytes[token] for token in script]
    told = _logprobs(client, script, stream=stream, chat=chat, asked=20)
    assert [token for token, _, _ in told] == [
        raw.decode() if _is_text(raw) else "bytes:" + raw.decode(errors="backslashreplace")
        for raw in raws
    ]
    assert all(len(top) == 20 and max(top.values()) == logprob for _, logprob, top in told)


@STREAM_OR_WHOLE
def test_logprobs_of_a_chat_have_the_bytes(client: openai.OpenAI, *, stream: bool) -> None:
    answers = _create(
        client, tokens("a", *FLAME), chat=True, stream=stream, logprobs=True, top_logprobs=1
    )
    entries = [entry for told in _logprobs_of(answers) for entry in told.content]
    assert [bytes(entry.bytes) for entry in entries] == [b"a", *FLAME]
    assert [bytes(entry.top_logprobs[0].bytes) for entry in entries] == [b"a", *FLAME]


@STREAM_OR_WHOLE
def test_logprobs_of_a_completion_have_offsets(client: openai.OpenAI, *, stream: bool) -> None:
    answers = _create(
        client, tokens("ab", *FLAME, "cd", "e"), chat=False, stream=stream, logprobs=0
    )
    offsets = [offset for told in _logprobs_of(answers) for offset in told.text_offset]
    assert offsets == [0, 2, 2, 2, 3, 5]


@CHAT_OR_COMPLETION
@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(None, -9999.0, id="NaN"),
        pytest.param("-inf", -9999.0, id="-inf"),
        pytest.param(-1e300, -9999.0, id="huge"),
        pytest.param("inf", 0.0, id="inf"),
        pytest.param(-0.25, -0.25, id="sane"),
    ],
)
def test_a_logprob_is_a_number_that_json_has(
    client: openai.OpenAI, given: Any, expected: float, *, stream: bool, chat: bool
) -> None:
    script = tokens("a", "b")
    logprobs = [[given, [[script[0], given], [script[1], -1.5]]], [-2.0, []]]
    told = _logprobs(client, script, stream=stream, chat=chat, asked=2, logprobs=logprobs)
    # A completion always counts the chosen token among the likeliest.
    chosen = {} if chat else {"b": -2.0}
    assert told == [("a", expected, {"a": expected, "b": -1.5}), ("b", -2.0, chosen)]


@CHAT_OR_COMPLETION
def test_without_being_asked_for_no_logprobs_come(client: openai.OpenAI, *, chat: bool) -> None:
    for stream in (True, False):
        for answer in _create(client, tokens("a"), chat=chat, stream=stream):
            assert answer.choices[0].logprobs is None


@CHAT_OR_COMPLETION
@STREAM_OR_WHOLE
def test_token_ids_are_told_on_request(client: openai.OpenAI, *, stream: bool, chat: bool) -> None:
    script = ids_of(MIXED)
    asked: Any = {"extra_body": {"return_token_ids": True}}
    if not chat:
        asked["prompt"] = [7, 8, 9]
    answers = _create(client, script, chat=chat, stream=stream, **asked)
    ids = [
        token for answer in answers for token in getattr(answer.choices[0], "token_ids", None) or []
    ]
    assert ids == script
    of_prompt = [
        found
        for answer in answers
        for holder in (answer, answer.choices[0])
        if (found := getattr(holder, "prompt_token_ids", None)) is not None
    ]
    assert len(of_prompt) == 1, "once, at the beginning"
    assert chat or of_prompt == [[7, 8, 9]]


# ---- time


def test_each_token_leaves_at_once(sim: Server) -> None:
    """Nagle's algorithm and a client's delayed acknowledgement would make gaps of 40 ms."""
    count = 300
    arrivals: list[float] = []
    with Wire(sim.port) as wire:
        for _ in wire.complete(tokens("a") * count, stream=True).events():
            arrivals.append(time.monotonic())
    # The last token, its choice's end and [DONE] are one write.
    assert len(arrivals) == count + 2
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(arrivals[:-2]))
    assert statistics.median(gaps) < 0.02
    assert gaps[int(len(gaps) * 0.99)] < 0.2


# ---- company


def test_no_stream_gets_a_word_of_another(sim: Server) -> None:
    """Streams on both acceptors at the same time, each with a text of its own."""
    count = 200
    texts = [
        f"{n} " + "".join(chr(0x4E00 + n * 40 + m) for m in range(n % 23)) for n in range(count)
    ]
    scripts = [ids_of(text) for text in texts]

    def ask(number: int) -> tuple[str, str]:
        with Wire(sim.port) as wire:
            script = {"delay_ms": 200 + number % 7}
            wire.complete(scripts[number], stream=number % 5 != 0, sim=script)
            said = wire.text() if number % 5 else wire.read_json()["choices"][0]["text"]
            return said, wire.headers["x-request-id"].rpartition("-")[0]

    answers = in_parallel(*(partial(ask, number) for number in range(count)))
    assert [said for said, _ in answers] == texts
    # Ids that an acceptor makes begin with a word of its own.
    assert len({acceptor for _, acceptor in answers}) == 2


# ---- how the tests ask


def _create(
    client: openai.OpenAI, script: list[int], *, chat: bool, stream: bool, **options: Any
) -> list[Any]:
    """The chunks, or the one answer, as openai's client has them."""
    extra = options.pop("extra_body", {}) | {"sim": {"token_ids": script} | options.pop("sim", {})}
    asked = {"model": card().name, "max_tokens": 100, "stream": stream, "extra_body": extra}
    if chat:
        create: Any = client.chat.completions.create
        asked["messages"] = [{"role": "user", "content": "Speak."}]
    else:
        create = client.completions.create
        asked["prompt"] = "Speak"
    answer = create(**asked | options)
    return list(answer) if stream else [answer]


def _logprobs(
    client: openai.OpenAI, script: list[int], *, stream: bool, chat: bool, asked: int, **more: Any
) -> list[tuple[str, float, dict[str, float]]]:
    """Each token's text, its logprob, and those of the likeliest."""
    options: Any = {"logprobs": True, "top_logprobs": asked} if chat else {"logprobs": asked}
    told: list[tuple[str, float, dict[str, float]]] = []
    answers = _create(client, script, chat=chat, stream=stream, sim=more, **options)
    for logprobs in _logprobs_of(answers):
        if chat:
            told += (
                (entry.token, entry.logprob, {o.token: o.logprob for o in entry.top_logprobs})
                for entry in logprobs.content
            )
        else:
            told += zip(
                logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
            )
    return told


def _logprobs_of(answers: list[Any]) -> list[Any]:
    """Those of the chunks that have any: the first and the last chunk of a stream have none."""
    found = [answer.choices[0].logprobs for answer in answers]
    return [logprobs for logprobs in found if logprobs is not None]


def _is_text(raw: bytes) -> bool:
    return BAD not in raw.decode(errors="replace")


def test_requests_on_one_connection_are_answered_in_turn(sim: Server) -> None:
    """Each waits for the one before it, which ends while tokens of others are being handed out."""
    texts = [f"answer {number} ends" for number in range(30)]
    with Wire(sim.port) as wire:
        for text in texts:
            wire.complete(ids_of(text), stream=True)
        assert [wire.text() for _ in texts] == texts
    assert_settled(sim)
