"""Every limit of a connection, with its unit, its default and what happens when it is reached.

Knows nothing of how a limit is enforced.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """One connection holds at most a head, a body, and a buffer each way: these bound them all."""

    # The method, the target and the version, up to the end of the line: 414.
    target_bytes_max: int = 32_768
    # The whole head, its request line included: 431.
    header_bytes_max: int = 65_536
    # Fields of one head, or trailers of one body: 431.
    header_count_max: int = 256
    # After de-chunking: 413. A Content-Length above it is refused before the body is sent.
    body_bytes_max: int = 32 << 20
    # One line of chunk framing, extensions included (CVE-2024-22019): 400.
    chunk_line_bytes_max: int = 4_096
    # Framing that a chunked body may carry beyond 16 bytes a chunk, trailers included: 400.
    chunk_overhead_bytes_max: int = 16_384

    # From accept to the first byte: closed without an answer.
    first_byte_timeout_s: float = 10.0
    # From a head's first byte to its last, however it trickles (slowloris): 408.
    header_timeout_s: float = 10.0
    # From the end of the head to the end of the body: 408 ...
    body_timeout_s: float = 30.0
    # ... plus a second for as many bytes as this, so that a large body may take its time.
    body_bytes_per_s_min: int = 16_384
    # From an answer to the next request's first byte: closed. Longer than the idle times of load
    # balancers and client pools (60 s), for who closes first causes the other's failed request.
    keep_alive_timeout_s: float = 120.0
    # A client that takes none of its answer, or whose host acknowledges nothing: aborted.
    write_stall_timeout_s: float = 30.0
    # Reading on after the last answer, lest a reset overtake it (RFC 9112 9.6): closed.
    linger_timeout_s: float = 2.0
    # While draining, from accept to the first byte: closed.
    drain_first_byte_timeout_s: float = 1.0

    # Bytes of later requests held while one is answered: reading pauses.
    read_buffer_bytes_max: int = 65_536
    # Bytes of an answer that wait for the client, the high water: writers are told to hold back.
    write_buffer_bytes_max: int = 65_536
    # Exchanges on one connection; the last is answered with Connection: close. 0 is no limit.
    requests_per_connection_max: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and field.name != "requests_per_connection_max"):
                raise ValueError(f"{field.name}: {value} is not above 0")
