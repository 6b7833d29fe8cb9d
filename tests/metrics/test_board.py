"""The table by which acceptors share connections."""

from __future__ import annotations

import gc
import os
import select
import time

from fastserve.metrics.board import SEEN_WITHIN_S, Board


def test_the_least_loaded_is_one_that_was_seen() -> None:
    board = Board.make(3)
    slots = [board.slot(lane) for lane in range(3)]
    for slot, connections in zip(slots, (5, 2, 1), strict=True):
        slot.connections = connections
    slots[0].seen()
    slots[1].seen()
    now_ns = time.monotonic_ns()
    assert board.least_loaded(now_ns=now_ns) == (2, 1)
    slots[2].seen()
    assert board.least_loaded(now_ns=now_ns) == (1, 2)
    assert board.connections() == [5, 2, 1]


def test_with_nobody_seen_nobody_is_above_the_least() -> None:
    board = Board.make(2)
    board.slot(0).seen()
    later_ns = time.monotonic_ns() + int(2 * SEEN_WITHIN_S * 1e9)
    fewest, _ = board.least_loaded(now_ns=later_ns)
    assert fewest > 1 << 32


def test_a_successor_holds_no_connections() -> None:
    board = Board.make(1)
    board.slot(0).connections = 7
    assert board.slot(0).connections == 0


def test_a_nudge_wakes_the_one_it_is_for() -> None:
    board = Board.make(2)
    board.nudge(1)
    board.nudge(1)
    fds = [board.nudge_fd(lane) for lane in range(2)]
    assert select.select(fds, [], [], 0)[0] == [fds[1]]
    assert os.eventfd_read(fds[1]) == 2


def test_a_board_that_nobody_has_any_more_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    board = Board.make(3, recent_max=2)
    row = board.numbers(1)
    assert len(set(os.listdir("/proc/self/fd")) - before) >= 4
    del board
    gc.collect()
    row[0] = 7.0
    assert row[0] == 7.0, "who has a row can go on"
    del row
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before
