"""Large requests are read in a process of their own, one after the other.

A body of megabytes takes seconds to become tokens. In a thread that would not block the loop, but
each list of a million numbers that is made or freed holds the interpreter for 10 to 40 ms, and
every stream with it. Here only bytes cross: the body, and what was made of it, its tokens packed.

An acceptor starts the process when it first needs it, which takes about a second and 60 MB; it runs
at a lower priority and ends with the acceptor. What crosses is pickled by us, for us, over a pipe
that nobody else has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fastserve.errors import FastserveError, GenerationFailed, Overloaded
from fastserve.log import get_logger
from fastserve.process import Identity, settle

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from fastserve.frontend.model import Model

log = get_logger("frontend")

T = TypeVar("T")

_SPAWN = multiprocessing.get_context("spawn")

# A body of 32 MiB takes 20 s of one core. A process that takes longer than this is killed.
_TIMEOUT_S = 180.0

# Of the scale to 19: the engine and the acceptors' loops come first where cores are few.
_NICE = 10


@dataclass(frozen=True, slots=True)
class Bug:
    """What came of work that failed otherwise than on purpose: its traceback."""

    text: str


class _Worker(NamedTuple):
    """The process, and our end of the pipe to it."""

    process: SpawnProcess
    pipe: Connection


class Preparer:
    """The acceptor's side. `identity` is the process's, but for its parent, which is us."""

    def __init__(
        self, *, name: str, title: str, log_level: str, log_format: str, waiting_bytes_max: int
    ) -> None:
        """`waiting_bytes_max`: of the bodies that wait and the one that is read, together."""
        self._waiting_bytes_max = waiting_bytes_max
        self._waiting_bytes = 0
        self._counting = threading.Lock()
        self._identity = Identity(
            name=name,
            title=title,
            target="",
            supervisor_pid=os.getpid(),
            own_session=False,
            log_level=log_level,
            log_format=log_format,
        )
        # One thread, which waits for the one process; and the queue of what is to be done.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="preparer")
        self._worker: _Worker | None = None
        self._model: Model | None = None

    @staticmethod
    def takes(work: Callable[[bytes, Model], object]) -> bool:
        """Whether this can be done elsewhere: a function, which has no state of ours."""
        return isinstance(work, FunctionType)

    def submit(
        self,
        work: Callable[[bytes, Model], T],
        body: bytes,
        model: Model,
        *,
        wanted: Callable[[], bool],
    ) -> Future[T]:
        """Do `work` when its turn comes, if it is still `wanted` then.

        The future has the work's result or its FastserveError; GenerationFailed if the process
        died of it, or it is not wanted any more. Raises Overloaded.
        """
        self._count(len(body))
        future = self._thread.submit(self._run, work, body, model, wanted)
        future.add_done_callback(lambda _: self._count(-len(body)))
        return future

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            if num_bytes > 0 and self._waiting_bytes + num_bytes > self._waiting_bytes_max:
                raise Overloaded(
                    "too many large requests wait to be read", rejection="large_requests"
                )
            self._waiting_bytes += num_bytes

    def close(self) -> None:
        """End the process; what is not done yet never will be."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._kill()

    def _run(
        self,
        work: Callable[[bytes, Model], T],
        body: bytes,
        model: Model,
        wanted: Callable[[], bool],
    ) -> T:
        if not wanted():
            raise GenerationFailed("nobody waits for this request any more")
        watch = threading.Timer(_TIMEOUT_S, self._time_is_up)
        watch.daemon = True
        watch.start()
        try:
            reply: T | FastserveError | Bug = self._ask((work, body), model)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._kill()
            log.warning_burst("the process for large requests died", error=repr(error))
            raise GenerationFailed("the process that reads large requests died") from error
        finally:
            watch.cancel()
        if isinstance(reply, Bug):
            raise RuntimeError(reply.text)
        if isinstance(reply, FastserveError):
            raise reply
        return reply

    def _ask(self, question: object, model: Model) -> Any:  # noqa: ANN401 (what the work makes)
        if self._worker is None or not self._worker.process.is_alive() or self._model is not model:
            self._kill()
            self._worker, self._model = self._started(model), model
        self._worker.pipe.send(question)
        return self._worker.pipe.recv()

    def _started(self, model: Model) -> _Worker:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(
            target=main, args=(theirs, self._identity, model), name=self._identity.name, daemon=True
        )
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _time_is_up(self) -> None:
        # Whoever waits for its reply reads the end of the pipe then, and sees to the rest.
        worker = self._worker
        if worker is not None:
            worker.process.kill()

    def _kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()


def main(pipe: Connection, identity: Identity, model: Model) -> None:
    """Be that process: answer until the pipe is closed."""
    settle(identity)
    os.nice(_NICE)
    with contextlib.suppress(EOFError, OSError):
        while True:
            work, body = pipe.recv()
            pipe.send(_done(work, body, model))


def _done(work: Callable[[bytes, Model], object], body: bytes, model: Model) -> object:
    try:
        return work(body, model)
    except FastserveError as error:
        return error.with_traceback(None)
    except Exception:
        return Bug(traceback.format_exc())
