"""The supervisor's one wait: of events that come together, a later one may have become void."""

from __future__ import annotations

import selectors
from functools import partial

from fastserve.control import ControlSocket, Stop
from fastserve.supervisor.supervisor import Supervisor


def test_an_event_about_what_an_earlier_one_has_closed_is_passed_over() -> None:
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._selector = selectors.DefaultSelector()
    ends: list[tuple[ControlSocket, ControlSocket]] = []
    for _ in range(2):
        ours, theirs = ControlSocket.pair()
        ends.append((ours, ControlSocket(theirs)))
        ends[-1][1].send(Stop())
    heard: list[int] = []

    def hear(which: int) -> None:
        """Whoever is first closes both: an exit does so with the control socket of a child."""
        heard.append(which)
        for ours, _ in ends:
            supervisor._selector.unregister(ours)
            ours.close()

    for which in range(2):
        supervisor._selector.register(ends[which][0], selectors.EVENT_READ, partial(hear, which))
    supervisor._poll(1.0)
    assert len(heard) == 1
    supervisor._selector.close()
    for _, end in ends:
        end.close()
