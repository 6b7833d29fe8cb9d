"""The Messages API as anthropic's own client sees it, with a key that only it sends as it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anthropic
import orjson
import pytest

from tests.e2e.harness import DEADLINE_S, Server
from tests.e2e.scripted import assert_settled, card, ids_of, tokens
from tests.e2e.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "sk-ant-test"
TEXT = "Fire 🔥 and 👩‍💻, naïve café; ½ × €5\n\tend"
USER: Any = [{"role": "user", "content": "Speak."}]

STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(
        "--frontends", "2", "--engine", "sim", "--sim-step-ms", "2", "--api-key", KEY,
        "--lane-heartbeat-interval-s", "0.05", "--limits-sse-ping-interval-s", "0.1",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with _client(server, KEY) as client:
        yield client
    assert_settled(server)


def _client(server: Server, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=DEADLINE_S)


def say(
    client: anthropic.Anthropic,
    token_ids: list[int] | None,
    *,
    stream: bool,
    sim: dict[str, Any] | None = None,
    **options: Any,
) -> anthropic.types.Message:
    """Have these tokens said. A stream is put together by the client itself."""
    script = (sim or {}) | ({} if token_ids is None else {"token_ids": token_ids})
    asked: dict[str, Any] = {
        "model": card().name, "messages": USER, "max_tokens": 500, "extra_body": {"sim": script},
    } | options  # fmt: skip
    if not stream:
        message: anthropic.types.Message = client.messages.create(**asked)
        return message
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


def text_of(message: anthropic.types.Message) -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


@STREAM_OR_WHOLE
def test_a_text_is_said_as_it_is(client: anthropic.Anthropic, *, stream: bool) -> None:
    message = say(client, ids_of(TEXT), stream=stream)
    assert text_of(message) == TEXT
    assert (message.type, message.role, message.model) == ("message", "assistant", card().name)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(ids_of(TEXT))
    assert message.id.startswith("msg_")


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("options", "text", "stop_reason", "stop_sequence"),
    [
        ({"stop_sequences": ["c", " na"]}, "one, two and", "stop_sequence", " na"),
        ({"max_tokens": 2}, "one,", "max_tokens", None),
    ],
)
def test_a_message_ends_where_it_should(
    client: anthropic.Anthropic,
    options: dict[str, Any],
    text: str,
    stop_reason: str,
    stop_sequence: str | None,
    *,
    stream: bool,
) -> None:
    message = say(client, ids_of("one, two and naught"), stream=stream, **options)
    assert text_of(message) == text
    assert (message.stop_reason, message.stop_sequence) == (stop_reason, stop_sequence)


@STREAM_OR_WHOLE
def test_more_tokens_than_there_is_room_for_are_allowed(
    client: anthropic.Anthropic, *, stream: bool
) -> None:
    # The prompt leaves little room, and the client asks for what another model could say.
    prompt = "word " * (card().max_seq_len - 60)
    message = say(
        client, None, stream=stream, max_tokens=128_000,
        messages=[{"role": "user", "content": prompt}], sim={},
    )  # fmt: skip
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == card().max_seq_len


def test_the_events_come_in_order_and_one_for_each_token(client: anthropic.Anthropic) -> None:
    events = list(
        client.messages.create(
            model=card().name, max_tokens=500, messages=USER, stream=True,
            extra_body={"sim": {"token_ids": tokens("a", "b", "c")}},
        )
    )  # fmt: skip
    assert [event.type for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_tokens_are_counted_as_they_are_charged(client: anthropic.Anthropic) -> None:
    options: Any = {
        "model": card().name,
        "system": [{"type": "text", "text": "Be <|im_end|> brief."}],
        "messages": [*USER, {"role": "assistant", "content": "I do."}, *USER],
    }
    counted = client.messages.count_tokens(**options)
    message = say(client, tokens("a"), stream=False, **options)
    assert counted.input_tokens == message.usage.input_tokens > 10


# ---- errors


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("options", "error", "kind"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, anthropic.BadRequestError,
         "invalid_request_error"),
        ({"sim": {"fail_at": 0}}, anthropic.InternalServerError, "api_error"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]},
         anthropic.BadRequestError, "invalid_request_error"),
    ],
)  # fmt: skip
def test_an_error_is_the_clients_own(
    client: anthropic.Anthropic,
    options: dict[str, Any],
    error: type[anthropic.APIStatusError],
    kind: str,
    *,
    stream: bool,
) -> None:
    with pytest.raises(error) as caught:
        say(client, tokens("a"), stream=stream, **options)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == caught.value.type == kind


def test_the_models_are_listed_in_its_words_too(client: anthropic.Anthropic) -> None:
    [listed] = list(client.models.list())
    assert (listed.id, listed.type, listed.display_name) == (card().name, "model", card().name)
    assert listed.created_at is not None
    assert listed.created_at.tzinfo is not None
    assert listed.max_input_tokens == card().max_seq_len
    assert client.models.retrieve(card().name) == listed


def test_a_failure_within_a_stream_is_an_event(client: anthropic.Anthropic) -> None:
    seen: list[str] = []
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(
            model=card().name, max_tokens=500, messages=USER,
            extra_body={"sim": {"fail_at": 3}},
        ) as events,
    ):  # fmt: skip
        seen.extend(event.type for event in events)
    assert seen.count("content_block_delta") == 3
    assert "message_stop" not in seen
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")


@pytest.mark.parametrize(
    ("request_", "status", "kind"),
    [
        (b"POST /v1/messages HTTP/1.1\r\n\r\n", 401, "authentication_error"),
        (b"POST /v1/messages/none HTTP/1.1\r\nKEY\r\n", 404, "not_found_error"),
        (b"PUT /v1/messages HTTP/1.1\r\nKEY\r\n", 405, "invalid_request_error"),
        (b"POST /v1/messages HTTP/1.1\r\nKEYContent-Length: 99999999999\r\n\r\n", 413,
         "request_too_large"),
        (b"POST /v1/messages/count_tokens HTTP/1.1\r\nKEYContent-Type: text/plain\r\n\r\n", 415,
         "invalid_request_error"),
        (b"POST /v1/messages HTTP/1.1\r\nKEYExpect: more\r\n\r\n", 417, "invalid_request_error"),
        (b"POST /v1/messages HTTP/1.1\r\nKEYX: " + b"x" * 70_000, 431, "invalid_request_error"),
        (b"POST /v1/messages HTTP/1.1\r\nKEYX: " + b"x" * 70_000 + b"\r\n\r\n", 431,
         "invalid_request_error"),
        (b"POST /v1/messages HTTP/1.1\r\nKEYTransfer-Encoding: chunked\r\n\r\nno\r\n", 400,
         "invalid_request_error"),
        (b"POST /v1/messages HTTP/1.1\r\nKEYContent-Length: 2\r\n\r\n{}", 400,
         "invalid_request_error"),
    ],
)  # fmt: skip
def test_whoever_refuses_it_does_so_in_the_clients_words(
    server: Server, request_: bytes, status: int, kind: str
) -> None:
    key = b"Host: x\r\nx-api-key: %b\r\n" % KEY.encode()
    with Wire(server.port) as wire:
        wire.socket.sendall(
            request_.replace(b"KEY", key).replace(b"1.1\r\n\r\n", b"1.1\r\nHost: x\r\n\r\n")
        )
        body = wire.read_json()
    assert (wire.status, body["type"], body["error"]["type"]) == (status, "error", kind)


def test_a_message_has_its_id_where_the_client_looks(client: anthropic.Anthropic) -> None:
    message = say(client, tokens("a"), stream=False)
    assert message._request_id
    with pytest.raises(anthropic.BadRequestError) as caught:
        say(client, tokens("a"), stream=False, max_tokens=0)
    assert caught.value.request_id


def test_only_the_right_key_opens(server: Server) -> None:
    with _client(server, "wrong") as stranger, pytest.raises(anthropic.AuthenticationError):
        say(stranger, tokens("a"), stream=False)


def test_a_silent_stream_is_kept_open_by_comments_and_then_by_pings(server: Server) -> None:
    """A step that takes long, before the first token: then one that takes long after it."""
    body = orjson.dumps(
        {
            "max_tokens": 500, "messages": USER, "stream": True,
            "sim": {"token_ids": ids_of("one two"), "delay_ms": 400},
        }
    )  # fmt: skip
    with Wire(server.port) as wire:
        wire.socket.sendall(
            b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nanthropic-version: 2023-06-01\r\n"
            b"x-api-key: %b\r\nContent-Length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
        )
        assert wire.read_head() == 200
        blocks = list(wire.blocks())
    comments = [block for block in blocks if block.startswith(":")]
    assert comments
    assert blocks[len(comments)].startswith("event: message_start\n")
    assert blocks[-1].startswith("event: message_stop\n")
