"""One step's outputs: what is made of them in one loop, and what is left to the choices."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from fastserve.frontend.in_flight import NO_PIECES
from fastserve.frontend.model import Model
from fastserve.frontend.pieces import PIECE_BYTES_MAX, PIECES_MAX, Pieces
from fastserve.lane.messages import Outputs
from fastserve.metrics.catalog import GENERATION_TOKENS, INTER_TOKEN_LATENCY, LANE_DROPS, OFFSETS
from fastserve.text.token_table import TokenTable
from tests.frontend.stage import FAILED, LENGTH

if TYPE_CHECKING:
    from fastserve.frontend.in_flight import Choice
    from fastserve.generation import Finish, ModelCard
    from tests.frontend.stage import Stage


TOLD: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"n": 2}, True),
    ({"temperature": 0.5, "seed": 1, "max_tokens": 9}, True),
    ({"stream_options": {"include_usage": True}}, True),
    ({"stop": ["x"]}, False),
    ({"logprobs": 1}, False),
    ({"return_token_ids": True}, False),
    ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, False),
]


def step(stage: Stage, tokens: bytes, finishes: dict[int, Finish] | None = None) -> None:
    """One token for each of the requests that were submitted first."""
    ids = [submit.request_id for submit in stage.submits[: len(tokens)]]
    stage.frontend.on_outputs(
        Outputs(request_ids=list(ids), token_ids=list(tokens), finishes=finishes or {})
    )


def choices(stage: Stage) -> list[Choice]:
    return list(stage.frontend._choices._by_id.values())


def lent_out(stage: Stage) -> bool:
    """Whether all choices in flight leave their chunks to the loop."""
    return all(choice.pieces is not NO_PIECES for choice in choices(stage))


def gaps(stage: Stage) -> float:
    """How many gaps between two tokens were observed."""
    at = OFFSETS[INTER_TOKEN_LATENCY.name]
    return sum(stage.board.numbers(0)[at : at + len(INTER_TOKEN_LATENCY.buckets) + 1])


@pytest.mark.parametrize(("fields", "lent"), TOLD)
def test_who_wants_plain_text_leaves_it_to_the_loop(
    stage: Stage, fields: dict[str, Any], *, lent: bool
) -> None:
    asked = stage.ask(stream=True, **fields)
    assert not lent_out(stage)
    num = len(choices(stage))
    step(stage, b"a" * num)
    assert lent_out(stage) == lent
    for text in (b"b", b"c", b"b"):
        step(stage, text * num)
    step(stage, b"d" * num, dict.fromkeys(range(num), LENGTH))
    for index in range(num):
        assert asked.said(index) == "abcbd"
    assert asked.blocks()[-1] == "data: [DONE]"


def test_a_chunk_of_the_loop_is_like_any_other(stage: Stage) -> None:
    asked = stage.chat(stream=True)
    for _ in range(3):
        step(stage, b'"')  # seen first, learnt, and made in the loop
    _, *chunks = asked.chunks()
    assert len(chunks) == 3
    assert chunks[0] == chunks[1] == chunks[2]
    assert chunks[0]["choices"][0]["delta"] == {"content": '"'}


def test_half_a_character_takes_it_from_the_loop(stage: Stage) -> None:
    asked = stage.ask(stream=True)
    lent = []
    for byte in "aéb".encode():
        step(stage, bytes([byte]))
        lent.append(lent_out(stage))
    assert lent == [True, False, True, True]
    assert asked.said() == "aéb"


def test_a_client_that_is_not_ready_takes_it_from_the_loop(stage: Stage) -> None:
    asked = stage.ask(stream=True)
    step(stage, b"a")
    asked.pause()
    assert not lent_out(stage)
    step(stage, b"a")
    step(stage, b"b")
    asked.resume()
    assert asked.said() == "aab"
    step(stage, b"a")
    assert lent_out(stage)
    assert asked.said() == "aaba"


def test_an_answer_in_http_1_0_has_no_chunks(stage: Stage) -> None:
    asked = stage.request(
        "POST", "/v1/completions", body=b'{"prompt":"p","stream":true}', version="1.0"
    )
    for _ in range(3):
        step(stage, b"a")
        assert not lent_out(stage)
    assert asked.sent.count(b'"text":"a"') == 3
    assert b"Transfer-Encoding" not in asked.sent


def test_a_long_name_is_no_hindrance(stage: Stage, card: ModelCard) -> None:
    stage.state.model = Model(
        dataclasses.replace(card, name="m" * 2000), template_bytes_max=1 << 20
    )
    asked = stage.ask(stream=True)
    for _ in range(3):
        step(stage, b"a")
    assert asked.said() == "aaa"


def test_all_sorts_in_one_step(stage: Stage) -> None:
    """A plain one, one that begins, ends, fails, has gone, is not ready, or is not streamed."""
    plain, ends, fails, gone, paused = (stage.ask(stream=True) for _ in range(5))
    step(stage, b"aaaaa")
    begins, whole = stage.ask(stream=True), stage.ask()
    gone.exchange.disconnect()
    paused.pause()
    step(stage, b"bbbbbbb", {1: LENGTH, 2: FAILED})
    step(stage, b"ccccccc", {6: LENGTH})
    paused.resume()
    assert (plain.said(), begins.said(), paused.said()) == ("abc", "bc", "abc")
    assert (ends.said(), ends.blocks()[-1]) == ("ab", "data: [DONE]")
    assert (fails.said(), fails.chunks()[-1]["error"]["message"]) == ("a", "out of luck")
    assert whole.json()["choices"][0]["text"] == "bc"
    assert gone.said() == "a"
    # Those that were gone, or had ended, in the second and third step.
    assert stage.count(LANE_DROPS, "late") == 4
    assert stage.count(GENERATION_TOKENS) == 5 + 6 + 4


def test_nothing_follows_the_end_of_an_answer_that_fails_in_the_same_step(stage: Stage) -> None:
    asked = stage.ask(stream=True, n=3)
    step(stage, b"aaa")
    step(stage, b"aaa")
    stage.frontend.on_outputs(
        Outputs(
            # The one in the middle has no such token.
            request_ids=[submit.request_id for submit in stage.submits],
            token_ids=[97, 10**6, 97],
        )
    )
    assert asked.sent.endswith(b"0\r\n\r\n")
    assert asked.chunks()[-1]["error"]["type"] == "server_error"
    assert asked.said(0) == asked.said(2) == "aa"


@pytest.mark.parametrize("stream", [True, False])
def test_two_steps_of_one_request_at_once_stay_in_order(stage: Stage, *, stream: bool) -> None:
    """As it is when an engine's own steps are read two at a time: the second may be the last."""
    first, second = stage.ask(stream=stream), stage.ask(stream=stream)
    step(stage, b"aa")
    one, other = (submit.request_id for submit in stage.submits)
    stage.frontend.on_outputs(
        Outputs(request_ids=[one, other, one, other], token_ids=list(b"bbcc"), finishes={2: LENGTH})
    )
    stage.frontend.on_outputs(
        Outputs(request_ids=[other, other], token_ids=list(b"dd"), finishes={1: LENGTH})
    )
    if stream:
        assert (first.said(), second.said()) == ("abc", "abcdd")
    else:
        texts = [asked.json()["choices"][0]["text"] for asked in (first, second)]
        assert texts == ["abc", "abcdd"]
    assert stage.count(GENERATION_TOKENS) == 3 + 5
    assert stage.count(LANE_DROPS, "late") == 0


def test_gaps_are_counted_whoever_had_them(stage: Stage) -> None:
    stage.ask(stream=True)
    step(stage, b"a")
    stage.ask(stream=True)
    for _ in range(5):
        step(stage, b"aa")
    assert gaps(stage) == 5 + 4
    step(stage, b"aa", {0: LENGTH, 1: LENGTH})
    assert gaps(stage) == 5 + 4 + 2


def table(*tokens: bytes) -> TokenTable:
    return TokenTable(list(tokens), special_ids=[0])


def test_a_piece_is_the_json_string_of_a_whole_text() -> None:
    plain = Pieces(table(b"<s>", "é\n".encode(), b"\xc3", b""), skip_special_tokens=True)
    for token_id in range(4):
        plain.learn(token_id)
    assert plain.ready == {1: '"é\\n"'.encode()}
    every = Pieces(table(b"<s>"), skip_special_tokens=False)
    every.learn(0)
    assert every.ready == {0: b'"<s>"'}


def test_pieces_have_limits() -> None:
    tokens = [b"s", b"x" * (PIECE_BYTES_MAX - 2), b"x" * (PIECE_BYTES_MAX - 1)]
    pieces = Pieces(table(*tokens, *[b"a"] * (PIECES_MAX + 10)), skip_special_tokens=True)
    for token_id in range(3 + PIECES_MAX + 10):
        pieces.learn(token_id)
    assert len(pieces.ready) == PIECES_MAX
    assert 1 in pieces.ready
    assert 2 not in pieces.ready
