"""The answers of the Responses API, as openai's types read them: strictly, event by event."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fastserve.api.logprobs import TokenText
from fastserve.api.response_objects import ResponseDialect, conversation_of, response_of
from fastserve.api.response_requests import parse_response
from fastserve.api.responses import Choice, Ending, Usage
from fastserve.errors import EngineDead, FastserveError, InvalidRequest
from fastserve.generation import FinishReason

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ANSWER: Any = {"created": 1700000000, "model": "m"}
TOKENS = [TokenText(token="Hi", raw=b"Hi", logprob=-0.5, top=(("Hi", b"Hi", -0.5),))]


class Told:
    """A dialect, and the records that it had kept."""

    def __init__(self, *, store: bool = True, full: bool = False, **fields: Any) -> None:
        request = parse_response(orjson.dumps({"input": "Hello"} | fields))
        self.records: dict[str, bytes] = {}
        self.full = full
        self.dialect = ResponseDialect(
            request,
            request.as_chat([]),
            response_id="resp_1",
            keep=self.keep if store else None,
        )

    def keep(self, response_id: str, record: bytes) -> bool:
        if self.full:
            return False
        self.records[response_id] = record
        return True

    def chunks(self) -> Any:
        return self.dialect.chunks(completion_id="resp_1", index=0, prompt_tokens=5, **ANSWER)

    def whole(self, text: str, reason: FinishReason, **choice: Any) -> dict[str, Any]:
        body = self.dialect.whole(
            [Choice(text=text, finish_reason=reason, **choice)],
            completion_id="resp_1",
            usage=Usage(prompt_tokens=5, completion_tokens=2),
            **ANSWER,
        )
        Response.model_validate_json(body)
        answer: dict[str, Any] = orjson.loads(body)
        return answer


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The objects of a stream, each of which must be what its name says."""
    assert stream.endswith(b"\n\n")
    events = []
    for number, block in enumerate(stream.decode().removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        assert EVENT.validate_json(data.removeprefix("data: ")).type == event["type"]
        events.append(event)
    return events


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        (FinishReason.STOP, "completed", None),
        (FinishReason.LENGTH, "incomplete", {"reason": "max_output_tokens"}),
    ],
)
def test_a_response_streams_like_this(reason: FinishReason, status: str, details: Any) -> None:
    told = Told()
    chunks = told.chunks()
    events = events_of(
        chunks.first()
        + chunks.text("Hel")
        + chunks.text('lo "you"\n')
        + chunks.finish(Ending(reason, completion_tokens=2))
    )
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.delta", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        f"response.{status}",
    ]  # fmt: skip
    text = 'Hello "you"\n'
    assert [event["delta"] for event in events if "delta" in event] == ["Hel", 'lo "you"\n']
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[6]["text"] == events[7]["part"]["text"] == text
    assert {event.get("item_id", "msg_1") for event in events} == {"msg_1"}
    response = events[-1]["response"]
    assert response["output"] == [events[8]["item"]]
    assert (response["status"], response["incomplete_details"]) == (status, details)
    # The same as if it had not been streamed.
    assert response == Told().whole(text, reason)


def test_a_response_tells_what_was_asked_for() -> None:
    answer = Told(
        instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=9, temperature=0.5,
        top_p=0.9, reasoning={"effort": "low"},
    ).whole("Hi", FinishReason.STOP)  # fmt: skip
    assert answer["instructions"] == "Be brief."
    assert answer["metadata"] == {"a": "b"}
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    assert (answer["max_output_tokens"], answer["temperature"], answer["top_p"]) == (9, 0.5, 0.9)
    assert (answer["id"], answer["created_at"], answer["model"]) == ("resp_1", 1700000000, "m")
    assert answer["usage"]["total_tokens"] == 7


def test_logprobs_are_told_with_each_delta_and_with_the_whole() -> None:
    told = Told(include=["message.output_text.logprobs"], top_logprobs=1)
    chunks = told.chunks()
    events = events_of(
        chunks.first()
        + chunks.text_with("Hi", logprobs=TOKENS)
        + chunks.text_with("Hi", logprobs=TOKENS)
        + chunks.finish(Ending(FinishReason.STOP, completion_tokens=2))
    )
    one = {
        "token": "Hi", "logprob": -0.5, "bytes": [72, 105],
        "top_logprobs": [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}],
    }  # fmt: skip
    assert [event["logprobs"] for event in events[4:7]] == [[one], [one], [one, one]]
    whole = told.whole("HiHi", FinishReason.STOP, logprobs=TOKENS * 2)
    assert whole["output"] == events[-1]["response"]["output"]


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (EngineDead("lightning"), "engine_dead", "server_error"),
        (FastserveError("lightning"), "server_error", "server_error"),
        (InvalidRequest("lightning", param="sim"), "invalid_request_error", "invalid_prompt"),
    ],
)
def test_a_stream_that_fails_says_so_twice(error: FastserveError, code: str, kind: str) -> None:
    told = Told()
    chunks = told.chunks()
    stream = chunks.first() + chunks.text("Hel")
    *_, event, failed = events_of(stream + told.dialect.error_event(error))
    assert (event["type"], event["message"], event["code"]) == ("error", "lightning", code)
    assert event["param"] == error.param
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": kind, "message": "lightning"}
    assert told.records == {}


def test_what_is_kept_is_the_response_and_its_conversation() -> None:
    told = Told(instructions="Be brief.")
    answer = told.whole("Hi", FinishReason.STOP)
    [record] = told.records.values()
    assert orjson.loads(response_of(record)) == answer
    assert conversation_of(record) == [
        {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"},
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{"store": False}, {"full": True}], ids=["unasked", "full"])
def test_what_is_not_kept_is_said_to_be_so(options: Any) -> None:
    told = Told(**options)
    assert told.whole("Hi", FinishReason.STOP)["store"] is False
    assert told.records == {}


@given(st.lists(st.text(min_size=1), max_size=5))
@settings(max_examples=50)
def test_a_text_is_the_same_however_it_is_sliced(pieces: list[str]) -> None:
    told = Told()
    chunks = told.chunks()
    events = events_of(
        chunks.first()
        + b"".join(map(chunks.text, pieces))
        + chunks.finish(Ending(FinishReason.STOP, completion_tokens=2))
    )
    assert [event["delta"] for event in events if "delta" in event] == pieces
    assert events[-1]["response"] == told.whole("".join(pieces), FinishReason.STOP)
