"""The Responses API in the frontend: conversations that go on, and responses to come back to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest
from openai.types.responses import ResponseItemList

from fastserve.frontend.response_store import ResponseStore, new_response_id
from tests.frontend.stage import LENGTH, STOP, USER, Stage

if TYPE_CHECKING:
    from pathlib import Path

    from fastserve.generation import ModelCard


@pytest.fixture
def kept(card: ModelCard, tmp_path: Path) -> Stage:
    """A stage whose responses are stored."""
    return Stage(card, response_store=ResponseStore(tmp_path / "responses", lane=3))


def answered(stage: Stage, text: bytes, **fields: Any) -> Any:
    """The response to a request that the engine answers with `text`."""
    asked = stage.ask("/v1/responses", **fields)
    stage.say(text, STOP)
    if not fields.get("stream"):
        assert asked.status == 200, asked.sent
        return asked.json()
    [last] = [block for block in asked.blocks() if "response.completed" in block]
    return object_of(last)["response"]


def object_of(block: str) -> Any:
    return orjson.loads(block.partition("data: ")[2])


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_is_come_back_to_until_it_is_deleted(kept: Stage, *, stream: bool) -> None:
    response = answered(kept, b"yo", input="hi", stream=stream, metadata={"a": "b"})
    assert response["store"] is True
    path = f"/v1/responses/{response['id']}"
    found = kept.request("GET", path)
    assert (found.status, found.json()) == (200, response)
    gone = kept.request("DELETE", path)
    assert (gone.status, gone.json()["deleted"]) == (200, True)
    for method in ("GET", "DELETE"):
        missing = kept.request(method, path)
        assert (missing.status, missing.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("stream", [True, False])
def test_a_conversation_goes_on_from_a_response(kept: Stage, *, stream: bool) -> None:
    first = answered(kept, b"yo", input="hi", instructions="A", stream=stream)
    again = answered(
        kept, b"ok", input="so", instructions="B", previous_response_id=first["id"], stream=stream
    )
    # The turns stay, the instructions are each response's own.
    assert kept.submits[-1].prompt_token_ids == [
        USER, *b"B", USER, *b"hi", USER, *b"yo", USER, *b"so",
    ]  # fmt: skip
    assert again["previous_response_id"] == first["id"]
    kept.request("DELETE", f"/v1/responses/{first['id']}")
    answered(kept, b"", input="?", previous_response_id=again["id"])
    assert bytes(each for each in kept.submits[-1].prompt_token_ids if each != USER) == (
        b"hiyosook?"
    )


@pytest.mark.parametrize("store", [True, False])
def test_what_is_not_stored_cannot_be_continued(
    card: ModelCard, kept: Stage, *, store: bool
) -> None:
    stage = kept if store else Stage(card)
    response = answered(stage, b"yo", input="hi", **({"store": False} if store else {}))
    assert response["store"] is False
    assert stage.request("GET", f"/v1/responses/{response['id']}").status == 404
    for previous in (response["id"], new_response_id(), "../lock"):
        asked = stage.ask("/v1/responses", input="so", previous_response_id=previous)
        error = asked.json()["error"]
        assert (asked.status, error["code"]) == (400, "previous_response_not_found")
        assert error["param"] == "previous_response_id"


def test_to_store_is_refused_where_nothing_is(card: ModelCard) -> None:
    asked = Stage(card).ask("/v1/responses", input="hi", store=True)
    assert (asked.status, asked.json()["error"]["param"]) == (400, "store")


def test_a_client_that_chooses_its_request_id_does_not_choose_the_response(kept: Stage) -> None:
    ids = set()
    for _ in range(2):
        asked = kept.request(
            "POST", "/v1/responses", body=b'{"input":"hi"}', headers=["X-Request-Id: mine"]
        )
        kept.say(b"yo", STOP)
        ids.add(asked.json()["id"])
    assert len(ids) == 2


def test_a_response_that_was_cut_is_stored_as_such(kept: Stage) -> None:
    asked = kept.ask("/v1/responses", input="hi", max_output_tokens=2)
    kept.say(b"yo", LENGTH)
    response = kept.request("GET", f"/v1/responses/{asked.json()['id']}").json()
    assert response["status"] == "incomplete"


def test_a_response_whose_client_left_is_not_stored(kept: Stage, tmp_path: Path) -> None:
    asked = kept.ask("/v1/responses", input="hi", stream=True)
    kept.say(b"y")
    asked.exchange.disconnect()
    kept.say(b"o", STOP)
    assert list((tmp_path / "responses").iterdir()) == []
    assert kept.aborted == [kept.submits[0].request_id]


def test_a_stored_response_is_not_streamed_again(kept: Stage) -> None:
    response = answered(kept, b"yo", input="hi")
    asked = kept.request("GET", f"/v1/responses/{response['id']}?stream=true")
    assert (asked.status, asked.json()["error"]["param"]) == (400, "stream")


def test_a_stream_that_fails_ends_with_its_events(kept: Stage) -> None:
    asked = kept.ask("/v1/responses", input="hi", stream=True)
    kept.say(b"y")
    kept.frontend.on_engine_gone("lightning")
    *_, error, failed = asked.blocks()
    assert error.startswith("event: error\n")
    assert failed.startswith("event: response.failed\n")
    numbers = [object_of(block)["sequence_number"] for block in asked.blocks()]
    assert numbers == list(range(len(numbers)))


def test_a_slow_reader_gets_what_was_held_as_one_delta_and_no_gap(kept: Stage) -> None:
    asked = kept.ask("/v1/responses", input="hi", stream=True)
    kept.say(b"a")
    asked.pause()
    kept.say(b"b")
    kept.say(b"c")
    asked.resume()
    kept.say(b"d", STOP)
    events = [object_of(block) for block in asked.blocks()]
    assert [event["delta"] for event in events if "delta" in event] == ["a", "bc", "d"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "abcd"


# ---- what a response was asked with


def test_the_input_of_a_response_is_told_item_by_item(kept: Stage) -> None:
    first = answered(kept, b"yo", input="hi", instructions="A")
    again = answered(kept, b"ok", input="so", previous_response_id=first["id"])
    path = f"/v1/responses/{again['id']}/input_items"
    page = ResponseItemList.model_validate(kept.request("GET", f"{path}?order=asc").json())
    told = [
        (item["role"], item["content"][0]["type"], item["content"][0]["text"])
        for item in page.model_dump()["data"]
    ]
    assert told == [
        ("user", "input_text", "hi"), ("assistant", "output_text", "yo"),
        ("user", "input_text", "so"),
    ]  # fmt: skip
    ids = [item.id for item in page.data]
    assert (page.first_id, page.last_id, page.has_more) == (ids[0], ids[-1], False)
    backwards = kept.request("GET", path).json()
    assert [item["id"] for item in backwards["data"]] == ids[::-1]
    part = kept.request("GET", f"{path}?order=asc&limit=1&after={ids[0]}").json()
    assert ([item["id"] for item in part["data"]], part["has_more"]) == ([ids[1]], True)
    end = kept.request("GET", f"{path}?order=asc&after={ids[-1]}").json()
    assert (end["data"], end["first_id"], end["has_more"]) == ([], None, False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"), ("limit=101", "limit"), ("limit=-1", "limit"), ("limit=x", "limit"),
        ("limit=" + "9" * 5000, "limit"), ("order=up", "order"), ("after=msg_1", "after"),
    ],
)  # fmt: skip
def test_a_page_that_is_none_is_refused(kept: Stage, query: str, param: str) -> None:
    response = answered(kept, b"yo", input="hi")
    asked = kept.request("GET", f"/v1/responses/{response['id']}/input_items?{query}")
    assert (asked.status, asked.json()["error"]["param"]) == (400, param)


def test_nothing_is_cancelled_since_nothing_runs_in_the_background(kept: Stage) -> None:
    response = answered(kept, b"yo", input="hi")
    asked = kept.ask(f"/v1/responses/{response['id']}/cancel")
    assert (asked.status, asked.json()["error"]["type"]) == (400, "invalid_request_error")
    for path in ("cancel", "input_items"):
        method = "POST" if path == "cancel" else "GET"
        unknown = kept.request(method, f"/v1/responses/{new_response_id()}/{path}")
        assert (unknown.status, unknown.json()["error"]["code"]) == (404, "not_found")
    assert kept.request("GET", f"/v1/responses/{response['id']}/cancel").status == 405
