"""Log lines: one per event, whatever is in it and whatever becomes of stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import warnings
from typing import TYPE_CHECKING

import pytest

from fastserve.errors import (
    EngineDead,
    EngineStarting,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    ShuttingDown,
)
from fastserve.log import (
    BURST_EVENTS_MAX,
    LINE_BYTES_MAX,
    LineHandler,
    Logger,
    configure,
    get_logger,
    log_uncaught,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

log = get_logger("test")

# A test's own pipe is far smaller than what it would take to fill one that nobody reads.
PIPE_BYTES = 65_536


class Pipe:
    """Stands for stderr: what was written to it, line by line."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def read(self) -> bytes:
        data = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.reader, PIPE_BYTES):
                data += chunk
        return data

    def lines(self) -> list[str]:
        """The lines, less their time."""
        text = self.read().decode()
        assert text == "" or text.endswith("\n")
        return [re.sub(r"^\d\d:\d\d:\d\d\.\d{3} ", "", line) for line in text.splitlines()]

    def close(self) -> None:
        for end in (self.reader, self.writer):
            with contextlib.suppress(OSError):
                os.close(end)


def line_handlers() -> list[LineHandler]:
    return [one for one in logging.getLogger().handlers if isinstance(one, LineHandler)]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A pipe, where `configure(fd=pipe.writer)` may point; afterwards all is as it was."""
    root = logging.getLogger()
    level = root.level
    hooks = sys.excepthook, threading.excepthook
    pipe = Pipe()
    configure(process="acceptor-0", level="debug", fd=pipe.writer)
    yield pipe
    for handler in line_handlers():
        root.removeHandler(handler)
    root.setLevel(level)
    logging.getLogger("fastserve").setLevel(logging.NOTSET)
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)
    pipe.close()


def test_a_line_is_time_process_level_event_and_fields(pipe: Pipe) -> None:
    log.info("request finished", id="7f3a", status=200, ttft_s=0.0411111111)
    assert re.fullmatch(
        rb"\d\d:\d\d:\d\d\.\d{3} acceptor-0 INFO request finished "
        rb"id=7f3a status=200 ttft_s=0\.041111\n",
        pipe.read(),
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("naïve-é", "naïve-é"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "x"', r'"say \"x\""'),
        ("C:\\dir", r'"C:\\dir"'),
        ("a\nb\r\n", r'"a\nb\r\n"'),
        ("\x1b[31mred", r'"\u001b[31mred"'),
        ("a\u2028b\u202ec", r'"a\u2028b\u202ec"'),
        ("\udcff", r'"\udcff"'),
        (None, "none"),
        (True, "true"),
        (7, "7"),
        (0.1 + 0.2, "0.3"),
        (float("nan"), "nan"),
        ([1, "a b"], "\"[1, 'a b']\""),
        (b"x", "b'x'"),
    ],
)
def test_a_value_is_quoted_where_it_must_be(pipe: Pipe, value: object, shown: str) -> None:
    log.info("event", value=value)
    assert pipe.lines() == [f"acceptor-0 INFO event value={shown}"]


def test_an_event_cannot_break_its_line(pipe: Pipe) -> None:
    log.warning("two\nlines\x1b[2J 100%s")
    assert pipe.lines() == [r"acceptor-0 WARNING two\nlines\u001b[2J 100%s"]


def test_json_lines_have_the_same_in_json(pipe: Pipe) -> None:
    configure(process="engine", format="json", fd=pipe.writer)
    log.info(
        "event", text="a\n\u2028\udcff", n=1, x=0.5, no=None, inf=float("inf"), level="mine", o=[1]
    )
    line = pipe.read()
    assert line.count(b"\n") == 1
    fields = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", fields.pop("time"))
    assert fields == {
        "process": "engine",
        "level": "info",
        "event": "event",
        "text": "a\n\u2028\udcff",
        "n": 1,
        "x": 0.5,
        "no": None,
        "inf": "inf",
        "level_": "mine",
        "o": "[1]",
    }


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("debug", ["DEBUG", "INFO", "WARNING", "ERROR"]),
        ("info", ["INFO", "WARNING", "ERROR"]),
        ("warning", ["WARNING", "ERROR"]),
        ("error", ["ERROR"]),
    ],
)
def test_what_is_below_the_level_is_not_written(pipe: Pipe, level: str, heard: list[str]) -> None:
    configure(process="p", level=level, fd=pipe.writer)
    log.debug("event")
    log.info("event")
    log.warning("event")
    log.error("event")
    assert pipe.lines() == [f"p {name} event" for name in heard]


def test_configuring_again_replaces_what_was(pipe: Pipe) -> None:
    configure(process="second", fd=pipe.writer)
    log.info("event")
    assert pipe.lines() == ["second INFO event"]


def test_an_unknown_format_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no such log format: xml"):
        configure(process="p", format="xml")


def test_lines_of_libraries_look_the_same(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest has handlers of its own, which raise what the last line provokes.
    monkeypatch.setattr(logging.getLogger(), "handlers", line_handlers())
    library = logging.getLogger("library")
    library.info("chatter")
    library.warning("slow: %s", "a\nb")
    library.warning("%d arguments", "no number")
    assert pipe.lines() == [
        r"acceptor-0 WARNING slow: a\nb logger=library",
        "acceptor-0 WARNING %d arguments logger=library",
    ]


def raises_from(cause: Exception) -> None:
    try:
        raise cause
    except ValueError as error:
        raise RuntimeError("it\nbroke") from error


def test_an_exception_is_one_line_with_its_frames_and_its_cause(pipe: Pipe) -> None:
    try:
        raises_from(ValueError("the cause"))
    except RuntimeError:
        log.exception("request failed", id=1)
    here = r"tests/test_log\.py:\d+ "
    assert re.fullmatch(
        rf'acceptor-0 ERROR request failed id=1 error="RuntimeError: it\\nbroke" '
        rf'traceback="\S*{here}test_an_exception_\w+ > \S*{here}raises_from" '
        rf'cause="ValueError: the cause \(\S*{here}raises_from\)"',
        pipe.lines()[0],
    )


def test_a_group_names_its_members(pipe: Pipe) -> None:
    log.crashed("tasks failed", ExceptionGroup("two", [ValueError("a"), KeyError("b")]))
    assert "members=\"ValueError: a (); KeyError: 'b' ()\"" in pipe.lines()[0]


def test_an_exception_whose_text_raises_is_named_at_least(pipe: Pipe) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    log.failed("event", Mute())
    assert "ERROR event error=Mute " in pipe.lines()[0]


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (InvalidRequest("no"), "INFO"),
        (Overloaded("no", rejection="lane_full"), "INFO"),
        (RequestTimeout("no"), "INFO"),
        (ShuttingDown("no"), "INFO"),
        (EngineStarting("no"), "INFO"),
        (EngineDead("no"), "WARNING"),
        (ZeroDivisionError("no"), "ERROR"),
    ],
)
def test_what_is_expected_is_no_error(pipe: Pipe, error: Exception, level: str) -> None:
    log.failed("event", error, id=1)
    line = pipe.lines()[0]
    assert line.startswith(f'acceptor-0 {level} event id=1 error="{type(error).__name__}: no"')
    assert ("traceback=" in line) == (level == "ERROR")


def test_a_burst_is_one_line_a_second_for_each_event(pipe: Pipe) -> None:
    now_s = 0.0
    bursting = Logger("fastserve.test", clock=lambda: now_s)
    for now_s, event in [
        (10.0, "bad tag"),
        (10.0, "bad tag"),
        (10.5, "bad version"),
        (10.9, "bad tag"),
        (11.0, "bad tag"),
        (11.1, "bad tag"),
        (90.0, "bad tag"),
        (91.0, "bad tag"),
    ]:
        bursting.warning_burst(event, at=now_s)
    assert pipe.lines() == [
        "acceptor-0 WARNING bad tag at=10.0",
        "acceptor-0 WARNING bad version at=10.5",
        "acceptor-0 WARNING bad tag at=11.0 suppressed=2",
        "acceptor-0 WARNING bad tag at=90.0 suppressed=1",
        "acceptor-0 WARNING bad tag at=91.0",
    ]


def test_a_bug_that_every_request_meets_is_not_a_flood(pipe: Pipe) -> None:
    now_s = 10.0
    bursting = Logger("fastserve.test", clock=lambda: now_s)
    for number in range(1000):
        try:
            raise ValueError(f"the same again, {number}")
        except ValueError:
            bursting.exception("rendering failed", id=number)
    now_s = 11.0
    bursting.exception("rendering failed")
    first, second = pipe.lines()
    assert first.startswith("acceptor-0 ERROR rendering failed id=0 error=")
    assert "traceback=" in first
    assert second == "acceptor-0 ERROR rendering failed suppressed=999"


def test_events_that_are_no_constants_cost_bounded_memory(pipe: Pipe) -> None:
    for number in range(3 * BURST_EVENTS_MAX):
        log.warning_burst(f"event {number}")
    assert len(log._bursts) <= BURST_EVENTS_MAX


@pytest.mark.parametrize("lines_of", ["text", "json"])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"x": "y" * 1_000_000}, id="a long value"),
        pytest.param({"x": "\n" * 1_000_000}, id="a long value that grows when escaped"),
        pytest.param({f"x{n}": "é" * 3000 for n in range(20)}, id="many long values"),
        pytest.param({f"x{n}": n for n in range(2000)}, id="too many fields"),
    ],
)
def test_a_line_fits_the_write_that_no_other_process_can_break(
    pipe: Pipe, lines_of: str, fields: dict[str, object]
) -> None:
    configure(process="p", format=lines_of, fd=pipe.writer)
    log.info("event", **fields)
    line = pipe.read()
    assert len(line) <= LINE_BYTES_MAX
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert b"event" in line
    if lines_of == "json":
        assert json.loads(line)["event"] == "event"


def test_a_long_value_is_cut_in_its_middle(pipe: Pipe) -> None:
    log.info("event", x="a" * 5000 + "b" * 5000)
    assert re.search(r"x=a{1024}\.\.\.b{1024}$", pipe.lines()[0])


def test_a_reader_that_is_gone_costs_lines_only(pipe: Pipe) -> None:
    os.close(pipe.reader)
    log.info("event")
    log.exception("event")


def test_a_closed_stderr_costs_lines_only(pipe: Pipe) -> None:
    os.close(pipe.writer)
    log.info("event")


def test_a_stuck_reader_costs_lines_which_are_counted(pipe: Pipe) -> None:
    lines = 3 * PIPE_BYTES // 1000
    for _ in range(lines):
        log.info("event", x="y" * 1000)
    written = pipe.lines()
    log.info("event")
    log.info("event")
    assert pipe.lines() == [
        f"acceptor-0 INFO event lines_dropped={lines - len(written)}",
        "acceptor-0 INFO event",
    ]


def test_a_value_that_raises_costs_its_line_only(pipe: Pipe) -> None:
    class Raising:
        def __str__(self) -> str:
            raise ValueError

    log.info("lost", x=Raising())
    log.info("event")
    assert pipe.lines() == ["acceptor-0 INFO event lines_dropped=1"]


def test_without_a_stderr_its_number_is_not_written_to(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    configure(process="p")
    (handler,) = line_handlers()
    assert os.readlink(f"/proc/self/fd/{handler._fd}") == os.devnull
    os.close(handler._fd)


def test_what_is_not_caught_is_one_line(pipe: Pipe) -> None:
    log_uncaught()
    sys.excepthook(ValueError, ValueError("main"), None)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    threading.excepthook(
        threading.ExceptHookArgs([ValueError, ValueError("other"), None, threading.main_thread()])
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    main, other, warning = pipe.lines()
    assert main == 'acceptor-0 ERROR uncaught exception error="ValueError: main" traceback=""'
    assert other.startswith("acceptor-0 ERROR uncaught exception thread=MainThread ")
    assert "DeprecationWarning: old" in warning
