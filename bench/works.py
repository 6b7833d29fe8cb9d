"""What is asked of every server: the table of works.

Change the table and everything else follows: what is run, reported and drawn.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`concurrency` clients who ask for `tokens` tokens each, again and again.

    `step_ms` is how long the simulated engine takes for a token of every running request; 0 is an
    engine that never makes anyone wait.
    """

    stream: bool
    tokens: int
    step_ms: float
    concurrency: int

    @property
    def kind(self) -> str:
        return f"{'s' if self.stream else 'n'}{self.tokens}"

    @property
    def name(self) -> str:
        return f"{self.kind} step {self.step_ms:g} ms c={self.concurrency}"

    @property
    def answer_s(self) -> float:
        """How long an answer takes at least."""
        return self.tokens * self.step_ms / 1000


# fmt: off
WORKS = (
    Work(stream=True,  tokens=64, step_ms=10, concurrency=64),
    Work(stream=True,  tokens=64, step_ms=10, concurrency=256),
    Work(stream=True,  tokens=64, step_ms=10, concurrency=1024),
    Work(stream=True,  tokens=64, step_ms=50, concurrency=1024),
    Work(stream=True,  tokens=64, step_ms=0,  concurrency=64),
    Work(stream=False, tokens=1,  step_ms=0,  concurrency=64),
    Work(stream=False, tokens=64, step_ms=0,  concurrency=64),
)
# fmt: on
