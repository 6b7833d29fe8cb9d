"""Schemas whose meaning a library of grammars would miss, and what is made of them."""

from __future__ import annotations

from typing import Any

import pytest

from fastserve.engine.json_schemas import exact
from fastserve.errors import InvalidRequest


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        pytest.param(True, {}, id="anything"),
        pytest.param({"type": "string", "format": "uuid"}, {"type": "string", "format": "uuid"},
                     id="a format that is known"),
        pytest.param({"type": "string", "format": "colour"}, {"type": "string"},
                     id="a format that asserts nothing"),
        pytest.param({"properties": {"format": {"format": "x"}}}, {"properties": {"format": {}}},
                     id="a property of a keyword's name"),
        pytest.param({"properties": {"x-guidance": {}}}, {"properties": {"x-guidance": {}}},
                     id="a property of the settings' name"),
        pytest.param({"x-guidance": {"lenient": True}, "type": "null"}, {"type": "null"},
                     id="settings"),
        pytest.param({"const": {"format": "x"}, "enum": [{"format": "x"}]},
                     {"const": {"format": "x"}, "enum": [{"format": "x"}]}, id="data"),
        pytest.param({"anyOf": [{"format": "x"}, {"items": {"format": "x"}}]},
                     {"anyOf": [{}, {"items": {}}]}, id="schemas within"),
        pytest.param({"minimum": 3, "exclusiveMinimum": True, "maximum": 9,
                      "exclusiveMaximum": False}, {"exclusiveMinimum": 3, "maximum": 9},
                     id="bounds of draft 4"),
        pytest.param({"exclusiveMinimum": 3, "maximum": 9}, {"exclusiveMinimum": 3, "maximum": 9},
                     id="bounds of later drafts"),
        pytest.param({"exclusiveMaximum": True}, {}, id="a flag without its bound"),
        pytest.param({"minProperties": 1}, {"minProperties": 1}, id="not empty"),
        pytest.param({"minProperties": 2, "required": ["a", "b"]},
                     {"minProperties": 2, "required": ["a", "b"]}, id="as many as are required"),
    ],
)  # fmt: skip
def test_the_meaning_stays(schema: Any, made: dict[str, Any]) -> None:
    assert exact(schema) == made


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        pytest.param(False, "no JSON value", id="nothing"),
        pytest.param({"minProperties": 2}, "minProperties", id="counting different names"),
        pytest.param({"components": {"a": {"minProperties": 3, "required": ["a", "a"]}}},
                     "minProperties", id="the same, somewhere"),
        pytest.param({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft 3", id="old"),
    ],
)  # fmt: skip
def test_what_no_grammar_can_say_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        exact(schema)


def test_the_schema_that_was_given_stays_as_it_is() -> None:
    schema = {"minimum": 1, "exclusiveMinimum": True, "properties": {"a": {"format": "x"}}}
    exact(schema)
    assert schema == {
        "minimum": 1,
        "exclusiveMinimum": True,
        "properties": {"a": {"format": "x"}},
    }
