"""The ring of last requests: nothing is lost, torn or taken away."""

from __future__ import annotations

import math
import multiprocessing
import time

import orjson
import pytest

from fastserve.metrics.board import Board
from fastserve.metrics.perf import render
from fastserve.metrics.recent import RECORD_BYTES, RequestRecord

RECORD = RequestRecord(
    received_unix_s=1000.0,
    prepared_s=0.001,
    submitted_s=0.002,
    scheduled_s=0.003,
    first_token_s=0.1,
    last_token_s=0.9,
    finished_s=1.0,
    prompt_tokens=7,
    cached_tokens=3,
    generation_tokens=9,
    num_choices=1,
    status=200,
    endpoint="/v1/completions",
    finish_reason="stop",
    stream=True,
    request_id="r" * 128,
    trace_id="0af7651916cd43dd8448eb211c80319c",
)


def numbered(number: int) -> RequestRecord:
    return RECORD._replace(received_unix_s=float(number), request_id=str(number))


def read(board: Board, lane: int = 0) -> list[RequestRecord]:
    return [ended.record() for ended in board.recent(lane).newest()][::-1]


def ids(board: Board, lane: int = 0) -> list[str]:
    return [record.request_id for record in read(board, lane)]


def test_a_record_comes_back_as_it_was() -> None:
    board = Board.make(1, recent_max=4)
    assert ids(board) == []
    board.recent(0).write(RECORD)
    assert read(board) == [RECORD]
    assert read(board) == [RECORD]  # reading takes nothing away


def test_the_oldest_go_first() -> None:
    board = Board.make(2, recent_max=3)
    ring = board.recent(1)
    for number in range(5):
        ring.write(numbered(number))
    assert ids(board, 1) == ["2", "3", "4"]
    assert ids(board, 0) == []


def test_a_successor_goes_on() -> None:
    board = Board.make(1, recent_max=3)
    board.recent(0).write(numbered(1))
    board.recent(0).write(numbered(2))
    assert ids(board) == ["1", "2"]


def test_with_no_room_nothing_is_kept() -> None:
    board = Board.make(2)
    board.recent(1).write(RECORD)
    assert read(board, 1) == []


@pytest.mark.parametrize("byte", range(0, RECORD_BYTES, 5))
def test_a_record_whose_writer_died_half_way_is_left_out(byte: int) -> None:
    board = Board.make(1, recent_max=3)
    ring = board.recent(0)
    for number in range(3):
        ring.write(numbered(number))
    place = bytes(board._recent[64 + RECORD_BYTES : 64 + 2 * RECORD_BYTES])
    ring.write(numbered(3))
    ring.write(numbered(4)._replace(trace_id="f" * 32, generation_tokens=2**31, prompt_tokens=0))
    # The beginning of the new one is there, and the rest is the old one's.
    torn = board._recent[64 + RECORD_BYTES + byte : 64 + 2 * RECORD_BYTES]
    torn[:] = place[byte:]
    found = ids(board)
    assert [each for each in found if each not in ("1", "4")] == ["2", "3"]
    assert len(found) <= 3


def test_what_no_table_has_is_other() -> None:
    board = Board.make(1, recent_max=1)
    board.recent(0).write(RECORD._replace(endpoint="/else", finish_reason=""))
    [record] = read(board)
    assert (record.endpoint, record.finish_reason) == ("other", "")


def test_all_acceptors_are_told_in_the_order_in_which_requests_ended() -> None:
    board = Board.make(3, recent_max=4)
    for number in range(6):
        board.recent(number % 3).write(numbered(number))
    told = orjson.loads(render(board.all_recent(), records_max=4))
    assert [(each["request_id"], each["acceptor"]) for each in told] == [
        ("2", 2), ("3", 0), ("4", 1), ("5", 2),
    ]  # fmt: skip


def test_a_time_that_never_came_is_null() -> None:
    board = Board.make(1, recent_max=4)
    board.recent(0).write(
        RECORD._replace(scheduled_s=math.nan, first_token_s=math.nan, trace_id="", finish_reason="")
    )
    [told] = orjson.loads(render(board.all_recent(), records_max=4))
    timings = told["perf_metrics"]["timing_metrics"]
    assert timings["first_scheduled_time"] is timings["first_token_time"] is None
    assert timings["server_arrival_time"] == 1000.0
    assert timings["arrival_time"] == pytest.approx(1000.002)
    assert timings["finished_time"] == 1001.0
    assert told["trace_id"] is told["finish_reason"] is None
    assert told["completion_tokens"] == 9


def _write_for_ever(board: Board) -> None:
    ring = board.recent(0)
    number = 0
    while True:
        number += 1
        ring.write(
            RECORD._replace(prompt_tokens=number, generation_tokens=number, request_id=str(number))
        )


def test_no_reader_sees_half_a_record_of_a_writer_that_never_rests() -> None:
    board = Board.make(1, recent_max=2)
    writer = multiprocessing.get_context("spawn").Process(
        target=_write_for_ever, args=(board,), daemon=True
    )
    writer.start()
    try:
        give_up_s = time.monotonic() + 20
        seen: set[int] = set()
        while len(seen) < 2000:
            assert time.monotonic() < give_up_s
            for record in read(board):
                assert record.prompt_tokens == record.generation_tokens == int(record.request_id)
                seen.add(record.prompt_tokens)
    finally:
        writer.kill()
        writer.join()
