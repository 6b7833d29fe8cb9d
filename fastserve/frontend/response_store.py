"""The responses that clients may come back to, where every acceptor finds them: a file for each.

A file is written under another name and then renamed, so nobody reads half of one. Its name is the
response's id, which nobody can guess, and which is checked before it becomes part of a path. Each
acceptor has a share of its own, by the lane in the ids, and removes the oldest of that when it is
full. So nothing is ever searched: storing costs 50 to 100 us, most of it the kernel's.

Knows nothing of what is in a response.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastserve.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = get_logger("frontend")

# The name of the folder, in the run directory.
FOLDER = "responses"

_ID = re.compile("resp_[0-9a-f]{48}")
_PART = ".part"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Of one acceptor's share; `record_bytes_max` is of one response and its conversation.

    The settings of [responses], which say what they are. A predecessor of the acceptor that still
    drains is not counted.
    """

    records_max: int = 4096
    bytes_max: int = 16 << 20
    record_bytes_max: int = 1 << 20
    age_max_s: float = 24 * 3600.0


def new_response_id(*, lane: int = 0) -> str:
    """An id that nobody can guess: the lane, and 184 random bits."""
    return f"resp_{lane:02x}{secrets.token_hex(23)}"


class ResponseStore:
    """The records of one server, by id; every acceptor has one of these over the same folder."""

    def __init__(
        self,
        folder: Path,
        *,
        lane: int,
        limits: StoreLimits | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`lane` names the share; an earlier incarnation's is taken over.

        `now` tells the time as files do, in seconds since 1970.
        """
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._lane = lane
        self._limits = limits or StoreLimits()
        self._now = now
        # (stored at, bytes, path) of ours, the oldest first.
        self._ours: deque[tuple[float, int, Path]] = deque()
        self._num_bytes = 0
        for stored_s, size, path in sorted(map(_found, folder.glob(f"resp_{lane:02x}*"))):
            self._remember(stored_s, size, path)

    def new_id(self) -> str:
        """Make an id for a response of this acceptor."""
        return new_response_id(lane=self._lane)

    def put(self, response_id: str, record: bytes) -> bool:
        """Keep a record of an id that was made here; return whether it is kept.

        One that is too large is not; what it takes the place of is gone.
        """
        assert response_id.startswith(f"resp_{self._lane:02x}"), response_id
        limits = self._limits
        if not limits.records_max or len(record) > min(limits.record_bytes_max, limits.bytes_max):
            return False
        path = self._folder / response_id
        part = path.with_suffix(_PART)
        now_s = self._now()
        try:
            part.write_bytes(record)
            os.utime(part, (now_s, now_s))
            part.rename(path)
        except OSError as error:
            # The answer is none the worse for it: it says that it is not stored.
            log.warning_burst("a response could not be stored", error=str(error))
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        self._remember(now_s, len(record), path)
        return True

    def get(self, response_id: str) -> bytes | None:
        """The record of that id; None if there is none, or none any more."""
        if not _ID.fullmatch(response_id):
            return None
        path = self._folder / response_id
        try:
            if path.stat().st_mtime < self._now() - self._limits.age_max_s:
                return None
            return path.read_bytes()
        except OSError:
            return None

    def delete(self, response_id: str) -> bool:
        """Forget a record, whoever stored it; return whether there was one."""
        if self.get(response_id) is None:
            return False
        try:
            (self._folder / response_id).unlink()
        except FileNotFoundError:
            return False  # somebody else was faster
        return True

    def _remember(self, stored_s: float, size: int, path: Path) -> None:
        """Take a record into our share, and remove what is then too old or too much."""
        self._ours.append((stored_s, size, path))
        self._num_bytes += size
        oldest_s = self._now() - self._limits.age_max_s
        while self._ours and (
            len(self._ours) > self._limits.records_max
            or self._num_bytes > self._limits.bytes_max
            or self._ours[0][0] < oldest_s
        ):
            _, old_size, old_path = self._ours.popleft()
            self._num_bytes -= old_size
            # Where it was deleted before, it was counted until now.
            with contextlib.suppress(OSError):
                old_path.unlink()


def _found(path: Path) -> tuple[float, int, Path]:
    """A file that an earlier incarnation left; one that has just gone is as good as empty."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0.0, 0, path
    return status.st_mtime, status.st_size, path
