"""What an answer must match, in everybody's words."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

from fastserve.api.anthropic_requests import parse_count, parse_messages
from fastserve.api.requests import parse_chat, parse_completion
from fastserve.api.response_requests import parse_response
from fastserve.api.structured import (
    CHOICES_MAX,
    EXPRESSION_CHARS_MAX,
    SCHEMA_CHARS_MAX,
    check_supported,
)
from fastserve.api.tokenizing import parse_tokenize
from fastserve.errors import InvalidRequest
from fastserve.generation import Grammar, GrammarKind

HELLO = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
JSON, REGEX, EBNF = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.EBNF
ANY_OBJECT = '{"type":"object"}'


def chat(fields: dict[str, Any]) -> Grammar | None:
    return parse_chat(orjson.dumps({"messages": HELLO} | fields)).grammar


def completion(fields: dict[str, Any]) -> Grammar | None:
    return parse_completion(orjson.dumps({"prompt": "Hi"} | fields)).grammar


def response(fields: dict[str, Any]) -> Grammar | None:
    return parse_response(orjson.dumps({"input": "Hi"} | fields)).as_chat([]).grammar


def messages(fields: dict[str, Any]) -> Grammar | None:
    body = orjson.dumps({"messages": HELLO, "max_tokens": 5} | fields)
    return parse_messages(body).as_chat().grammar


def named(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA} | more}


@pytest.mark.parametrize("read", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, JSON, ANY_OBJECT, "response_format"),
        ({"response_format": named(strict=None, description="d")}, JSON, SCHEMA,
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, JSON,
         SCHEMA, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, JSON, {"const": 1},
         "response_format.schema"),
        ({"response_format": {"type": "json", "schema": SCHEMA}}, JSON, SCHEMA,
         "response_format.schema"),
        ({"response_format": {"type": "regex", "regex": "a+"}}, REGEX, "a+",
         "response_format.regex"),
        ({"response_format": {"type": "ebnf", "ebnf": "root ::= x"}}, EBNF, "root ::= x",
         "response_format.ebnf"),
        ({"structured_outputs": {"json": SCHEMA}}, JSON, SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"type":\n"null"}'}}, JSON, {"type": "null"},
         "structured_outputs.json"),
        ({"structured_outputs": {"json": "true"}}, JSON, True, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "disable_fallback": True}}, REGEX, "a",
         "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b c"]}}, REGEX, "(a|b c)",
         "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, EBNF, "root ::= x",
         "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, JSON, ANY_OBJECT,
         "structured_outputs.json_object"),
        ({"guided_json": SCHEMA}, JSON, SCHEMA, "guided_json"),
        ({"guided_regex": "a"}, REGEX, "a", "guided_regex"),
        ({"guided_choice": ["a.b"]}, REGEX, r"(a\.b)", "guided_choice"),
        ({"guided_grammar": "root ::= x"}, EBNF, "root ::= x", "guided_grammar"),
        ({"json_schema": '{"type":"null"}'}, JSON, {"type": "null"}, "json_schema"),
        ({"regex": "a"}, REGEX, "a", "regex"),
        ({"ebnf": "root ::= x"}, EBNF, "root ::= x", "ebnf"),
        ({"grammar": "root ::= x"}, EBNF, "root ::= x", "grammar"),
        ({"ebnf": "root ::= x", "response_format": {"type": "text"}}, EBNF, "root ::= x", "ebnf"),
    ],
)  # fmt: skip
def test_each_way_to_ask(
    read: Any, fields: dict[str, Any], kind: GrammarKind, source: Any, param: str
) -> None:
    grammar = read(fields)
    assert (grammar.kind, grammar.param) == (kind, param)
    said = orjson.loads(grammar.source) if kind is JSON else grammar.source
    assert said == (orjson.loads(source) if source == ANY_OBJECT else source)


def test_what_is_asked_for_reaches_the_engine() -> None:
    request = parse_chat(orjson.dumps({"messages": HELLO, "regex": "a", "n": 2}))
    sampling = request.sampling(prompt_tokens=1, max_seq_len=9, choice=1)
    assert sampling.grammar == Grammar(kind=REGEX, source="a", param="regex")


@pytest.mark.parametrize("read", [chat, completion, response])
def test_nobody_sets_a_grammar_in_our_form(read: Any) -> None:
    with pytest.raises(InvalidRequest, match="'grammar' must be a string"):
        read({"grammar": {"kind": "regex", "source": "a"}})
    assert read({"grammar": None}) is None


def test_grammars_as_such_are_unknown_to_messages() -> None:
    assert messages({"grammar": {"kind": "regex", "source": "a"}}) is None
    assert messages({}) is None


def test_the_order_of_a_schema_is_kept() -> None:
    schema = {"properties": {"b": {}, "a": {}}, "required": ["a", "b"]}
    grammar = chat({"guided_json": schema})
    assert grammar is not None
    assert grammar.source == orjson.dumps(schema).decode()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "regex": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "json": None}},
    ],
)
def test_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    assert chat(fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"grammar": ""}, "grammar"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format"),
        ({"response_format": named(schema="{}")}, "response_format.json_schema.schema"),
        ({"response_format": named(name="")}, "response_format.json_schema.name"),
        ({"response_format": named(name="n" * 65)}, "response_format.json_schema.name"),
        ({"response_format": named(strict="yes")}, "response_format.json_schema.strict"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"guided_choice": ["a"] * (CHOICES_MAX + 1)}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"regex": ""}, "regex"),
        ({"regex": "a" * (EXPRESSION_CHARS_MAX + 1)}, "regex"),
        ({"ebnf": "a" * (EXPRESSION_CHARS_MAX + 1)}, "ebnf"),
        ({"guided_json": {"const": "a" * SCHEMA_CHARS_MAX}}, "guided_json"),
        ({"guided_choice": ["(" * 1024] * 200}, "guided_choice"),
        ({"json_schema": [1]}, "json_schema"),
    ],
)
def test_what_is_malformed_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for read in (chat, completion):
        with pytest.raises(InvalidRequest) as caught:
            read(fields)
        assert caught.value.param is not None
        assert caught.value.param == param
        assert f"'{param}'" in caught.value.message


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(InvalidRequest, match="has no field 'whitespace_pattern'"):
        chat({"structured_outputs": {"whitespace_pattern": " "}})


def test_nesting_is_limited() -> None:
    schema: dict[str, Any] = {}
    for _ in range(70):
        schema = {"not": schema}
    with pytest.raises(InvalidRequest, match="nested") as caught:
        chat({"response_format": named(schema=schema)})
    assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"regex": "a", "ebnf": "x"}, ("regex", "ebnf")),
        ({"response_format": {"type": "json_object"}, "guided_json": {}},
         ("response_format", "guided_json")),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}},
         ("structured_outputs.regex", "structured_outputs.choice")),
    ],
)  # fmt: skip
def test_two_ways_at_once_exclude_each_other(
    fields: dict[str, Any], names: tuple[str, str]
) -> None:
    with pytest.raises(InvalidRequest, match="exclude each other") as caught:
        chat(fields)
    assert caught.value.param == names[1]
    assert all(f"'{name}'" in caught.value.message for name in names)


@pytest.mark.parametrize(
    "choice", ["a.b", "x/y", "(z)", "[k]{2}", r"\d", "new\nline", "tab\t", "$^|", "é🔥", "-", "#&"]
)
def test_a_choice_is_itself_and_nothing_else(choice: str) -> None:
    grammar = chat({"guided_choice": [choice, "other"]})
    assert grammar is not None
    assert re.fullmatch(grammar.source, choice)
    assert re.fullmatch(grammar.source, "other")
    assert not re.fullmatch(grammar.source, choice + "x")
    assert "\n" not in grammar.source


# ---- the other dialects


def test_a_responses_text_format() -> None:
    asked = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    grammar = response({"text": {"format": asked, "verbosity": "medium"}})
    assert grammar is not None
    assert (grammar.kind, grammar.param) == (JSON, "text.format.schema")
    assert orjson.loads(grammar.source) == SCHEMA
    any_object = response({"text": {"format": {"type": "json_object"}}})
    assert any_object == Grammar(kind=JSON, source=ANY_OBJECT, param="text.format")
    assert response({"text": {"format": {"type": "text"}}}) is None
    assert response({"text": {}}) is None


def test_a_response_takes_the_extensions_too() -> None:
    assert response({"structured_outputs": {"regex": "a"}}) == Grammar(
        kind=REGEX, source="a", param="structured_outputs.regex"
    )
    with pytest.raises(InvalidRequest, match="exclude each other"):
        response({"text": {"format": {"type": "json_object"}}, "regex": "a"})


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_a_messages_output_format(fields: dict[str, Any]) -> None:
    grammar = messages(fields)
    assert grammar is not None
    assert grammar.kind is JSON
    assert grammar.param in ("output_config.format.schema", "output_format.schema")
    assert orjson.loads(grammar.source) == SCHEMA
    assert parse_count(orjson.dumps({"messages": HELLO} | fields)).messages == HELLO


@pytest.mark.parametrize(
    ("kind", "said"),
    [([], "an array"), ({}, "an object"), (None, "null"), (True, "a boolean"), (1.5, "a decimal")],
)
def test_the_kind_of_an_output_format_is_a_string(kind: object, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        messages({"output_format": {"type": kind, "schema": SCHEMA}})
    assert caught.value.param == "output_format.type"


def test_a_structure_does_not_change_what_is_tokenized() -> None:
    body = orjson.dumps({"messages": HELLO, "response_format": {"type": "json_object"}})
    asked = parse_tokenize(body)
    assert asked.unknown_fields == ()
    assert asked.chat is not None
    assert asked.chat.grammar is None


# ---- what the engine can follow


def test_what_the_engine_cannot_follow_is_refused_by_the_name_that_asked_for_it() -> None:
    grammar = Grammar(kind=EBNF, source="root ::= x", param="guided_grammar")
    check_supported(grammar, (JSON, EBNF))
    check_supported(None, ())
    with pytest.raises(InvalidRequest, match="'guided_grammar' is not supported") as caught:
        check_supported(grammar, (JSON, REGEX))
    assert (caught.value.param, caught.value.code) == ("guided_grammar", "unsupported_value")
