"""What every child process does first, whatever it is for.

It takes its name, ties its life to the supervisor's, leaves the terminal's signals to it, and then
calls the entry point that its spec names as a string: so the supervisor never imports what its
children run. It ends by os._exit: no atexit hook, no thread and no library may hold it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from setproctitle import setproctitle

from fastserve import log as logging
from fastserve.control import ControlSocket, Crashed, Failed
from fastserve.errors import ConfigError, StartError

if TYPE_CHECKING:
    import socket
    from types import FrameType

log = logging.get_logger("process")

# Python's 700 would have it run for every few requests.
_GC_THRESHOLD = 20_000

# Linux, prctl(2).
_PR_SET_PDEATHSIG = 1

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CANNOT_START = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a child is. `name` is for logs ("acceptor-3"), `title` for ps ("fastserve: ...")."""

    name: str
    title: str
    target: str
    supervisor_pid: int
    own_session: bool
    log_level: str
    log_format: str


def enter(identity: Identity, control: socket.socket, arguments: object) -> None:
    """Become the child that `identity` describes; never returns."""
    code = EXIT_FAILED
    supervisor = ControlSocket(control)
    try:
        settle(identity)
        code = _run(identity, supervisor, arguments)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else EXIT_FAILED
    except BaseException as error:
        log.exception("crashed", pid=os.getpid(), next="this process exits; the supervisor decides")
        supervisor.send(Crashed(logging.summary(error)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def keep_memory() -> None:
    """Call once everything that stays has been made, before the first request.

    The collector never looks at it again, and what making it has left free goes back to the system
    (26 of an acceptor's 85 MB).
    """
    gc.collect()
    gc.freeze()
    # Requests leave no cycles behind; what the collector looks for is rare, so let it look rarely.
    gc.set_threshold(_GC_THRESHOLD, 20, 50)
    with contextlib.suppress(AttributeError):  # glibc's; musl has no such thing
        ctypes.CDLL(None).malloc_trim(0)


def entitle(title: str) -> None:
    """Show `title` in ps."""
    setproctitle(title)


def settle_rank(rank: int, *, log_level: str, log_format: str) -> None:
    """Become that rank of the engine, in a process that MPI's launcher has started.

    It ends when rank 0 says so or is gone. Its launcher passes on to it whatever signal it is sent
    itself, and the supervisor alone decides what those mean.
    """
    setproctitle(f"fastserve: rank {rank}")
    logging.configure(process=f"rank-{rank}", level=log_level, format=log_format)
    logging.log_uncaught()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def settle(identity: Identity) -> None:
    """Take the name, and tie this process to its parent, which `supervisor_pid` says."""
    if identity.own_session:
        os.setsid()
    setproctitle(identity.title)
    logging.configure(process=identity.name, level=identity.log_level, format=identity.log_format)
    logging.log_uncaught()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The supervisor may have died before the line above; then nobody would ever signal us.
    if os.getppid() != identity.supervisor_pid:
        raise SystemExit(EXIT_FAILED)
    # Ctrl-C reaches the whole foreground group; the supervisor alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(EXIT_OK)


def _run(identity: Identity, control: ControlSocket, arguments: object) -> int:
    module, _, function = identity.target.partition(":")
    try:
        entry_point = getattr(importlib.import_module(module), function)
        entry_point(control, arguments)
    except (StartError, ConfigError) as error:
        control.send(Failed(error.message))
        return EXIT_CANNOT_START
    return EXIT_OK
