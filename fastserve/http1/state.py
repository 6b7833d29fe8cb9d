"""The states of a connection, and which may follow which."""

from __future__ import annotations

import enum


# An IntEnum, for its hash and comparison are C: an Enum's would cost each request a microsecond.
class State(enum.IntEnum):
    """Where a connection is in its life."""

    NEW = enum.auto()  # accepted; nothing has come
    IDLE = enum.auto()  # between an answer and the next request
    HEAD = enum.auto()  # part of a head has come
    BODY = enum.auto()  # a head has come, and not all of its body
    ANSWERING = enum.auto()  # the application has the request
    FLUSHING = enum.auto()  # answered; too much of it still waits for the client
    LINGERING = enum.auto()  # said the last word: reads on for a moment and drops it, then closes
    CLOSED = enum.auto()


NEXT = {
    State.NEW: {State.HEAD, State.BODY, State.LINGERING, State.CLOSED},
    State.IDLE: {State.HEAD, State.BODY, State.LINGERING, State.CLOSED},
    State.HEAD: {State.BODY, State.LINGERING, State.CLOSED},
    State.BODY: {State.ANSWERING, State.LINGERING, State.CLOSED},
    State.ANSWERING: {State.IDLE, State.FLUSHING, State.LINGERING, State.CLOSED},
    State.FLUSHING: {State.IDLE, State.LINGERING, State.CLOSED},
    State.LINGERING: {State.CLOSED},
    State.CLOSED: set[State](),
}
