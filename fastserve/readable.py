"""Waiting for descriptors, whatever their numbers.

An engine's process may have thousands open, with its threads, its ranks and its GPUs, and select(2)
knows none above 1,023. But it waits for microseconds, where poll(2) takes whole milliseconds, and a
fast engine's step is shorter than that. So it is the one for as long as it can be.
"""

from __future__ import annotations

import select

_SELECT_FDS_MAX = 1024


def wait_readable(*fds: int, timeout_s: float) -> list[int]:
    """Wait until one of `fds` can be read, or has ended, for `timeout_s`; return which of them."""
    if max(fds) < _SELECT_FDS_MAX:
        return select.select(fds, (), (), timeout_s)[0]
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(timeout_s * 1e3)]
