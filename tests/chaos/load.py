"""Clients that never rest: each asks, listens, perhaps leaves, and asks again; all in one thread.

They are told to hold and to go on, and remember how each request ended. Knows nothing of blows.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tests.chaos.asking import Ask, Ending, Heard, Verdict, judge
from tests.chaos.reading import hear
from tests.e2e.harness import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

# How long a client waits for the end of its answer; no server under any blow may need as long.
PATIENCE_S = 60.0
_KEEPS_CONNECTION = 0.4
_RETRY_S = 0.05
# The longest line is a chunk size or a header.
_LINE_BYTES_MAX = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a request ended, by the monotonic clock. `port` is the client's; 0: not connected."""

    began_s: float
    ended_s: float
    port: int
    verdict: Verdict

    @property
    def ending(self) -> Ending:
        return self.verdict.ending


class _Connection:
    """One connection, and how many requests it has had."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.port: int = writer.get_extra_info("sockname")[1]
        self.num_requests = 0


class Load:
    """`num_clients` clients of the server at `port`, which may change while they hold."""

    def __init__(
        self, make: Callable[[random.Random], Ask], *, seed: str, num_clients: int
    ) -> None:
        self.port = 0
        self.results: list[Result] = []
        self._make = make
        self._seed = seed
        self._num_clients = num_clients
        self._num_busy = 0
        self._loop = asyncio.new_event_loop()
        self._going = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a client does not stop"

    def go(self) -> None:
        self._loop.call_soon_threadsafe(self._going.set)

    def hold(self) -> None:
        """Begin no more requests; return once every one has ended."""
        self._loop.call_soon_threadsafe(self._going.clear)
        self.until_idle()

    def until_idle(self) -> None:
        # Whoever was let go before this call has begun when it comes back.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(PATIENCE_S)
        wait_until(lambda: self._num_busy == 0, deadline_s=2 * PATIENCE_S)

    def take(self) -> list[Result]:
        """Return the results since the last call. Call it while the clients hold."""
        results, self.results = self.results, []
        return results

    def ask(self, ask: Ask, *, share: float = 1.0) -> threading.Event:
        """One request more, on a connection of its own; set once a stream has begun.

        With a `share` below 1 it is never sent to its end, and its client waits for the
        connection's.
        """
        begun = threading.Event()

        async def once() -> None:
            self._num_busy += 1
            try:
                if share == 1.0:
                    _close(await self._perform(ask, None, begun=begun))
                else:
                    await self._send_part(ask, share)
            finally:
                self._num_busy -= 1

        asyncio.run_coroutine_threadsafe(once(), self._loop)
        return begun

    # ---- in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._live())
        self._loop.close()

    async def _live(self) -> None:
        self._stop = asyncio.Event()
        tasks = [
            asyncio.create_task(self._client(random.Random(f"{self._seed} client {number}")))
            for number in range(self._num_clients)
        ]
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, rng: random.Random) -> None:
        kept: _Connection | None = None
        while True:
            if not self._going.is_set():
                _close(kept)
                kept = None
                await self._going.wait()
            ask, keeps = self._make(rng), rng.random() < _KEEPS_CONNECTION
            self._num_busy += 1
            try:
                kept = await self._perform(ask, kept)
            finally:
                self._num_busy -= 1
            if not keeps:
                _close(kept)
                kept = None

    async def _perform(
        self, ask: Ask, kept: _Connection | None, *, begun: threading.Event | None = None
    ) -> _Connection | None:
        """Have one request answered; return the connection if it is good for another."""
        began_s = time.monotonic()
        connection, heard, ending = kept, Heard(), None
        try:
            async with asyncio.timeout(PATIENCE_S):
                if connection is None:
                    connection = _Connection(
                        *await asyncio.open_connection(
                            "127.0.0.1", self.port, limit=_LINE_BYTES_MAX
                        )
                    )
                ending = await _exchange(connection, ask, heard, begun=begun)
        except ConnectionRefusedError:
            ending = Ending.REFUSED
        except ConnectionError:
            pass  # while it connected or sent: nothing was heard
        except TimeoutError:
            ending = Ending.LATE
        verdict = Verdict(ending) if ending else judge(ask, heard)
        if verdict.ending is Ending.CUT and kept is not None and not heard.status:
            verdict = Verdict(Ending.STALE)
        self.results.append(
            Result(
                began_s=began_s,
                ended_s=time.monotonic(),
                port=connection.port if connection else 0,
                verdict=verdict,
            )
        )
        if verdict.ending in (Ending.ERROR, Ending.REFUSED):
            await asyncio.sleep(_RETRY_S)
        if heard.complete and not ending and heard.headers.get("connection") != "close":
            return connection
        _close(connection)
        return None

    async def _send_part(self, ask: Ask, share: float) -> None:
        began_s = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        request = ask.request()
        writer.write(request[: round(len(request) * share)])
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.transport.abort()
        self.results.append(
            Result(began_s=began_s, ended_s=time.monotonic(), port=0, verdict=Verdict(Ending.LEFT))
        )


async def _exchange(
    connection: _Connection, ask: Ask, heard: Heard, *, begun: threading.Event | None
) -> Ending | None:
    """Send and listen; LEFT if the client goes before the end."""
    connection.num_requests += 1
    connection.writer.write(ask.request())
    if ask.leaves_after is None:
        await hear(connection.reader, heard, on_event=begun.set if begun else _ignore)
        return None
    enough = asyncio.Event()
    if not ask.stream:
        asyncio.get_running_loop().call_later(ask.leaves_after / 1000, enough.set)

    def count() -> None:
        if len(heard.events) > (ask.leaves_after or 0):
            enough.set()

    listening = asyncio.ensure_future(hear(connection.reader, heard, on_event=count))
    waiting = asyncio.ensure_future(enough.wait())
    try:
        await asyncio.wait((listening, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = listening.done()
        for each in (listening, waiting):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await each
    return None if ended else Ending.LEFT


def _ignore() -> None:
    pass


def _close(connection: _Connection | None) -> None:
    if connection is not None:
        connection.writer.transport.abort()
