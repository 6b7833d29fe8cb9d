"""The document: it says of every body what the server does with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve.api import openapi
from fastserve.api.anthropic_answers import error_body as messages_error
from fastserve.api.anthropic_requests import parse_count, parse_messages
from fastserve.api.embeddings import parse_embeddings
from fastserve.api.requests import parse_chat, parse_completion
from fastserve.api.response_requests import parse_response
from fastserve.api.responses import error_body
from fastserve.api.tokenizing import parse_detokenize, parse_tokenize
from fastserve.errors import InvalidRequest, Overloaded
from tests.api.bodies import FINE, WRONG
from tests.api.json_schema import fits, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENT: Any = orjson.loads(openapi.document("1.2.3"))

PARSERS: dict[str, Callable[[bytes], object]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/v1/responses": lambda body: parse_response(body).as_chat([]),
    "/v1/responses/input_tokens": lambda body: parse_response(body).as_chat([]),
    "/v1/messages": parse_messages,
    "/v1/messages/count_tokens": parse_count,
    "/v1/embeddings": lambda body: parse_embeddings(body, size=8, vocab_size=100),
    "/tokenize": parse_tokenize,
    "/detokenize": lambda body: parse_detokenize(body, vocab_size=100),
}


def fits_its_route(path: str, body: object) -> bool:
    [media] = DOCUMENT["paths"][path]["post"]["requestBody"]["content"].values()
    return fits(body, media["schema"], document=DOCUMENT)


def each(bodies: dict[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(path, body) for path, of_path in bodies.items() for body in of_path]


def test_there_are_bodies_for_every_route_that_takes_one() -> None:
    taking = {
        path for path, item in DOCUMENT["paths"].items() if "requestBody" in item.get("post", {})
    }
    assert taking == FINE.keys() == WRONG.keys() == PARSERS.keys()


@pytest.mark.parametrize(("path", "body"), each(FINE))
def test_a_body_that_is_taken_fits(path: str, body: dict[str, Any]) -> None:
    PARSERS[path](orjson.dumps(body))
    assert fits_its_route(path, body)


@pytest.mark.parametrize(("path", "body"), each(WRONG))
def test_a_body_that_does_not_fit_is_refused(path: str, body: dict[str, Any]) -> None:
    assert not fits_its_route(path, body)
    with pytest.raises(InvalidRequest):
        PARSERS[path](orjson.dumps(body))


@pytest.mark.parametrize(("path", "body"), each(FINE))
def test_null_is_absence_wherever_a_field_need_not_be(path: str, body: dict[str, Any]) -> None:
    [media] = DOCUMENT["paths"][path]["post"]["requestBody"]["content"].values()
    schema = resolve(media["schema"]["$ref"], DOCUMENT)
    nulls = dict.fromkeys(schema["properties"].keys() - body.keys())
    PARSERS[path](orjson.dumps(body | nulls))
    assert fits_its_route(path, body | nulls)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "text", "message", "user", "assistant", "none", "auto"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "effort", "summary", "format", "9"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("path", FINE)
@given(data=st.data())
@settings(max_examples=100)
def test_whatever_does_not_fit_is_refused(path: str, data: st.DataObject) -> None:
    [media] = DOCUMENT["paths"][path]["post"]["requestBody"]["content"].values()
    names = sorted(resolve(media["schema"]["$ref"], DOCUMENT)["properties"])
    body = data.draw(st.sampled_from(FINE[path]))
    body = body | data.draw(st.dictionaries(st.sampled_from(names), JSON, min_size=1, max_size=3))
    try:
        PARSERS[path](orjson.dumps(body))
    except InvalidRequest:
        return
    assert fits_its_route(path, body)


def test_no_name_of_ours_is_told_to_clients() -> None:
    assert "unknown_fields" not in openapi.document("1.2.3").decode()
    assert "wants_logprobs" not in openapi.document("1.2.3").decode()


def test_errors_fit() -> None:
    for error in (Overloaded("busy", rejection="lane_full"), InvalidRequest("no", param="n")):
        for name, body in (("Error", error_body(error)), ("MessagesError", messages_error(error))):
            schema = DOCUMENT["components"]["schemas"][name]
            assert fits(orjson.loads(body), schema, document=DOCUMENT)


def test_every_reference_leads_somewhere() -> None:
    def follow(value: object) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                resolve(value["$ref"], DOCUMENT)
            for inner in value.values():
                follow(inner)
        elif isinstance(value, list):
            for inner in value:
                follow(inner)

    follow(DOCUMENT)
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["info"]["version"] == "1.2.3"
