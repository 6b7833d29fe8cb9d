"""The run directory: where the lanes' sockets live, which only our own user can enter.

Its owner holds a lock on a file in it for as long as it lives; the kernel drops the lock however it
dies. So whoever can take the lock knows the directory for a leftover and may sweep it. A lock holds
across pid namespaces, where a recorded pid says nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path

from fastserve.errors import ConfigError

_PREFIX = "fastserve-run-"
_ADVICE = "name another with --run-directory, or mount a tmpfs there"
_LOCK = "lock"
# Where the acceptors store responses that clients may come back to.
_RESPONSES = "responses"
# A directory without a lock may just be in the making.
_MAKING_S = 60.0
# sockaddr_un.sun_path has 108 bytes with its NUL, and this follows the directory at most.
_PATH_BYTES_MAX = 108 - 1 - len("/lane-63-131071-9999")


class RunDirectory:
    """Made for one server; `close` removes it."""

    def __init__(self, path: Path, *, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, parent: str | None) -> RunDirectory:
        """Sweep `parent` (default: XDG_RUNTIME_DIR, or the directory for temporary files), and
        make a new run directory in it. Raises ConfigError."""
        try:
            base = Path(parent or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        except FileNotFoundError as error:
            raise ConfigError(
                "server.run_directory: there is no directory for temporary files that can be "
                f"written; {_ADVICE}"
            ) from error
        try:
            sweep(base)
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))  # 0700
            lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"server.run_directory: cannot make a directory in {base}: {error.strerror}; "
                f"{_ADVICE}"
            ) from error
        made = cls(path, lock=lock)
        if len(os.fsencode(path)) > _PATH_BYTES_MAX:
            made.close()
            raise ConfigError(
                f"server.run_directory: {base} is too long for sockets in it:"
                f" at most {_PATH_BYTES_MAX - len(path.name) - 1} bytes"
            )
        return made

    def close(self) -> None:
        _remove(self.path)
        os.close(self._lock)


def sweep(base: Path) -> None:
    """Remove the run directories in `base` whose owners are dead."""
    for path in base.glob(f"{_PREFIX}*"):
        if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
            _sweep_one(path)


def _sweep_one(path: Path) -> None:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        _remove_if_forgotten(path)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    except BlockingIOError:
        pass  # its owner lives
    finally:
        os.close(lock)


def _remove_if_forgotten(path: Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _MAKING_S:
            path.rmdir()


def _remove(path: Path) -> None:
    """Remove what we put there, and nothing else: whatever more there is keeps the directory."""
    with contextlib.suppress(OSError):
        for entry in (path / _RESPONSES).glob("resp_*"):
            entry.unlink(missing_ok=True)
        (path / _RESPONSES).rmdir()
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.is_socket() or entry.name == _LOCK:
                entry.unlink(missing_ok=True)
        path.rmdir()
