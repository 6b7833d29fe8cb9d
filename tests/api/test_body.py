"""What is JSON, what is an object, and what is nested too deep."""

from __future__ import annotations

from typing import Any

import pytest

from fastserve.api.body import NESTING_MAX, check_nesting, load_object
from fastserve.api.requests import parse_chat, parse_completion
from fastserve.errors import InvalidRequest

# Deep enough to overflow the stack of a parser that recurses without a limit.
DEEP = 2_000_000


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(b"", "empty", id="nothing"),
        pytest.param(b" ", "not valid JSON", id="a blank"),
        pytest.param(b"[]", "not an array", id="an array"),
        pytest.param(b'"s"', "not a string", id="a string"),
        pytest.param(b"123", "not an integer", id="an integer"),
        pytest.param(b"1.5", "not a decimal number", id="a number"),
        pytest.param(b"null", "not null", id="null"),
        pytest.param(b"true", "not a boolean", id="a boolean"),
        pytest.param(b"{", "not valid JSON", id="a truncated object"),
        pytest.param(b"{} {}", "not valid JSON", id="two objects"),
        pytest.param(b'{"a":1,}', "not valid JSON", id="a trailing comma"),
        pytest.param(b"{'a':1}", "not valid JSON", id="single quotes"),
        pytest.param(b'\xef\xbb\xbf{"a":1}', "not valid JSON", id="a byte order mark"),
        pytest.param('{"a":1}'.encode("utf-16"), "not valid", id="UTF-16"),
        pytest.param(b'{"a":"\xc4\xe3"}', "not valid UTF-8", id="GBK"),
        pytest.param(b'{"a\xff":1}', "not valid UTF-8", id="a bad name"),
        pytest.param(b'{"a":"\xed\xa0\x80"}', "not valid UTF-8", id="an encoded surrogate"),
        pytest.param(b'{"a":"\\ud800"}', "not valid JSON", id="a lone surrogate"),
        pytest.param(b'{"a":"\x01"}', "not valid JSON", id="a control character"),
        pytest.param(b'{"a":NaN}', "not valid JSON", id="NaN"),
        pytest.param(b'{"a":Infinity}', "not valid JSON", id="Infinity"),
        pytest.param(b'{"a":-Infinity}', "not valid JSON", id="-Infinity"),
        pytest.param(b'{"a":1e400}', "not valid JSON", id="beyond a double"),
        pytest.param(b'{"a":-1e400}', "not valid JSON", id="beyond a negative double"),
        pytest.param(b'{"a":' + b"9" * 5000 + b"}", "not valid JSON", id="5000 digits"),
        pytest.param(b"[" * DEEP, "not valid JSON", id="deep arrays"),
        pytest.param(b"[" * DEEP + b"]" * DEEP, "not valid JSON", id="closed deep arrays"),
        pytest.param(b'{"a":' * DEEP, "not valid JSON", id="deep objects"),
        pytest.param(b'{"a":' + b"[" * DEEP, "not valid JSON", id="a deep array in a field"),
    ],
)
def test_this_is_no_body(body: bytes, says: str) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(InvalidRequest, match=says) as caught:
            parse(body)
        assert (caught.value.status, caught.value.param) == (400, None)


def test_the_place_of_a_mistake_is_told_and_nothing_of_the_parser() -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_object(b'{\n  "a": 1e400}')
    message = caught.value.message
    assert message == "The request body is not valid JSON at line 2, column 8."


def test_null_fields_are_absent() -> None:
    assert load_object(b'{"a":null,"b":0,"c":false,"d":{"e":null}}') == {
        "b": 0,
        "c": False,
        "d": {"e": None},
    }


def test_the_last_of_a_repeated_field_counts() -> None:
    assert load_object(b'{"a":1,"a":2}') == {"a": 2}


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_nesting_has_a_limit(wrap: Any) -> None:
    value: Any = 1
    for _ in range(NESTING_MAX):
        value = wrap(value)
    check_nesting(value, param="sim")
    with pytest.raises(InvalidRequest, match="'sim' is nested") as caught:
        check_nesting(wrap(value), param="sim")
    assert caught.value.param == "sim"


def test_breadth_is_not_depth() -> None:
    check_nesting([[{}] * 1000, *range(1000)], param="sim")
    check_nesting("[" * 1000, param="sim")


@pytest.mark.parametrize("field", ["sim", "chat_template_kwargs"])
def test_values_that_pass_through_are_not_nested_deep(field: str) -> None:
    deep = b'{"a":' * 300 + b"1" + b"}" * 300
    body = b'{"messages":[{"role":"user","content":"x"}],"%b":%b}' % (field.encode(), deep)
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body)
    assert (caught.value.param, caught.value.code) == (field, "invalid_value")


def test_an_unknown_field_may_hold_anything() -> None:
    body = b'{"prompt":"x","y":' + b"[" * 300 + b"]" * 300 + b"}"
    assert parse_completion(body).unknown_fields == ("y",)
