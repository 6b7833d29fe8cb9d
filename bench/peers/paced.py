"""A simulated engine inside of an asyncio server: a word of every running request each step.

Steps follow each other without drift, one that comes late is not waited for, and a request that
comes during a step joins with the next: all as in fastserve's own simulated engine. A request's
words go to a function, called in the step.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

WORDS = (" Hello", " world", " and", " all", " who", " live", " in", " it")


class PacedEngine:
    """`run` is called with a function that gets each word, and whether it is the last."""

    def __init__(self, *, step_s: float) -> None:
        self._step_s = step_s
        # Each request's function, and how many words are left for it.
        self._running: dict[Callable[[str, bool], None], int] = {}
        self._waiting: dict[Callable[[str, bool], None], int] = {}
        self._stepping: asyncio.Task[None] | None = None

    def run(self, sink: Callable[[str, bool], None], *, tokens: int) -> None:
        """Generate that many words; the first comes at the end of the next step."""
        self._waiting[sink] = tokens
        if self._stepping is None:
            self._stepping = asyncio.get_running_loop().create_task(self._step())

    def abort(self, sink: Callable[[str, bool], None]) -> None:
        self._waiting.pop(sink, None)
        self._running.pop(sink, None)

    async def stream(self, *, tokens: int) -> AsyncIterator[tuple[str, bool]]:
        """The words as they come: how async frameworks are fed."""
        queue: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()

        def sink(word: str, is_last: bool) -> None:
            queue.put_nowait((word, is_last))

        self.run(sink, tokens=tokens)
        try:
            is_last = False
            while not is_last:
                word, is_last = await queue.get()
                yield word, is_last
        finally:
            self.abort(sink)

    async def whole(self, *, tokens: int) -> str:
        """All words at once, when they are there."""
        words: list[str] = []
        done = asyncio.get_running_loop().create_future()

        def sink(word: str, is_last: bool) -> None:
            words.append(word)
            if is_last and not done.done():
                done.set_result(None)

        self.run(sink, tokens=tokens)
        try:
            await done
        finally:
            self.abort(sink)
        return "".join(words)

    async def _step(self) -> None:
        next_s = time.monotonic()
        while self._running or self._waiting:
            self._running |= self._waiting
            self._waiting.clear()
            now_s = time.monotonic()
            next_s = max(next_s + self._step_s, now_s)
            # Also without a pause the loop must have its turn.
            await asyncio.sleep(next_s - now_s)
            for sink, left in list(self._running.items()):
                if left == 1:
                    del self._running[sink]
                else:
                    self._running[sink] = left - 1
                sink(WORDS[left % len(WORDS)], left == 1)
        self._stepping = None
