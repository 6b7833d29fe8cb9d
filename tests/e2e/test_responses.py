"""The Responses API as openai's own client sees it: what one acceptor stores, all of them find."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.scripted import assert_settled, card, ids_of, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai.types.responses import Response

    from tests.e2e.harness import Server

TEXT = "Fire 🔥 and 👩‍💻, naïve café; ½ × €5\n\tend"
# Each over a connection of its own; with two acceptors, some will come to the other one.
TRIES = 6

STREAM_OR_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@pytest.fixture(scope="module")
def client(sim: Server) -> Iterator[openai.OpenAI]:
    with sim.client() as client:
        yield client
    assert_settled(sim)


def say(
    client: openai.OpenAI, token_ids: list[int] | None, *, stream: bool, **options: Any
) -> Response:
    """Have these tokens said. A stream is put together by the client itself."""
    script = options.pop("sim", {}) | ({} if token_ids is None else {"token_ids": token_ids})
    asked: dict[str, Any] = {
        "model": card().name, "input": "Speak.", "extra_body": {"sim": script},
    } | options  # fmt: skip
    if not stream:
        response: Response = client.responses.create(**asked)
        return response
    with client.responses.stream(**asked) as events:
        return events.get_final_response()


@STREAM_OR_WHOLE
def test_a_text_is_said_as_it_is(client: openai.OpenAI, *, stream: bool) -> None:
    response = say(client, ids_of(TEXT), stream=stream, metadata={"a": "b"})
    assert response.output_text == TEXT
    assert (response.status, response.model) == ("completed", card().name)
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.output_tokens == len(ids_of(TEXT))


@STREAM_OR_WHOLE
def test_a_response_is_cut_at_its_limit(client: openai.OpenAI, *, stream: bool) -> None:
    asked: Any = {"model": card().name, "input": "Speak.", "max_output_tokens": 3}
    if stream:
        *_, last = client.responses.create(**asked, stream=True)
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = client.responses.create(**asked)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 3


def test_the_events_come_in_order_numbered_and_one_for_each_token(client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(
            model=card().name, input="Speak.", stream=True,
            extra_body={"sim": {"token_ids": tokens("a", "b", "c")}},
        )
    )  # fmt: skip
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.delta", "response.output_text.delta",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))


@STREAM_OR_WHOLE
def test_logprobs_come_where_they_are_included(client: openai.OpenAI, *, stream: bool) -> None:
    response = say(
        client, tokens("a", "b"), stream=stream,
        include=["message.output_text.logprobs"], top_logprobs=2,
    )  # fmt: skip
    [item] = response.output
    assert item.type == "message"
    [content] = item.content
    assert content.type == "output_text"
    assert content.logprobs is not None
    assert [entry.token for entry in content.logprobs] == ["a", "b"]


@STREAM_OR_WHOLE
@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools[0].type"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
        ({"sim": {"fail_at": 0}}, openai.InternalServerError, None),
    ],
)
def test_an_error_before_the_first_token_has_its_status(
    client: openai.OpenAI,
    options: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str | None,
    *,
    stream: bool,
) -> None:
    with pytest.raises(error) as caught:
        say(client, tokens("a"), stream=stream, **options)
    assert caught.value.param == param


def test_a_failure_within_a_stream_is_its_last_events(client: openai.OpenAI) -> None:
    *_, error, failed = client.responses.create(
        model=card().name, input="Speak.", stream=True, extra_body={"sim": {"fail_at": 3}}
    )
    assert error.type == "error"
    assert error.code == "generation_failed"
    assert failed.type == "response.failed"
    assert failed.response.error is not None
    assert failed.response.error.code == "server_error"


# ---- what is stored


@STREAM_OR_WHOLE
def test_every_acceptor_finds_a_response_until_it_is_deleted(
    sim: Server, client: openai.OpenAI, *, stream: bool
) -> None:
    response = say(client, ids_of(TEXT), stream=stream)
    assert response.output_text == TEXT
    for _ in range(TRIES):
        with sim.client() as another:
            found = another.responses.retrieve(response.id)
        assert (found.id, found.output_text) == (response.id, TEXT)
        assert found.usage == response.usage
    client.responses.delete(response.id)
    for _ in range(TRIES):
        with sim.client() as another, pytest.raises(openai.NotFoundError):
            another.responses.retrieve(response.id)


@STREAM_OR_WHOLE
def test_every_acceptor_continues_a_conversation(
    sim: Server, client: openai.OpenAI, *, stream: bool
) -> None:
    first = say(client, ids_of("I am a lamp."), stream=stream, instructions="Be brief.")
    spelled: Any = [
        {"role": "user", "content": "Speak."},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "And then?"},
    ]
    expected = say(client, tokens("a"), stream=False, input=spelled).usage
    assert expected is not None
    for _ in range(TRIES):
        with sim.client() as another:
            again = say(
                another, tokens("a"), stream=stream, input="And then?",
                previous_response_id=first.id,
            )  # fmt: skip
        assert again.usage is not None
        assert again.usage.input_tokens == expected.input_tokens


def test_what_was_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    response = say(client, tokens("a"), stream=False, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        say(client, tokens("a"), stream=False, previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"


def test_what_would_be_asked_is_counted(sim: Server) -> None:
    with sim.client() as client:
        asked: Any = {"model": card().name, "input": "Fire 🔥", "instructions": "Be brief."}
        counted = client.responses.input_tokens.count(**asked)
        assert counted.object == "response.input_tokens"
        answer = client.responses.create(**asked, max_output_tokens=1)
        assert answer.usage is not None
        assert counted.input_tokens == answer.usage.input_tokens
        more = client.responses.input_tokens.count(
            model=card().name, input="And?", previous_response_id=answer.id
        )
        assert more.input_tokens > counted.input_tokens
