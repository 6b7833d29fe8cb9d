"""How the load generator reads answers: the same whatever the slices they come in."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from fastserve.load.build import build
from tests.load.answers import BEGINNING, DONE, END, FINISH, chunk, needs_cc, stream, text, whole

pytestmark = needs_cc

OBJECT = (
    b'{"choices": [{"message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}], '
    b'"usage": {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}}'
)
FIRST = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'


def parse(answer: bytes, *, slice_bytes: int) -> dict[str, Any]:
    command = [str(build()), "parse", str(slice_bytes)]
    found = subprocess.run(command, input=answer, capture_output=True, check=True, timeout=30)
    result: dict[str, Any] = json.loads(found.stdout)
    return result


@pytest.mark.parametrize("slice_bytes", [1, 2, 7, 1 << 16])
@pytest.mark.parametrize(
    ("answer", "found"),
    [
        pytest.param(
            stream(FIRST, text("a"), text(" b"), FINISH, DONE),
            {"status": 200, "whole": 1, "events": 4, "chunks": 2, "finished": 1, "done": 1},
            id="a chat: the first and the last event have no text",
        ),
        pytest.param(
            stream(FIRST + text("a"), text("b") + FINISH + DONE),
            {"whole": 1, "events": 4, "chunks": 2, "finished": 1, "done": 1},
            id="several events in one HTTP chunk",
        ),
        pytest.param(
            stream(text("a")[:20], text("a")[20:], DONE[:9], DONE[9:]),
            {"whole": 1, "events": 1, "chunks": 1, "done": 1},
            id="one event in several HTTP chunks",
        ),
        pytest.param(
            stream(b": ping\n\n", text("a"), b"event: x\nid: 1\n\n", DONE),
            {"whole": 1, "events": 1, "chunks": 1, "done": 1},
            id="comments and events without data are none",
        ),
        pytest.param(
            stream(text("a").replace(b"\n", b"\r\n"), DONE.replace(b"\n", b"\r\n")),
            {"whole": 1, "events": 1, "chunks": 1, "done": 1},
            id="lines that end in CR LF",
        ),
        pytest.param(
            stream(text(r"say \"content\":\"x\" and \"finish_reason\":\"y\""), DONE),
            {"events": 1, "chunks": 1, "finished": 0},
            id="what reads like a key in a text is none",
        ),
        pytest.param(
            stream(b'data: {"choices":[{"delta":{"content":""},"logprobs":{"content":[]}}]}\n\n'),
            {"events": 1, "chunks": 0},
            id="the content of logprobs is a list",
        ),
        pytest.param(
            stream(b'data: {"choices": [{"text": "x", "finish_reason": "stop"}]}\n\n', DONE),
            {"events": 1, "chunks": 1, "finished": 1, "done": 1},
            id="a completion, with spaces",
        ),
        pytest.param(
            stream(b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'),
            {"events": 1, "chunks": 1},
            id="reasoning is text too",
        ),
        pytest.param(
            stream(text("a"), b'data: {"error":{"message":"engine_dead"}}\n\n'),
            {"whole": 1, "events": 2, "chunks": 1, "failed": 1, "done": 0},
            id="an error event",
        ),
        pytest.param(
            BEGINNING
            + b"5;name=value\r\ndata:\r\n4\r\n {}\n\r\n1\r\n\n\r\n0\r\nTrailer: x\r\n\r\n",
            {"whole": 1, "events": 1, "chunks": 0},
            id="chunk extensions and trailers",
        ),
        pytest.param(
            whole(OBJECT),
            {"whole": 1, "is_stream": 0, "chunks": 1, "completion_tokens": 12, "finished": 1},
            id="an object",
        ),
        pytest.param(
            whole(b'{"error":{}}', status="503 Service Unavailable"),
            {"status": 503, "whole": 1, "failed": 1, "chunks": 0},
            id="an error",
        ),
        pytest.param(
            b"HTTP/1.1 100 Continue\r\n\r\n" + whole(OBJECT),
            {"status": 200, "whole": 1, "chunks": 1},
            id="an interim response comes first",
        ),
        pytest.param(
            b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
            {"status": 204, "whole": 1, "chunks": 0},
            id="nothing",
        ),
        pytest.param(
            b"HTTP/1.0 200 OK\r\n\r\n" + OBJECT,
            {"whole": 1, "closes": 1, "completion_tokens": 12},
            id="a body that ends with the connection",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ncontent-length:2\r\nconnection: Close\r\n\r\n{}",
            {"whole": 1, "closes": 1},
            id="the last answer of a connection",
        ),
        pytest.param(
            stream(text("a"), DONE).removesuffix(END), {"whole": 0, "chunks": 1}, id="it is cut"
        ),
        pytest.param(stream(DONE) + b"x", {"whole": 0}, id="more than was asked for"),
        pytest.param(BEGINNING + b"xyz\r\n", {"whole": 0}, id="a chunk size that is none"),
        pytest.param(BEGINNING + b"\r\n", {"whole": 0}, id="a chunk size that is missing"),
        pytest.param(
            BEGINNING + chunk(b"abc").replace(b"3\r\n", b"2\r\n"), {"whole": 0}, id="a wrong size"
        ),
        pytest.param(b"SSH-2.0-OpenSSH\r\n\r\n", {"whole": 0, "status": 0}, id="another protocol"),
    ],
)
def test_an_answer_means_the_same_however_it_is_sliced(
    answer: bytes, found: dict[str, int], slice_bytes: int
) -> None:
    result = parse(answer, slice_bytes=slice_bytes)
    assert {name: result[name] for name in found} == found
