"""What a person at the terminal sees of a start: how far loading has come, and then the URL.

The ready line is the server's one line on stdout. Progress is one line on stderr that is drawn over
itself, and only where somebody looks; log lines that come between push it down.
"""

from __future__ import annotations

import sys
import time
from typing import Literal

_BAR_CELLS = 24
# Faster is a blur, and costs the engine, which waits for nobody, its supervisor's attention.
_REDRAW_S = 0.05


class Display:
    """`shown` is the setting server.progress."""

    def __init__(self, *, url: str, shown: Literal["auto", "on", "off"]) -> None:
        self._url = url
        self._on = shown == "on" or (shown == "auto" and sys.stderr.isatty())
        self._started_s = time.monotonic()
        self._drawn_s = 0.0
        self._drawn = False
        self._share = 0.0
        self.progress(None)

    def progress(self, share: float | None) -> None:
        """Draw that `share` (0 to 1) of the model is loaded, and how long it has taken. None: as
        much as before, since most of a start is not the reading of weights."""
        self._share = self._share if share is None else share
        now_s = time.monotonic()
        if not self._on or now_s - self._drawn_s < _REDRAW_S:
            return
        self._drawn_s = now_s
        self._drawn = True
        full = round(self._share * _BAR_CELLS)
        bar = "#" * full + "." * (_BAR_CELLS - full)
        elapsed_s = now_s - self._started_s
        sys.stderr.write(f"\r\x1b[Kloading the model [{bar}] {self._share:4.0%} {elapsed_s:.1f} s")
        sys.stderr.flush()

    def ready(self, model_name: str) -> None:
        """Say, once, where the server is."""
        self.close()
        elapsed_s = time.monotonic() - self._started_s
        print(  # noqa: T201 - the command's answer
            f"fastserve is ready: {self._url}/v1 serves {model_name} (after {elapsed_s:.1f} s)",
            flush=True,
        )

    def close(self) -> None:
        """Take the progress line away."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False
