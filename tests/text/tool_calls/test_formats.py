"""Each format: what is a call in it, what is none, and that slicing changes neither."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastserve.text.answer import AnswerParser, Part
from fastserve.text.tool_calls.formats import TOOL_FORMATS
from fastserve.text.tool_calls.source import GAP_CHARS_MAX, UNDECIDED_CHARS_MAX
from tests.text.parts import Said, however_sliced, of_format, read, sliced

if TYPE_CHECKING:
    from collections.abc import Callable

CALL = '{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}'
ARGUMENTS = '{"a": [1, {"b": "}"}]}'

HERMES: list[tuple[str, Said]] = [
    ("Just text.\n", ["Just text.\n"]),
    ("", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", [("f", ARGUMENTS)]),
    (f"<tool_call>{CALL}</tool_call>", [("f", ARGUMENTS)]),
    (f"Well.\n\n<tool_call>\n{CALL}\n</tool_call>\nDone.", ["Well.", ("f", ARGUMENTS), "Done."]),
    (
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n",
        [("f", ARGUMENTS), ("f", ARGUMENTS)],
    ),
    # An end that never comes, and one within a string.
    (f"<tool_call>{CALL}", [("f", ARGUMENTS)]),
    (
        '<tool_call>{"name": "g", "arguments": {"a": "</tool_call>"}}</tool_call>',
        [("g", '{"a": "</tool_call>"}')],
    ),
    # Other orders, more members, no arguments.
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
    ('<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": [1]}</tool_call>', [("f", "{}")]),
    ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    ('<tool_call>{"name": "f", "parameters": {"a": 1.5e3}}</tool_call>', [("f", '{"a": 1.5e3}')]),
    ('<tool_call>{"name": "\\u0066", "arguments": "x\\"y"}</tool_call>', [("f", '"x\\"y"')]),
    # A name that is no tool's: the client shall see what was called.
    ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', [("nobody", "{}")]),
    # No calls: as they were written.
    ("a <tool_call> b", ["a <tool_call> b"]),
    ("<tool_call>", ["<tool_call>"]),
    ("\n<tool_call>\n{}</tool_call>\n", ["\n<tool_call>\n{}</tool_call>\n"]),
    ('<tool_call>{"name": 1}</tool_call>', ['<tool_call>{"name": 1}</tool_call>']),
    ('<tool_call>{"name": ""}</tool_call>', ['<tool_call>{"name": ""}</tool_call>']),
    ('<tool_call>{"name": "\\ud800"}', ['<tool_call>{"name": "\\ud800"}']),
    ('<tool_call>{"nome": "f"}', ['<tool_call>{"nome": "f"}']),
    (f"<tool_call><tool_call>{CALL}", ["<tool_call>", ("f", ARGUMENTS)]),
    ("<tool_cal> </tool_call>", ["<tool_cal> </tool_call>"]),
    # Broken off after the beginning: the arguments end there.
    ('<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}', [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1} x', [("f", '{"a": 1}'), "x"]),
    ('<tool_call>{"name": "f", "arguments": }', [("f", ""), "}"]),
]  # fmt: skip

LLAMA: list[tuple[str, Said]] = [
    ("Just text.", ["Just text."]),
    ('{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    ('\n\n{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', [("f", "{}")]),
    (
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": "; {"}}',
        [("f", "{}"), ("g", '{"a": "; {"}')],
    ),
    ('{"type": "function", "name": "f", "parameters": {}}', [("f", "{}")]),
    ('{"name": "f", "parameters": {}, "type": "function"} ', [("f", "{}")]),
    ('Well. <|python_tag|> {"name": "x", "arguments": {}}', ["Well.", ("x", "{}")]),
    # Texts that are JSON, or begin so.
    ('{"answer": 42}', ['{"answer": 42}']),
    ('{"name": "Bob", "parameters": {}}', ['{"name": "Bob", "parameters": {}}']),
    ('{"name": "f", "age": 5}', ['{"name": "f", "age": 5}']),
    ("{} {", ["{} {"]),
    ("  {", ["  {"]),
    ('Well: {"name": "f", "parameters": {}}', ['Well: {"name": "f", "parameters": {}}']),
    ("<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ('{"name": "f", "parameters": {}}; and', [("f", "{}"), "; and"]),
]  # fmt: skip

MISTRAL: list[tuple[str, Said]] = [
    ("Just [text].", ["Just [text]."]),
    (f"[TOOL_CALLS] [{CALL}]", [("f", ARGUMENTS)]),
    (f"[TOOL_CALLS][{CALL}, {CALL} ]", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
    (f"Well.[TOOL_CALLS]{CALL}", ["Well.", ("f", ARGUMENTS)]),
    ('[TOOL_CALLS]f[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
    (
        '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}[TOOL_CALLS]g{}',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ('[TOOL_CALLS]f [ARGS] {"a": "]"}', [("f", '{"a": "]"}')]),
    ("[TOOL_CALLS]", ["[TOOL_CALLS]"]),
    ("[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
    ("[TOOL_CALLS] f and g", ["[TOOL_CALLS] f and g"]),
    (f"[TOOL_CALLS][{CALL}, 7]", [("f", ARGUMENTS), ", 7]"]),
    ('[TOOL_CALLS]f{"a": ', [("f", '{"a": ')]),
]  # fmt: skip

PYTHONIC: list[tuple[str, Said]] = [
    ("Just text.", ["Just text."]),
    ("[f()]", [("f", "{}")]),
    ("[f(a=1), g()]", [("f", '{"a": 1}'), ("g", "{}")]),
    (
        "[get_weather(city='San Francisco', metric=\"c\")]",
        [("get_weather", '{"city": "San Francisco", "metric": "c"}')],
    ),
    (
        "[f(a=[1, -2.5, 1e3], b=(True, None,), c={'x': False, \"y\": []},)]",
        [("f", '{"a": [1, -2.5, 1000.0], "b": [true, null], "c": {"x": false, "y": []}}')],
    ),
    (
        r"""[f(a='it\'s "so"\n', b="\x41\u00e9\U0001f525 \d", c='\ud83d\ude00')]""",
        [("f", r'{"a": "it' + r"'s \"so\"\n" + '", "b": "\\u0041\\u00e9🔥 \\\\d", "c": '
               r'"\ud83d\ude00"}')],
    ),
    ("<|python_start|>[f(a=1)]<|python_end|>", [("f", '{"a": 1}')]),
    ("\n [ f ( a = 1 ) , g ( ) ] \n", [("f", '{"a": 1}'), ("g", "{}")]),
    ("[f(a=1)] Done.", [("f", '{"a": 1}'), "Done."]),
    # Texts that begin alike.
    ("[1, 2]", ["[1, 2]"]),
    ("[see(it)]", ["[see(it)]"]),
    ("[f](x)", ["[f](x)"]),
    (" [", [" ["]),
    ("Well: [f()]", ["Well: [f()]"]),
    # Broken off.
    ("[f(a=1, b=x)]", [("f", '{"a": 1, "b": '), ")]"]),
    ("[f(a='x", [("f", '{"a": "x')]),
    ("[f(a={1: 2})]", [("f", '{"a": {'), "1: 2})]"]),
    ("[f(a=1), see(b=2)]", [("f", '{"a": 1}'), ", see(b=2)]"]),
    ("[f(a=1e999)]", [("f", '{"a": '), ")]"]),
    ("[f(a='\\xzz')]", [("f", '{"a": "'), "')]"]),
]  # fmt: skip

CODER = """\
<tool_call>
<function=f>
<parameter=a>
so "long"
</par> <
</parameter>
<parameter=n>
7
</parameter>
<parameter=o>
{"b": [1]}
</parameter>
</function>
</tool_call>"""
CODED = r'{"a": "so \"long\"\n</par> <", "n": 7, "o": {"b": [1]}}'

QWEN3_CODER: list[tuple[str, Said]] = [
    ("Just text.", ["Just text."]),
    (CODER, [("f", CODED)]),
    (f"Well.\n\n{CODER}\n{CODER}\nDone.", ["Well.", ("f", CODED), ("f", CODED), "Done."]),
    ("<function=g>\n</function>", [("g", "{}")]),
    ("<tool_call><function=g></function></tool_call>", [("g", "{}")]),
    ("<function=g><parameter=x>1</parameter></function>", [("g", '{"x": "1"}')]),
    ("<function=f><parameter=a>\n\n x \n\n</parameter></function>", [("f", r'{"a": "\n x \n"}')]),
    ("<function=f><parameter=n> True\n</parameter></function>", [("f", '{"n": true}')]),
    ("<function=f><parameter=n>many</parameter></function>", [("f", '{"n": "many"}')]),
    ("<function=f><parameter=o>NaN</parameter></function>", [("f", '{"o": "NaN"}')]),
    ("<function=f><parameter=o>[1,]</parameter></function>", [("f", '{"o": "[1,]"}')]),
    # No calls, and calls that break off.
    ("<tool_call>\n<func", ["<tool_call>\n<func"]),
    ("<function= f>", ["<function= f>"]),
    ("<function=f", ["<function=f"]),
    ("<tool_call>{}</tool_call>", ["<tool_call>{}</tool_call>"]),
    ("<function=f><parameter=a>\nx\n</para", [("f", r'{"a": "x\n</para')]),
    ("<function=f><parameter=n>7\n</para", [("f", '{"n": ')]),
    ("<function=f> x", [("f", "{"), "x"]),
]  # fmt: skip

TABLES = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
}
ROWS = [(name, *row) for name, table in TABLES.items() for row in table]


@pytest.mark.parametrize(("name", "text", "said"), ROWS)
def test_an_answer_is_read_for_what_it_is(name: str, text: str, said: Said) -> None:
    assert however_sliced(of_format(name), text) == said


def test_every_format_has_a_table() -> None:
    formats = {id(each): name for name, each in reversed(TOOL_FORMATS.items())}
    assert set(formats.values()) == TABLES.keys()


# ---- generated


def fragments(name: str) -> st.SearchStrategy[str]:
    """Texts made of what the format's tables are made of, cut anywhere: mostly malformed."""
    texts = [text for text, _ in TABLES[name]]
    cut = st.sampled_from(texts).flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
            lambda ends: text[min(ends) : max(ends)]
        )
    )
    return st.lists(cut | st.sampled_from(texts) | st.text(max_size=3), max_size=4).map("".join)


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
@settings(max_examples=150)
def test_no_slicing_changes_what_is_said(name: str, data: st.DataObject) -> None:
    text = data.draw(fragments(name))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    make = of_format(name)
    whole = read(make(), [text])
    assert read(make(), pieces) == whole
    assert read(make(), text) == whole


@pytest.mark.parametrize("name", TABLES)
@given(text=st.text(alphabet=st.characters(exclude_characters="<[{"), max_size=200))
@example(text=" \n" * 100)
@settings(max_examples=50)
def test_a_text_without_calls_stays_as_it_is(name: str, text: str) -> None:
    assert "".join(part for part in however_sliced(of_format(name), text) if part) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                max_size=3),
    max_leaves=8,
)  # fmt: skip
KEYWORDS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


def written(name: str, arguments: dict[str, Any]) -> str:
    """How a model that makes no mistake writes a call of f."""
    in_json = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    in_python = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return {
        "hermes": f"<tool_call>\n{in_json}\n</tool_call>",
        "llama3_json": in_json,
        "mistral": f"[TOOL_CALLS][{in_json}]",
        "pythonic": f"[f({in_python})]",
    }[name]


@pytest.mark.parametrize("name", TABLES.keys() - {"qwen3_coder"})  # whose values have no type
@given(arguments=st.dictionaries(KEYWORDS, JSON, max_size=4), size=st.integers(1, 20))
@settings(max_examples=100)
def test_arguments_arrive_as_they_were_meant(
    name: str, arguments: dict[str, Any], size: int
) -> None:
    text = written(name, arguments)
    [(called, told)] = read(of_format(name)(), sliced(text, size))
    assert called == "f"
    assert json.loads(told) == arguments


# ---- as they come


def test_arguments_are_told_as_they_come() -> None:
    parser = of_format("hermes")()
    for piece in ("<tool_call>", '{"name": "f", "argu', 'ments": '):
        assert parser.push(piece) == []
    assert parser.push('{"a": "so') == [(Part.CALL, "f"), (Part.ARGUMENTS, '{"a": "so')]
    assert parser.push(" lo") == [(Part.ARGUMENTS, " lo")]
    assert parser.push('ng"}') == [(Part.ARGUMENTS, 'ng"}')]
    assert parser.push("}") == [(Part.CALL_END, "")]


def test_a_python_string_is_told_as_it_comes() -> None:
    parser = of_format("pythonic")()
    told = [parser.push(piece) for piece in ("[f(a='", "so ", "\\", "n", "x')")]
    assert told[1:] == [
        [(Part.ARGUMENTS, "so ")],
        [],
        [(Part.ARGUMENTS, "\\n")],
        [(Part.ARGUMENTS, 'x"}'), (Part.CALL_END, "")],
    ]


def test_text_is_held_only_while_it_may_belong_to_a_call() -> None:
    parser = of_format("hermes")()
    assert parser.push("one ") == [(Part.CONTENT, "one")]
    assert parser.push("two <") == [(Part.CONTENT, " two")]
    assert parser.push("b> ") == [(Part.CONTENT, " <b>")]
    assert parser.push(" " * 100) == [(Part.CONTENT, " " * (101 - GAP_CHARS_MAX))]
    assert parser.finish() == [(Part.CONTENT, " " * GAP_CHARS_MAX)]


# ---- limits


@pytest.mark.parametrize(
    "begin",
    [
        '<tool_call>{"arguments": "',
        '<tool_call>{"name": "',
        '<tool_call>{"x": ["',
        "<tool_call>" + " " * UNDECIDED_CHARS_MAX,
    ],
)
def test_what_is_undecided_for_long_is_no_call(begin: str) -> None:
    text = begin + "a" * UNDECIDED_CHARS_MAX + '", "name": "f", "arguments": {}}</tool_call>'
    parser = of_format("hermes")()
    held = sum(not parser.push(piece) for piece in sliced(text, 16))
    assert held <= UNDECIDED_CHARS_MAX / 16 + 2
    assert however_sliced(of_format("hermes"), text) == [text]


@pytest.mark.parametrize("depth", [60, 100_000])
def test_no_depth_is_too_much(depth: int) -> None:
    brackets = "[" * depth + "]" * depth
    in_json = f'<tool_call>{{"name": "f", "arguments": {{"a": {brackets}}}}}</tool_call>'
    assert read(of_format("hermes")(), [in_json]) == [("f", f'{{"a": {brackets}}}')]
    [(name, _), *rest] = read(of_format("pythonic")(), [f"[f(a={brackets})]"])
    assert name == "f"
    assert bool(rest) == (depth > 60)


# ---- answers that a grammar made


def of_calls() -> AnswerParser:
    return AnswerParser.of_calls()


def of_name() -> AnswerParser:
    return AnswerParser.of_calls(name="f")


@pytest.mark.parametrize(
    ("make", "text", "said"),
    [
        (of_calls, '[{"name": "f", "parameters": {"a": 1}}]', [("f", '{"a": 1}')]),
        (
            of_calls,
            ' [ {"name":"f","parameters":{}},\n{"name":"g","parameters":{"b":2}} ]\n',
            [("f", "{}"), ("g", '{"b":2}')],
        ),
        (of_calls, '[{"name":"f","parameters":{"a"', [("f", '{"a"')]),
        (of_calls, '[{"name":"f","parameters":{}},', [("f", "{}"), ","]),
        (of_calls, '[{"nam', ['[{"nam']),
        (of_calls, "no", ["no"]),
        (of_name, '{"a": {"b": 1}}', [("f", '{"a": {"b": 1}}')]),
        (of_name, ' {"a": 1} \n', [("f", '{"a": 1}')]),
        (of_name, '{"a', [("f", '{"a')]),
        (of_name, "", []),
        (of_name, "{} no", [("f", "{}"), "no"]),
    ],
)
def test_an_answer_made_to_be_calls_is_read_as_such(
    make: Callable[[], AnswerParser], text: str, said: Said
) -> None:
    assert however_sliced(make, text) == said
