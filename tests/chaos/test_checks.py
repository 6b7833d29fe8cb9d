"""The suite's own eyes: what it must let pass, what it must never, and that a seed is a plan."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING

import orjson
import pytest

from tests.chaos import records as files
from tests.chaos.asking import Ask, Ending, Heard, Verdict, embedded, judge, simulated
from tests.chaos.driver import LOST, Outcome, Setup, counted_as
from tests.chaos.figures import by_configuration, table
from tests.chaos.kinds import KINDS, kinds_for
from tests.chaos.load import Result
from tests.chaos.plan import plan
from tests.chaos.reading import hear
from tests.chaos.records import Record
from tests.chaos.scene import Struck

if TYPE_CHECKING:
    from pathlib import Path

STREAM = Ask(path="/v1/completions", fields={}, pieces=(" a", " b", " c"), stream=True)
WHOLE = Ask(path="/v1/completions", fields={}, pieces=(" a", " b", " c"), stream=False)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"


def delta(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"text": text, "finish_reason": finish_reason}
    return b"data: %b\n\n" % orjson.dumps({"choices": [choice]})


def error(kind: str) -> bytes:
    return orjson.dumps({"error": {"message": "", "type": kind, "param": None, "code": kind}})


def error_event(kind: str) -> bytes:
    return b"data: %b\n\n" % error(kind)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(*events: bytes) -> bytes:
    return CHUNKED + b"".join(chunk(event) for event in events) + b"0\r\n\r\n"


def answer(status: int, body: bytes, *headers: bytes) -> bytes:
    lines = (b"HTTP/1.1 %d X" % status, b"Content-Type: application/json", *headers)
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def whole(text: str, *, finish_reason: str = "length", tokens: int = 3) -> bytes:
    choice = {"text": text, "finish_reason": finish_reason}
    body = {"choices": [choice], "usage": {"completion_tokens": tokens}}
    return answer(200, orjson.dumps(body))


def read(data: bytes, *, slice_bytes: int) -> Heard:
    """What a client hears whose server sends `data` in slices and closes."""

    async def reading() -> Heard:
        reader, heard = asyncio.StreamReader(), Heard()
        task = asyncio.ensure_future(hear(reader, heard))
        for at in range(0, len(data), slice_bytes):
            reader.feed_data(data[at : at + slice_bytes])
            await asyncio.sleep(0)
        reader.feed_eof()
        await task
        return heard

    return asyncio.run(reading())


RETRY = b"Retry-After: 5"
LAST = (delta("", "length"), DONE)
GOOD = (delta(" a"), delta(" b c"), *LAST)


@pytest.mark.parametrize("slice_bytes", [1, 1 << 20], ids=["one byte at a time", "at once"])
@pytest.mark.parametrize(
    ("ask", "data", "ending"),
    [
        pytest.param(STREAM, stream(*GOOD), Ending.WELL, id="a stream"),
        pytest.param(STREAM, stream(b": ping\n\n", *GOOD), Ending.WELL, id="a ping"),
        pytest.param(
            STREAM, b"HTTP/1.1 100 Continue\r\n\r\n" + stream(*GOOD), Ending.WELL, id="an interim"
        ),
        pytest.param(WHOLE, whole(" a b c"), Ending.WELL, id="a whole answer"),
        pytest.param(
            STREAM, stream(delta(" a"), error_event("engine_dead")), Ending.ERROR, id="its death"
        ),
        pytest.param(
            WHOLE, answer(503, error("engine_dead"), RETRY), Ending.ERROR, id="an honest 503"
        ),
        pytest.param(STREAM, b"", Ending.CUT, id="nothing"),
        pytest.param(STREAM, CHUNKED + chunk(GOOD[0]), Ending.CUT, id="half a stream"),
        pytest.param(WHOLE, whole(" a b c")[:-1], Ending.CUT, id="all but a byte"),
        pytest.param(
            STREAM, stream(delta(" a"), delta(" a b c"), *LAST), Ending.FALSE, id="a token twice"
        ),
        pytest.param(STREAM, stream(delta(" z"), *LAST), Ending.FALSE, id="a foreign token"),
        pytest.param(
            STREAM, CHUNKED + chunk(delta(" z")), Ending.FALSE, id="a foreign token, and cut"
        ),
        pytest.param(STREAM, stream(delta(" a c"), *LAST), Ending.FALSE, id="a token is missing"),
        pytest.param(STREAM, stream(delta(" a"), *LAST), Ending.FALSE, id="too few"),
        pytest.param(STREAM, stream(*GOOD[:-1]), Ending.FALSE, id="no [DONE]"),
        pytest.param(STREAM, stream(delta(" a b c"), DONE), Ending.FALSE, id="no finish"),
        pytest.param(STREAM, stream(*GOOD[:-1], *LAST), Ending.FALSE, id="two finishes"),
        pytest.param(
            STREAM, stream(*[error_event("engine_dead")] * 2), Ending.FALSE, id="two errors"
        ),
        pytest.param(
            STREAM, stream(error_event("engine_dead"), DONE), Ending.FALSE, id="an error, and done"
        ),
        pytest.param(STREAM, stream(error_event("server_error")), Ending.FALSE, id="a bug"),
        pytest.param(WHOLE, answer(500, error("server_error")), Ending.FALSE, id="a bare 500"),
        pytest.param(WHOLE, answer(503, error("engine_dead")), Ending.FALSE, id="no Retry-After"),
        pytest.param(
            WHOLE, answer(400, error("invalid_request_error")), Ending.FALSE, id="a wrong blame"
        ),
        pytest.param(WHOLE, whole(" a b"), Ending.FALSE, id="a whole answer that is short"),
        pytest.param(WHOLE, whole(" a b c", tokens=4), Ending.FALSE, id="miscounted"),
        pytest.param(WHOLE, whole(" a b c", finish_reason="abort"), Ending.FALSE, id="aborted"),
        pytest.param(STREAM, b"HTTP/1.0 200\r\n\r\n", Ending.FALSE, id="no status line"),
        pytest.param(STREAM, CHUNKED + b"zz\r\n", Ending.FALSE, id="no chunk size"),
        pytest.param(
            STREAM, CHUNKED + chunk(b"data: [DO") + chunk(b"NE]\n\n"), Ending.FALSE, id="torn event"
        ),
    ],
)
def test_an_answer_has_one_ending(
    ask: Ask, data: bytes, ending: Ending, *, slice_bytes: int
) -> None:
    verdict = judge(ask, read(data, slice_bytes=slice_bytes))
    assert verdict.ending is ending, verdict


@pytest.mark.parametrize("make", [simulated, embedded])
def test_no_two_requests_have_the_same_tokens(make: object) -> None:
    rng = random.Random(1)
    asks = [(simulated if make is simulated else embedded)(rng) for _ in range(200)]
    texts = [ask.text for ask in asks if len(ask.pieces) > 3]
    assert len(set(texts)) == len(texts)
    scripted = [ask.pieces for ask in asks if "sim" in ask.fields]
    assert all(one != other for pieces in scripted for one, other in itertools.pairwise(pieces))


def test_a_seed_is_a_plan() -> None:
    kinds = kinds_for("sim")
    assert plan(5, kinds, blows=3) == plan(5, kinds, blows=3)
    assert plan(5, kinds, blows=3) != plan(6, kinds, blows=3)


@pytest.mark.parametrize("kinds", [kinds_for("sim"), kinds_for("embedded"), ["engine pause"],
                                   ["engine kill", "engine kill, respawned"]])  # fmt: skip
def test_every_blow_is_dealt_to_a_server_that_is_made_for_it(kinds: list[str]) -> None:
    lives = plan(5, kinds, blows=4)
    dealt = [blow.kind for life in lives for blow in (*life.survives, life.last)]
    assert all(dealt.count(kind) >= 4 for kind in kinds)
    for life in lives:
        assert KINDS[life.last.kind].exit_codes
        for blow in life.survives:
            assert not KINDS[blow.kind].exit_codes
            assert KINDS[blow.kind].respawn in (None, life.respawn)


GONE, THERE = 1111, 2222  # ports: of a connection that its acceptor held, and of another one


def result(ending: Ending, *, began_s: float, ended_s: float, port: int, detail: str) -> Result:
    verdict = Verdict(ending, detail)
    return Result(began_s=began_s, ended_s=ended_s, port=port, verdict=verdict)


@pytest.mark.parametrize(
    ("kind", "ending", "times_s", "port", "detail", "excused"),
    [
        # The blow begins at 10 s, and strikes at 11 s.
        ("acceptor kill", Ending.CUT, (9, 11.1), GONE, "", True),
        ("acceptor kill", Ending.CUT, (9, 11.1), THERE, "", False),
        ("acceptor kill", Ending.CUT, (9, 9.9), GONE, "", False),
        ("acceptor kill", Ending.STALE, (10.9, 11.1), THERE, "", False),
        ("acceptor kill", Ending.ERROR, (9, 11.1), GONE, "engine_dead", False),
        ("acceptor kill", Ending.REFUSED, (12, 12), 0, "", False),
        ("acceptor term", Ending.STALE, (11, 11.1), THERE, "", True),
        ("acceptor term", Ending.STALE, (11, 13), THERE, "", False),
        ("acceptor term", Ending.CUT, (11, 11.1), THERE, "", False),
        ("engine kill, respawned", Ending.ERROR, (9, 11.1), THERE, "engine_dead", True),
        ("engine kill, respawned", Ending.ERROR, (9, 11.1), THERE, "shutting_down", False),
        ("engine kill, respawned", Ending.ERROR, (9, 9.9), THERE, "engine_dead", False),
        ("engine kill, respawned", Ending.REFUSED, (12, 12), 0, "", False),
        ("engine kill", Ending.REFUSED, (12, 12), 0, "", True),
        ("engine kill", Ending.REFUSED, (10, 10.5), 0, "", False),
        ("engine kill", Ending.CUT, (9, 11.1), THERE, "", False),
        ("supervisor kill", Ending.CUT, (9, 11.1), THERE, "", True),
        ("supervisor kill", Ending.LATE, (9, 69), THERE, "", False),
        ("supervisor kill", Ending.FALSE, (9, 11.1), THERE, "a token twice", False),
        ("engine pause", Ending.ERROR, (9, 11.1), THERE, "engine_dead", False),
    ],
)
def test_nothing_is_excused_but_by_the_blow(
    kind: str,
    ending: Ending,
    times_s: tuple[float, float],
    port: int,
    detail: str,
    *,
    excused: bool,
) -> None:
    began_s, ended_s = times_s
    struck = Struck(at_s=11.0, began_s=10.0, held={GONE})
    ended = result(ending, began_s=began_s, ended_s=ended_s, port=port, detail=detail)
    assert counted_as(KINDS[kind], struck, ended) == (ending if excused else LOST)


def test_records_come_back_and_make_a_table(tmp_path: Path) -> None:
    setup = Setup(engine="sim", frontends=4, clients=1, directory=tmp_path, ranks=2)
    [life] = plan(1, ["engine kill"], blows=1)
    outcomes = [
        Outcome(blow=life.last, answered_s=0.25, over_s=1.5, endings={"well": 3, LOST: 1}),
        Outcome(blow=life.last, answered_s=0.75, over_s=2.5, endings={"error": 2}),
    ]
    outcomes[0].violations.append("a request ended cut")
    records = [Record.of(outcome, setup, seed=7) for outcome in outcomes]
    for each in records:
        files.append(tmp_path / "records", each)
    assert files.read([tmp_path / "records"]) == records
    bounded, of_any_kind = (
        f"2 | 0.50 | 0.75 | {told} | 2.00 | 2.50 | {over} | 6 | 3 | 2 | 0 | 0 | 0 | 0 | 1 | 1 |"
        for told, over in (("5", "10"), ("", ""))
    )
    assert f"| engine kill | {bounded}" in table(records)
    assert f"| sim, 2 ranks, K = 4 | {of_any_kind}" in by_configuration(records)
