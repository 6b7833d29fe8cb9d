"""The one thread that talks to TensorRT-LLM: an event loop, with all live requests on it.

The library wants it so: a result belongs to the loop that runs when it is made, one loop is woken
for all results of a step, and its sockets are not for several threads. So the thread makes the LLM,
before its loop runs, submits, aborts, reads the results and shuts the LLM down.

The stepping thread posts commands, a batch for each wake-up, and takes deltas when `fd` is
readable. A result that was aborted is still read to its end, and what it says is dropped.

Knows nothing of lanes, of steps or of what a delta is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from fastserve.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from fastserve.engine.trtllm_api import LLM, RequestOutput
    from fastserve.engine.trtllm_results import Cursor, Delta
    from fastserve.generation import RequestId

log = get_logger("engine")


class GenerationLoop:
    """The thread, and both ends of what crosses to it. It lives until `close`."""

    def __init__(
        self, make_llm: Callable[[], LLM], *, is_fatal: Callable[[BaseException], bool]
    ) -> None:
        """Start to make the LLM. `is_fatal`: whether an exception is the end of the engine."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when there are deltas, when the LLM is made, and when `error` is set."""
        self.llm: LLM | None = None
        self.error: BaseException | None = None
        """What ended the engine, or kept it from starting."""
        self._make_llm = make_llm
        self._is_fatal = is_fatal
        self._deltas: deque[Delta] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._posted = False

        # The loop's own: nothing here is touched by another thread.
        self._loop = asyncio.new_event_loop()
        self._results: dict[RequestId, RequestOutput] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._announced = False

        self._thread = threading.Thread(target=self._run, name="trtllm", daemon=True)
        self._thread.start()

    # --- for the stepping thread ---

    def submit(
        self,
        request_id: RequestId,
        prompt: list[int],
        sampling_params: object,
        *,
        cursor: Cursor,
        more: dict[str, object] | None = None,
    ) -> None:
        """Generate. What comes of it, refusals too, comes as deltas.

        `more`: arguments of generate_async that not every version has.
        """
        self._post(lambda: self._generate(request_id, prompt, sampling_params, cursor, more or {}))

    def abort(self, request_ids: Collection[RequestId]) -> None:
        """Stop these. Deltas that are already under way may still come."""
        ids = list(request_ids)
        self._post(lambda: self._abort(ids))

    def take(self) -> list[Delta]:
        """Return the deltas since the last call, and make `fd` unreadable."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        taken: list[Delta] = []
        while self._deltas:
            taken.append(self._deltas.popleft())
        return taken

    def close(self, *, orderly: bool, timeout_s: float) -> bool:
        """End the thread, and the LLM too if `orderly`; return whether it did within `timeout_s`.

        If not, the thread is left where it stands, to end with the process.
        """
        self._post(self._shut_down if orderly else self._loop.stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        os.close(self.fd)
        return True

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        if not self._posted:
            self._posted = True
            # A closed loop refuses: the thread has ended, and `error` says why.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._obey)

    # --- on the thread ---

    def _run(self) -> None:
        try:
            self.llm = self._make_llm()
            self._announce()
            self._loop.run_forever()
        # Whatever it is, the stepping thread must not wait for ever.
        except BaseException as error:
            self._die(error)
        finally:
            self._end_readers()
            self._loop.close()

    def _end_readers(self) -> None:
        for reader in self._readers:
            reader.cancel()
        if self._readers:
            ending = asyncio.gather(*self._readers, return_exceptions=True)
            self._loop.run_until_complete(ending)

    def _obey(self) -> None:
        # Before the commands are read: one that comes later schedules the next call.
        self._posted = False
        while self._commands:
            self._commands.popleft()()

    def _generate(
        self,
        request_id: RequestId,
        prompt: list[int],
        sampling_params: object,
        cursor: Cursor,
        more: dict[str, object],
    ) -> None:
        if self.error is not None:
            return
        assert self.llm is not None, "no command is obeyed before the LLM is made"
        try:
            result = self.llm.generate_async(
                {"prompt_token_ids": prompt},
                sampling_params=sampling_params,
                streaming=True,
                **more,
            )
        except Exception as error:
            self._fail(error, cursor, invalid=isinstance(error, ValueError))
            return
        self._results[request_id] = result
        reader = self._loop.create_task(self._read(request_id, result, cursor))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    async def _read(self, request_id: RequestId, result: RequestOutput, cursor: Cursor) -> None:
        """Hand on what `result` says, until it ends; an aborted one says nothing any more."""
        try:
            async for response in result:
                if self._results.get(request_id) is not result:
                    continue
                if delta := cursor.advance(response.outputs[0]):
                    self._hand_on(delta)
                    if delta.finish is not None:
                        del self._results[request_id]
        except Exception as error:
            if self._results.get(request_id) is result:
                self._fail(error, cursor)
            elif self._is_fatal(error):
                self._die(error)
        if self._results.get(request_id) is result:
            del self._results[request_id]
            self._hand_on(cursor.fail("TensorRT-LLM ended the request without a reason"))

    def _abort(self, request_ids: list[RequestId]) -> None:
        for request_id in request_ids:
            result = self._results.pop(request_id, None)
            if result is None:
                continue
            try:
                result.abort()
            except Exception as error:
                log.warning_burst("abort failed", id=request_id, error=repr(error))
                if self._is_fatal(error):
                    self._die(error)

    def _fail(self, error: Exception, cursor: Cursor, *, invalid: bool = False) -> None:
        """End one request, or the engine."""
        if self._is_fatal(error):
            self._die(error)
            return
        delta = cursor.fail(f"{type(error).__name__}: {error}", invalid=invalid)
        # What failed may still run there, and would to its end.
        self._abort([delta.request_id])
        self._hand_on(delta)

    def _die(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._announce()

    def _shut_down(self) -> None:
        assert self.llm is not None, "no command is obeyed before the LLM is made"
        try:
            self.llm.shutdown()
        except Exception as error:
            log.warning("shutdown failed", error=repr(error))
        self._loop.stop()

    def _hand_on(self, delta: Delta) -> None:
        """Keep `delta`, and announce it after whatever else this round of the loop brings.

        All results of an engine step are woken in one round; so they become one step here, too.
        What comes after the engine's end is not the request's own, and is not told as such.
        """
        if self.error is not None:
            return
        self._deltas.append(delta)
        if not self._announced:
            self._announced = True
            self._loop.call_soon(self._announce)

    def _announce(self) -> None:
        self._announced = False
        os.eventfd_write(self.fd, 1)
