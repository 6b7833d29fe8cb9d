"""The responses that clients may come back to, where every acceptor finds them: a file for each.

A file is written under another name and then renamed, so nobody reads half of one. Its name is the
response's id, which is random, and which is checked before it becomes part of a path. The oldest
go first when there are too many; an acceptor looks for that after so many of its own, so for a
moment there may be a few more than the limits say.

Knows nothing of what is in a response.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

log = get_logger("frontend")

# The name of the folder, in the run directory.
FOLDER = "responses"

_ID = re.compile("resp_[0-9a-f]{48}")
_PART = ".part"
# How many an acceptor stores before it looks whether there are too many.
_SWEEP_EVERY = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Of all acceptors together; `record_bytes_max` is of one response and its conversation.

    OpenAI keeps responses for 30 days, and vLLM for ever: both have more room than a run directory.
    """

    records_max: int = 4096
    bytes_max: int = 256 << 20
    record_bytes_max: int = 1 << 20
    age_max_s: float = 24 * 3600.0


def new_response_id() -> str:
    """An id that nobody can guess."""
    return f"resp_{secrets.token_hex(24)}"


class ResponseStore:
    """The records of one server, by id; every acceptor has one of these over the same folder."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: StoreLimits | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`now` tells the time as files do, in seconds since 1970."""
        self._folder = folder
        self._limits = limits or StoreLimits()
        self._now = now
        self._num_put = 0
        folder.mkdir(mode=0o700, exist_ok=True)

    def put(self, response_id: str, record: bytes) -> bool:
        """Keep a record; return whether it is kept. One that is too large is not."""
        assert _ID.fullmatch(response_id), response_id
        if len(record) > self._limits.record_bytes_max:
            return False
        path = self._folder / response_id
        part = path.with_suffix(_PART)
        try:
            part.write_bytes(record)
            now_s = self._now()
            os.utime(part, (now_s, now_s))
            part.rename(path)
        except OSError as error:
            # The answer is none the worse for it: it says that it is not stored.
            log.warning_burst("a response could not be stored", error=str(error))
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        self._num_put += 1
        if self._num_put % _SWEEP_EVERY == 0:
            self.sweep()
        return True

    def get(self, response_id: str) -> bytes | None:
        """The record of that id; None if there is none, or none any more."""
        if not _ID.fullmatch(response_id):
            return None
        path = self._folder / response_id
        try:
            if path.stat().st_mtime < self._now() - self._limits.age_max_s:
                path.unlink()
                return None
            return path.read_bytes()
        except OSError:
            return None

    def delete(self, response_id: str) -> bool:
        """Forget a record; return whether there was one."""
        if self.get(response_id) is None:
            return False
        with contextlib.suppress(FileNotFoundError):  # somebody else was faster
            (self._folder / response_id).unlink()
        return True

    def sweep(self) -> None:
        """Remove what is too old, and then the oldest of what is too much."""
        found = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                found.append((status.st_mtime, status.st_size, entry.path))
        oldest_s = self._now() - self._limits.age_max_s
        num_bytes = 0
        for index, (modified_s, size, path) in enumerate(sorted(found, reverse=True)):
            num_bytes += size
            too_many = index >= self._limits.records_max or num_bytes > self._limits.bytes_max
            if too_many or modified_s < oldest_s:
                with contextlib.suppress(FileNotFoundError):
                    Path(path).unlink()
