"""Clients that are slow to read, and streams that are slow to speak."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest

from tests.e2e.harness import Server, wait_until
from tests.e2e.scripted import assert_settled, tokens
from tests.e2e.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

PING_INTERVAL_S = 0.2
WRITE_STALL_TIMEOUT_S = 2.0
# Events this long fill the kernel's buffers, which hold megabytes, in a fraction of a second.
NAME = "a-model-with-a-long-name-" * 40
CHOICES = 64


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(
        "--frontends", "1", "--engine", "sim", "--sim-step-ms", "1",
        "--served-model-name", NAME,
        "--lane-heartbeat-interval-s", "0.05",
        "--limits-sse-ping-interval-s", str(PING_INTERVAL_S),
        "--http-write-stall-timeout-s", str(WRITE_STALL_TIMEOUT_S),
    ) as server:  # fmt: skip
        yield server
        assert_settled(server)


def test_a_client_that_reads_slowly_and_steadily_is_not_cut_off(server: Server) -> None:
    """Progress is what counts, not that the buffers ever run dry."""
    script = tokens(" one", " two", " three") * 400
    with Wire(server.port, receive_bytes=32_768) as wire:
        wire.complete(script, stream=True, n=2 * CHOICES)
        received = bytearray()
        # 8 KB a tenth of a second for three times as long as a standstill may last.
        until_s = time.monotonic() + 3 * WRITE_STALL_TIMEOUT_S
        while time.monotonic() < until_s:
            received += wire.socket.recv(8_000)
            assert not received.endswith(b"0\r\n\r\n"), "too short an answer to show anything"
            time.sleep(0.1)
        while not received.endswith(b"0\r\n\r\n"):
            piece = wire.socket.recv(1 << 20)
            assert piece, "cut off"
            received += piece
    assert received.count(b'"finish_reason":"') == 2 * CHOICES


def test_a_slow_reader_gets_everything_in_fewer_chunks(server: Server) -> None:
    """And costs the acceptor little: what waits for it is text, not events."""
    acceptor = server.find("acceptor 0")
    with Wire(server.port) as warm:
        warm.complete(tokens("a", "b") * 20, stream=True, n=CHOICES).chunks()
    before_bytes = acceptor.memory_info().rss
    script = tokens(" one", " two", " three") * 150
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(Wire(server.port, receive_bytes=4096)) for _ in range(3)]
        for wire in readers:
            wire.complete(script, stream=True, n=CHOICES)
        wait_until(lambda: server.num_in_engine() == 3 * CHOICES)
        peak_bytes = 0
        while server.num_in_engine():
            peak_bytes = max(peak_bytes, acceptor.memory_info().rss)
        for wire in readers:
            _expect_all_of_it(wire.chunks(), script)
    # As events it would be more than 80 MB.
    assert peak_bytes - before_bytes < 20_000_000


def _expect_all_of_it(chunks: list[Any], script: list[int]) -> None:
    said = [""] * CHOICES
    reasons: list[str | None] = [None] * CHOICES
    count = 0
    for chunk in chunks:
        [choice] = chunk["choices"]
        assert reasons[choice["index"]] is None
        said[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
        count += bool(choice["text"])
    assert said == [" one two three" * 150] * CHOICES
    assert reasons == ["stop"] * CHOICES
    assert count < CHOICES * len(script) / 2


def test_who_never_reads_is_given_up(server: Server) -> None:
    with Wire(server.port, receive_bytes=4096) as wire:
        began_s = time.monotonic()
        wire.complete(stream=True, n=CHOICES, max_tokens=8000)
        wait_until(lambda: server.num_in_engine() == CHOICES)
        wait_until(lambda: server.num_in_engine() == 0, deadline_s=WRITE_STALL_TIMEOUT_S + 6)
        # The answer would have taken 8 s and more.
        assert WRITE_STALL_TIMEOUT_S < time.monotonic() - began_s < 7
    wait_until(lambda: "status=499 finish=abort" in server.log)


def test_a_silent_stream_is_kept_open_by_comments(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.complete(tokens("a", "b"), stream=True, sim={"delay_ms": 1000})
        assert wire.read_head() == 200
        blocks = list(wire.blocks())
    comments = [block for block in blocks if block.startswith(":")]
    # One for each interval in which nothing was said; the first may be cut short.
    assert 3 <= len(comments) <= 5
    assert blocks[: len(comments)] == comments
    texts = [orjson.loads(block.removeprefix("data: ")) for block in blocks[len(comments) : -1]]
    assert "".join(each["choices"][0]["text"] for each in texts) == "ab"


@pytest.mark.parametrize("fail_at", [None, 0])
def test_comments_are_nothing_to_the_client_library(server: Server, fail_at: int | None) -> None:
    """What fails once a comment is out is an event: the status was 200."""
    script = {"token_ids": tokens("a", "b"), "delay_ms": 600, "fail_at": fail_at}
    with server.client() as client:
        stream = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            extra_body={"sim": script},
        )
        if fail_at is not None:
            with pytest.raises(openai.APIError) as caught:
                list(stream)
            assert caught.value.code == "generation_failed"
            return
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ab"


def test_a_whole_answer_is_not_preceded_by_anything(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.complete(tokens("a"), sim={"delay_ms": 500})
        assert wire.read_json()["choices"][0]["text"] == "a"


def test_a_stream_that_speaks_gets_no_comments(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.complete(tokens("a") * 700, stream=True)
        wire.read_head()
        assert not [block for block in wire.blocks() if block.startswith(":")]
