"""The last requests and where their time went: a ring of records for each acceptor, shared by all.

Each acceptor writes its own ring, and whoever is asked reads them all; reading takes nothing away.
A record is written in one copy and ends in a checksum, so one that is being written, or whose
writer was killed in the middle of it, is never taken for whole: no lock, and no reliance on the
order in which another core sees writes. A successor goes on where its predecessor stopped.

Knows nothing of HTTP. Writing a record costs about 3 microseconds, once a request.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from fastserve.metrics.catalog import ENDPOINTS, FINISH_REASONS

if TYPE_CHECKING:
    from collections.abc import Iterator

# The number of the record (from 1), when it came and how long after that (NaN: never), counts,
# status, endpoint and finish reason by their index, streamed or not, ids.
_BODY = struct.Struct("<Qd6dIIIIHBB?128s32s")
_TIMES = struct.Struct("<Qd6d")
_CHECK = struct.Struct("<I")
RECORD_BYTES = 256
_COUNT = struct.Struct("<Q")
_HEADER_BYTES = 64
assert _BODY.size + _CHECK.size <= RECORD_BYTES

_NONE = 255
_ENDPOINT_INDEX = {endpoint: index for index, endpoint in enumerate(ENDPOINTS)}
_FINISH_INDEX = {reason: index for index, reason in enumerate(FINISH_REASONS)}


class RequestRecord(NamedTuple):
    """One request that has ended: a tuple, since one is made for each, and its numbers go first.

    `received_unix_s` is when it had come. The other times are seconds after that; NaN is for what
    it did not come to. `finish_reason` is the first choice's, "" if there is none.
    """

    received_unix_s: float
    prepared_s: float
    submitted_s: float
    scheduled_s: float
    first_token_s: float
    last_token_s: float
    finished_s: float
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    num_choices: int
    status: int
    endpoint: str
    finish_reason: str
    stream: bool
    request_id: str
    trace_id: str


_NUMBERS = RequestRecord._fields[:12]


def bytes_of(records: int) -> int:
    """How long a ring of so many records is."""
    return _HEADER_BYTES + records * RECORD_BYTES if records else 0


class RecentRequests:
    """One acceptor's ring, in memory of `bytes_of` that capacity."""

    def __init__(self, memory: memoryview[int]) -> None:
        self._memory = memory
        self._capacity = (len(memory) - _HEADER_BYTES) // RECORD_BYTES if memory else 0
        self._count = self._written() if self._capacity else 0

    def write(self, record: RequestRecord) -> None:
        """Put `record` in the place of the oldest. For the ring's one writer."""
        if not self._capacity:
            return
        self._count += 1
        body = _BODY.pack(
            self._count,
            *record[: len(_NUMBERS)],
            _ENDPOINT_INDEX.get(record.endpoint, _NONE),
            _FINISH_INDEX.get(record.finish_reason, _NONE),
            record.stream,
            record.request_id.encode(),
            record.trace_id.encode(),
        )
        at = self._place(self._count)
        whole = body + _CHECK.pack(zlib.crc32(body))
        self._memory[at : at + len(whole)] = whole
        _COUNT.pack_into(self._memory, 0, self._count)

    def newest(self) -> Iterator[Ended]:
        """Yield what is there, the newest first; what is being written is left out."""
        last = self._written() if self._capacity else 0
        for number in range(last, max(last - self._capacity, 0), -1):
            at = self._place(number)
            whole = bytes(self._memory[at : at + _BODY.size + _CHECK.size])
            body = whole[: _BODY.size]
            if _CHECK.unpack_from(whole, _BODY.size)[0] != zlib.crc32(body):
                continue
            found, received_unix_s, *_, finished_s = _TIMES.unpack_from(body)
            if found == number:  # or else a newer one has taken its place
                yield Ended(received_unix_s + finished_s, body)

    def _written(self) -> int:
        count: int = _COUNT.unpack_from(self._memory, 0)[0]
        return count

    def _place(self, number: int) -> int:
        return _HEADER_BYTES + (number - 1) % self._capacity * RECORD_BYTES


class Ended(NamedTuple):
    """A record that is not read yet, and when its request ended."""

    at_unix_s: float
    body: bytes

    def record(self) -> RequestRecord:
        """Read it."""
        _, *values, endpoint, finish, stream, request_id, trace_id = _BODY.unpack(self.body)
        return RequestRecord(
            **dict(zip(_NUMBERS, values, strict=True)),
            endpoint=ENDPOINTS[endpoint] if endpoint != _NONE else "other",
            finish_reason=FINISH_REASONS[finish] if finish != _NONE else "",
            stream=stream,
            request_id=request_id.rstrip(b"\0").decode(),
            trace_id=trace_id.rstrip(b"\0").decode(),
        )
