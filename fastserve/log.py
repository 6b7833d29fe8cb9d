"""Log lines: an event and its fields, one line each, whatever happens.

    12:00:03.120 acceptor-1 INFO request finished id=7f3a status=200 ttft_s=0.041

A line is one write of at most PIPE_BUF bytes, which no other process's line can come into the
middle of (POSIX, write()); so newlines are escaped, and what is too long is cut in its middle.
Logging never raises and never waits: a stderr that is closed or whose reader is stuck costs lines,
which are counted, and not requests. Built on `logging`, so that libraries' lines look the same.

An event is a constant; what varies is in the fields. What is expected is no error: `failed` knows.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import select
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from fastserve.errors import (
    EngineError,
    EngineStarting,
    Overloaded,
    RequestError,
    RequestTimeout,
    ShuttingDown,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    # The record, the process's name, the event and the fields, as one line.
    Render = Callable[[logging.LogRecord, str, str, "Fields"], bytes]

Fields = dict[str, object]

ROOT = "fastserve"

# Linux's PIPE_BUF. A pipe that polls as writable has room for as much.
LINE_BYTES_MAX = 4096
# A line that is too long is tried again with its values cut to these lengths in turn.
VALUE_CHARS_MAX = (2048, 512, 128, 32)
# How long a line waits for a full pipe. Once one was dropped, the next do not wait at all.
STDERR_WAIT_MS = 20
BURST_INTERVAL_S = 1.0
# Events are constants, so there are few. This bounds them even if one is not.
BURST_EVENTS_MAX = 256
# Frames of a traceback, the innermost kept; causes of an exception; members of a group.
FRAMES_MAX = 24
CAUSES_MAX = 4

STDERR_FD = 2

# What clients, load and an end that was asked for cause.
_EXPECTED = RequestError | Overloaded | RequestTimeout | ShuttingDown | EngineStarting

# What a value in key=value cannot hold without quotes.
SPECIAL = re.compile(r'[ "=\\]')


class Logger:
    """Writes events. Fields are keywords, their names as in metrics and settings."""

    __slots__ = ("_bursts", "_clock", "_logger")

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logging.getLogger(name)
        self._clock = clock
        self._bursts: dict[str, _Burst] = {}

    def debug(self, event: str, /, **fields: object) -> None:
        self._log(logging.DEBUG, event, fields)

    @property
    def shows_info(self) -> bool:
        """Whether `info` writes anything: for where its fields are many."""
        return self._logger.isEnabledFor(logging.INFO)

    def info(self, event: str, /, **fields: object) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """A bug: an error with the traceback of the exception that is being handled.

        A bug that every request meets is written at most once a second, as bursts are.
        """
        self._burst(logging.ERROR, event, fields, sys.exception())

    def crashed(self, event: str, error: BaseException, /, **fields: object) -> None:
        """A bug, outside an `except`: an error with the traceback of `error`."""
        self._log(logging.ERROR, event, fields, error)

    def failed(self, event: str, error: BaseException, /, **fields: object) -> None:
        """Something ended in `error`: as loud as it deserves.

        What clients, load and an orderly end cause is expected (INFO); what befalls an engine wants
        a look (WARNING); anything else is a bug (ERROR, with its traceback).
        """
        if isinstance(error, _EXPECTED):
            self._log(logging.INFO, event, {**fields, "error": summary(error)})
        elif isinstance(error, EngineError):
            self._log(logging.WARNING, event, {**fields, "error": summary(error)})
        else:
            self.crashed(event, error, **fields)

    def warning_burst(self, event: str, /, **fields: object) -> None:
        """A warning that may come in thousands: written at most once a second for each event.

        The next one written says how many were `suppressed` since.
        """
        self._burst(logging.WARNING, event, fields)

    def info_burst(self, event: str, /, **fields: object) -> None:
        """Something that anybody can cause in thousands, and is expected: as `warning_burst`."""
        self._burst(logging.INFO, event, fields)

    def _burst(
        self, level: int, event: str, fields: Fields, error: BaseException | None = None
    ) -> None:
        now_s = self._clock()
        burst = self._bursts.get(event)
        if burst is None:
            if len(self._bursts) >= BURST_EVENTS_MAX:
                self._bursts.clear()
            burst = self._bursts[event] = _Burst()
        if now_s < burst.quiet_until_s:
            burst.suppressed += 1
            return
        if burst.suppressed:
            fields["suppressed"] = burst.suppressed
        burst.suppressed = 0
        burst.quiet_until_s = now_s + BURST_INTERVAL_S
        self._log(level, event, fields, error)

    def _log(
        self, level: int, event: str, fields: Fields, error: BaseException | None = None
    ) -> None:
        if not self._logger.isEnabledFor(level):
            return
        # Not Logger.log: it walks the stack for the caller's line, which no line of ours shows.
        exc_info = (type(error), error, error.__traceback__) if error is not None else None
        record = logging.LogRecord(self._logger.name, level, "", 0, event, None, exc_info)
        record.__dict__["fields"] = fields
        self._logger.handle(record)


class _Burst:
    __slots__ = ("quiet_until_s", "suppressed")

    def __init__(self) -> None:
        self.quiet_until_s = float("-inf")
        self.suppressed = 0


def get_logger(name: str) -> Logger:
    """The logger of a module: `log = get_logger(__name__)`."""
    return Logger(name if name.partition(".")[0] == ROOT else f"{ROOT}.{name}")


def configure(
    *,
    process: str,
    level: str = "info",
    format: str = "text",  # noqa: A002 - the name of the setting
    fd: int = STDERR_FD,
) -> None:
    """Send this process's lines to `fd`, as `process` (as in `acceptor-0`). May be called again.

    `level` and `format` are as in the settings of [log]. The level is that of our own events;
    libraries are heard from WARNING on.
    """
    assert format in FORMATS, f"no such log format: {format}"
    if fd == STDERR_FD and sys.stderr is None:
        # The process was started without a stderr, so by now its number may be that of a socket.
        fd = os.open(os.devnull, os.O_WRONLY)
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, LineHandler)]:
        root.removeHandler(handler)
    root.addHandler(LineHandler(process=process, render=FORMATS[format], fd=fd))
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(level.upper())


def log_uncaught() -> None:
    """Have what escapes the main thread or another end as one line, not as a page on stderr.

    For the first lines of a process. Python's warnings become lines, too.
    """
    log = get_logger("uncaught")

    def main_thread(
        _kind: type[BaseException], error: BaseException, _traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, KeyboardInterrupt):
            log.crashed("uncaught exception", error)

    def other_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            name = args.thread.name if args.thread else None
            log.crashed("uncaught exception", args.exc_value, thread=name)

    sys.excepthook = main_thread
    threading.excepthook = other_thread
    logging.captureWarnings(True)


class LineHandler(logging.Handler):
    """Renders records and writes them: one write each, never waiting long, never raising."""

    def __init__(self, *, process: str, render: Render, fd: int) -> None:
        super().__init__()
        self._process = process
        self._render = render
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            written = self._write(self._line(record))
        except Exception:  # some object's __str__; there is nobody left to tell
            written = False
        self._dropped = 0 if written else self._dropped + 1

    def _line(self, record: logging.LogRecord) -> bytes:
        """The record in at most LINE_BYTES_MAX bytes, its values cut as far as that takes."""
        fields = _fields_of(record)
        if self._dropped:
            fields["lines_dropped"] = self._dropped
        event = _event_of(record)
        for chars_max in VALUE_CHARS_MAX:
            short = {name: _cut(value, chars_max) for name, value in fields.items()}
            line = self._render(record, self._process, str(_cut(event, chars_max)), short)
            if len(line) <= LINE_BYTES_MAX:
                return line
        # More fields than fit however short they are: at least the event.
        few: Fields = {"fields_dropped": len(fields)}
        return self._render(record, self._process, str(_cut(event, VALUE_CHARS_MAX[-1])), few)

    def _write(self, line: bytes) -> bool:
        """Whether all of `line` went out. A full pipe gets one short wait."""
        try:
            if not self._poll.poll(0 if self._dropped else STDERR_WAIT_MS):
                return False
            return os.write(self._fd, line) == len(line)
        except OSError:  # EPIPE: the reader is gone; EAGAIN, EBADF, ENOSPC: no better
            return False


# --- what a line says ---


def _event_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # a library's arguments that do not fit its own format
        return str(record.msg)


def _fields_of(record: logging.LogRecord) -> Fields:
    fields: Fields = dict(record.__dict__.get("fields", ()))
    if record.name.partition(".")[0] != ROOT:
        fields["logger"] = record.name
    if record.exc_info and (error := record.exc_info[1]) is not None:
        fields["error"] = summary(error)
        fields["traceback"] = _frames(error)
        fields |= _related(error)
    return fields


def summary(error: BaseException) -> str:
    """An exception in one line: its kind and what it says."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the error of an error
        return type(error).__name__


def _frames(error: BaseException) -> str:
    """The traceback as `file:line function > ...`, the innermost last."""
    frames = [
        f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{line} {frame.f_code.co_qualname}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return " > ".join(frames[-FRAMES_MAX:])


def _related(error: BaseException) -> Fields:
    """What the error came of, and what it is a group of."""
    causes: list[BaseException] = []
    cause = _cause(error)
    while cause is not None and len(causes) < CAUSES_MAX:
        causes.append(cause)
        cause = _cause(cause)
    members = error.exceptions[:CAUSES_MAX] if isinstance(error, BaseExceptionGroup) else ()
    related = {"cause": causes, "members": members}
    return {
        name: "; ".join(f"{summary(one)} ({_frames(one)})" for one in errors)
        for name, errors in related.items()
        if errors
    }


def _cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def _cut(value: object, chars_max: int) -> object:
    """A number, or a text that is cut in its middle where it is longer than `chars_max`."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    half = chars_max // 2
    return text if len(text) <= chars_max else f"{text[:half]}...{text[-half:]}"


def _text_line(record: logging.LogRecord, process: str, event: str, fields: Fields) -> bytes:
    clock = time.strftime("%H:%M:%S", time.localtime(record.created))
    words = [f"{clock}.{_milliseconds(record):03}", process, record.levelname, _escaped(event)]
    words += [f"{name}={_text_value(value)}" for name, value in fields.items()]
    return (" ".join(words) + "\n").encode()


def _json_line(record: logging.LogRecord, process: str, event: str, fields: Fields) -> bytes:
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    line: Fields = {
        "time": f"{clock}.{_milliseconds(record):03}Z",
        "process": process,
        "level": record.levelname.lower(),
        "event": event,
    }
    for name, value in fields.items():
        # A field must not pass itself off as the line's own.
        line[f"{name}_" if name in line else name] = _json_value(value)
    return (json.dumps(line) + "\n").encode()


def _milliseconds(record: logging.LogRecord) -> int:
    return int(record.created * 1000) % 1000


def _text_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(round(value, 6))
    text = str(value)
    plain = text.isprintable() and text and not SPECIAL.search(text)
    return text if plain else f'"{_escaped(text)}"'


def _json_value(value: object) -> object:
    if isinstance(value, float):
        # JSON has no infinities and no NaN; as a text they can at least be seen.
        return round(value, 6) if math.isfinite(value) else str(value)
    return value


def _escaped(text: str) -> str:
    """`text` as the inside of a JSON string; all ASCII where a character could move the cursor."""
    return json.dumps(text, ensure_ascii=not text.isprintable())[1:-1]


FORMATS: dict[str, Render] = {"text": _text_line, "json": _json_line}
