"""One answer, asked for in every way: a stream is the whole, however its tokens came."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastserve.generation import LOGPROB_MIN, Finish, FinishReason, TokenLogprob
from fastserve.lane.messages import Outputs
from tests.frontend.stage import END, LENGTH, MAX_SEQ_LEN, USER

if TYPE_CHECKING:
    from tests.frontend.stage import Asked, Stage

# A stage is a value that asks and answers one request after the other.
ONE_STAGE = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Letters that stops are made of, characters of two to four bytes, a control token, a whole word,
# and bytes that are no text.
TOKENS = st.lists(
    st.sampled_from([*b"abc ", *"é🔥한".encode(), 0xFF, 0x80, END, USER, 256, 257]), max_size=24
)
STOPS = st.lists(st.text("abcé🔥 ", min_size=1, max_size=3), max_size=3)
LOGPROBS = st.floats(max_value=0, width=32) | st.just(float("nan"))


@dataclass(frozen=True)
class Script:
    """What the engine says for one choice: each token's logprob, and where the deltas are cut."""

    tokens: list[int]
    logprobs: list[float]
    cuts: list[int]
    finish: Finish


@st.composite
def scripts(draw: Any) -> Script:
    tokens = draw(TOKENS)
    if draw(st.booleans()):
        tokens, finish = [*tokens, END], Finish(reason=FinishReason.STOP)
    elif tokens and draw(st.booleans()):
        finish = Finish(reason=FinishReason.STOP, stop_token_id=tokens[-1])
    else:
        finish = LENGTH
    size = len(tokens)
    return Script(
        tokens=tokens,
        logprobs=draw(st.lists(LOGPROBS, min_size=size, max_size=size)),
        cuts=sorted(draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=size))),
        finish=finish,
    )


def deltas(script: Script, *, logprobs: bool) -> list[tuple[list[int], Any, Any]]:
    bounds = [0, *(cut for cut in script.cuts if cut < len(script.tokens)), len(script.tokens)]
    made = []
    for start, end in pairwise(bounds):
        told = [
            TokenLogprob(logprob=value, top=((token, value), (97, -1.0)))
            for token, value in zip(
                script.tokens[start:end], script.logprobs[start:end], strict=True
            )
        ]
        last = end == len(script.tokens)
        made.append((script.tokens[start:end], script.finish if last else None, told))
    return made if logprobs else [(tokens, finish, None) for tokens, finish, _ in made]


def play(
    stage: Stage, asked: Asked, plays: list[Script], *, logprobs: bool, slow: bool = False
) -> None:
    """Give each choice its deltas, turn by turn; a stop string ends one early.

    `slow`: the client is ready for every second turn only.
    """
    ids = [submit.request_id for submit in stage.submits[-len(plays) :]]
    queues = [deltas(script, logprobs=logprobs) for script in plays]
    while any(queues):
        if slow and not asked.ended:
            (asked.pause if asked.exchange.writable else asked.resume)()
        turn = [(each, *queue.pop(0)) for each, queue in zip(ids, queues, strict=True) if queue]
        counts = [len(tokens) for _, tokens, _, _ in turn]
        stage.frontend.on_outputs(
            Outputs(
                request_ids=[request_id for request_id, _, _, _ in turn],
                token_ids=[token for _, tokens, _, _ in turn for token in tokens],
                counts=None if counts == [1] * len(turn) else counts,
                finishes={at: finish for at, (_, _, finish, _) in enumerate(turn) if finish},
                logprobs={at: told for at, (_, _, _, told) in enumerate(turn) if told is not None},
            )
        )
    assert asked.ended


def choices_of_stream(asked: Asked, *, n: int, chat: bool) -> list[dict[str, Any]]:
    """The choices that a client of the stream puts together."""
    made: list[dict[str, Any]] = [{"text": "", "token_ids": [], "rows": []} for _ in range(n)]
    for chunk in asked.chunks():
        for part in chunk["choices"]:
            one = made[part["index"]]
            one["text"] += part["delta"].get("content", "") if chat else part["text"]
            one["token_ids"] += part.get("token_ids", [])
            one["rows"] += rows(part["logprobs"], chat=chat)
            for name in ("finish_reason", "stop_reason"):
                if part.get(name) is not None:
                    assert name not in one
                    one[name] = part[name]
    return made


def rows(logprobs: Any, *, chat: bool) -> list[Any]:
    """The facts of each token in turn, in either dialect."""
    if logprobs is None:
        return []
    if chat:
        return list(logprobs["content"])
    return list(
        zip(
            *(logprobs[n] for n in ("tokens", "token_logprobs", "text_offset", "top_logprobs")),
            strict=True,
        )
    )


def choices_of_whole(asked: Asked, *, chat: bool) -> list[dict[str, Any]]:
    made = []
    for part in asked.json()["choices"]:
        one = {
            "text": part["message"]["content"] if chat else part["text"],
            "token_ids": part["token_ids"],
            "rows": rows(part["logprobs"], chat=chat),
            "finish_reason": part["finish_reason"],
        }
        if part["stop_reason"] is not None:
            one["stop_reason"] = part["stop_reason"]
        made.append(one)
    return made


@ONE_STAGE
@given(
    plays=st.lists(scripts(), min_size=1, max_size=3),
    stop=STOPS,
    chat=st.booleans(),
    logprobs=st.booleans(),
    slow=st.booleans(),
    flags=st.fixed_dictionaries(
        {
            "skip_special_tokens": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
            "return_tokens_as_token_ids": st.booleans(),
        }
    ),
)
def test_a_stream_is_the_whole(
    stage: Stage,
    plays: list[Script],
    stop: list[str],
    flags: Any,
    *,
    chat: bool,
    logprobs: bool,
    slow: bool,
) -> None:
    fields = {"n": len(plays), "stop": stop, "return_token_ids": True, "max_tokens": 40} | flags
    if logprobs:
        fields |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    answers = []
    for stream in (True, False):
        asked = stage.chat(stream=stream, **fields) if chat else stage.ask(stream=stream, **fields)
        play(stage, asked, plays, logprobs=logprobs, slow=stream and slow)
        answers.append(
            choices_of_stream(asked, n=len(plays), chat=chat)
            if stream
            else choices_of_whole(asked, chat=chat)
        )
        assert stage.frontend.num_in_flight == 0
    streamed, whole = answers
    assert streamed == whole


@ONE_STAGE
@given(
    script=scripts(), skip=st.booleans(), ids=st.lists(st.sampled_from([*b"ab", END]), min_size=1)
)
def test_offsets_are_where_a_tokens_text_begins(
    stage: Stage, script: Script, ids: list[int], *, skip: bool
) -> None:
    """With an echo too: what a token adds to the text is found at its offset."""
    asked = stage.ask(
        prompt=ids[: MAX_SEQ_LEN // 2], echo=True, logprobs=0, max_tokens=30,
        skip_special_tokens=skip, stream=True, return_token_ids=True,
    )  # fmt: skip
    submit = stage.submits[-1]
    stage.hear_prompt([TokenLogprob(logprob=-1.0)] * (len(submit.prompt_token_ids) - 1))
    play(stage, asked, [script], logprobs=True)
    [choice] = choices_of_stream(asked, n=1, chat=False)
    text = choice["text"]
    told = [*submit.prompt_token_ids, *choice["token_ids"]]
    assert len(choice["rows"]) == len(told)
    assert [row[1] for row in choice["rows"]][: len(submit.prompt_token_ids)] == [
        None, *[-1.0] * (len(submit.prompt_token_ids) - 1)
    ]  # fmt: skip
    table = stage.tokenizer.table
    for token_id, (token, logprob, offset, _) in zip(told, choice["rows"], strict=True):
        assert logprob is None or LOGPROB_MIN <= logprob <= 0
        assert token
        whole_characters = table.texts_shown(skip_special_tokens=skip)[token_id]
        if whole_characters and "\N{REPLACEMENT CHARACTER}" not in text:
            assert text[offset : offset + len(whole_characters)] == whole_characters


# ---- echo with logprobs, by example


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("asking", "text", "tokens", "offsets"),
    [
        pytest.param(
            {"prompt": "hé"}, "hé!", ["h", r"bytes:\xc3", r"bytes:\xa9", "!"], [0, 1, 1, 2],
            id="a character in two tokens",
        ),
        pytest.param(
            {"prompt": "a<|end|>b"}, "a<|end|>b!", ["a", "<|end|>", "b", "!"], [0, 1, 8, 9],
            id="a control token that the client wrote",
        ),
        pytest.param(
            {"prompt": [97, END, 98]}, "ab!", ["a", "<|end|>", "b", "!"], [0, 1, 1, 2],
            id="a control token that is skipped",
        ),
        pytest.param(
            {"prompt": [97, END, 98], "skip_special_tokens": False}, "a<|end|>b!",
            ["a", "<|end|>", "b", "!"], [0, 1, 8, 9], id="one that is not",
        ),
        pytest.param(
            {"prompt": "abcd", "truncate_prompt_tokens": 2}, "cd!", ["c", "d", "!"], [0, 1, 2],
            id="a prompt that was cut",
        ),
        pytest.param(
            {"prompt": "a", "return_tokens_as_token_ids": True}, "a!",
            ["token_id:97", "token_id:33"], [0, 1], id="tokens as ids",
        ),
    ],
)  # fmt: skip
def test_an_echo_is_told_token_by_token(
    stage: Stage, asking: Any, text: str, tokens: Any, offsets: Any, *, stream: bool
) -> None:
    asked = stage.ask(echo=True, logprobs=1, stream=stream, **asking)
    assert stage.submits[0].sampling.prompt_logprobs == 1
    entry = TokenLogprob(logprob=-2.0, top=((98, -0.5),))
    stage.hear_prompt([entry] * (len(stage.submits[0].prompt_token_ids) - 1))
    stage.say(b"!", LENGTH, logprobs=[TokenLogprob(logprob=-3.0)])
    if stream:
        assert asked.said() == text
        [told] = [
            c["choices"][0]["logprobs"] for c in asked.chunks() if c["choices"][0]["logprobs"]
        ]
    else:
        [choice] = asked.json()["choices"]
        told = choice["logprobs"]
        assert choice["text"] == text
    assert told["tokens"] == tokens
    assert told["text_offset"] == offsets
    assert told["token_logprobs"] == [None, *[-2.0] * (len(tokens) - 2), -3.0]
    assert told["top_logprobs"][0] is None
    if len(tokens) > 2:
        assert told["top_logprobs"][1] == {"b": -0.5, tokens[1]: -2.0} | (
            {"b": -0.5} if tokens[1] == "b" else {}
        )


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_an_echo_with_logprobs_needs_no_answer(stage: Stage, *, stream: bool) -> None:
    asked = stage.ask(prompt="ab", echo=True, logprobs=0, max_tokens=0, stream=stream)
    [submit] = stage.submits
    assert (submit.sampling.max_tokens, submit.sampling.prompt_logprobs) == (0, 0)
    stage.hear_prompt([TokenLogprob(logprob=float("-inf"))])
    stage.say(b"", LENGTH)
    if stream:
        assert asked.said() == "ab"
        told = asked.chunks()[0]["choices"][0]["logprobs"]
    else:
        [choice] = asked.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
        assert asked.json()["usage"]["completion_tokens"] == 0
        told = choice["logprobs"]
    assert told["token_logprobs"] == [None, LOGPROB_MIN]


def test_the_echo_of_each_choice_waits_for_its_own_logprobs(stage: Stage) -> None:
    asked = stage.ask(prompt=["ab", "cd"], echo=True, logprobs=0, stream=True)
    stage.hear_prompt([TokenLogprob(logprob=-1.0)], request=0)
    stage.say(b"x", LENGTH, logprobs=[TokenLogprob(logprob=-2.0)], request=0)
    assert (asked.said(0), asked.said(1)) == ("abx", "")
    stage.hear_prompt([TokenLogprob(logprob=-3.0)], request=1)
    stage.say(b"y", LENGTH, logprobs=[TokenLogprob(logprob=-4.0)], request=1)
    assert asked.said(1) == "cdy"
    choices = [choice for chunk in asked.chunks() for choice in chunk["choices"]]
    told = [one["logprobs"]["token_logprobs"] for one in choices if one["logprobs"]]
    assert told == [[None, -1.0, -2.0], [None, -3.0, -4.0]]
