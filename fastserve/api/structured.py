"""What an answer's text must match, in the words of every dialect, read into one Grammar.

OpenAI's `response_format` (with the types that TensorRT-LLM adds), vLLM's `structured_outputs` and
the older `guided_*`, SGLang's `json_schema`, `regex` and `ebnf`, llama.cpp's `grammar`, the formats
of the Responses API and of Anthropic's Messages API. A request has at most one of them. Whether a
schema or expression is a good one, only an engine can tell.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from fastserve.api.body import check_nesting, convert, load_value
from fastserve.errors import InvalidRequest
from fastserve.generation import Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Of a schema as JSON without spaces, and of the expression that choices make.
SCHEMA_CHARS_MAX = 262_144
# Of a regular expression or a grammar.
EXPRESSION_CHARS_MAX = 16_384
CHOICES_MAX = 1024
CHOICE_CHARS_MAX = 1024

Schema = dict[str, Any]
Source = Annotated[str, Meta(min_length=1, max_length=EXPRESSION_CHARS_MAX)]
SchemaText = Annotated[str, Meta(min_length=1, max_length=SCHEMA_CHARS_MAX)]
Choices = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=CHOICE_CHARS_MAX)]],
    Meta(min_length=1, max_length=CHOICES_MAX),
]
FormatName = Annotated[str, Meta(min_length=1, max_length=64)]


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is asked for here is done or refused, so nothing may be unknown."""


class TextFormat(_Options, frozen=True, tag="text"):
    """Any text."""


class JsonObjectFormat(_Options, frozen=True, tag="json_object"):
    """Any JSON object."""


class JsonObjectsFormat(_Options, frozen=True, tag="json_object"):
    """Any JSON object, or JSON of a schema, in the form of llama.cpp, Together and Fireworks."""

    schema: Schema | None = None


class JsonSchema(_Options, frozen=True):
    """A schema. It is always enforced to the letter, `strict` or not. OpenAI wants a name, too."""

    schema: Schema
    name: FormatName | None = None
    strict: bool | None = None
    description: str | None = None


class JsonSchemaFormat(_Options, frozen=True, tag="json_schema"):
    """JSON of a schema."""

    json_schema: JsonSchema


class JsonFormat(_Options, frozen=True, tag="json"):
    """JSON of a schema, in TensorRT-LLM's form."""

    schema: Schema


class RegexFormat(_Options, frozen=True, tag="regex"):
    """A text that an expression matches from its first character to its last."""

    regex: Source


class EbnfFormat(_Options, frozen=True, tag="ebnf"):
    """A text of a grammar."""

    ebnf: Source


ResponseFormat = (
    TextFormat | JsonObjectsFormat | JsonSchemaFormat | JsonFormat | RegexFormat | EbnfFormat
)


class StructuredOutputs(_Options, frozen=True):
    """vLLM's. The two switches ask for what is so anyway."""

    json: SchemaText | Schema | None = None
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of chats and completions that ask for a structure."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | Schema | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    json_schema: SchemaText | Schema | None = None
    regex: Source | None = None
    ebnf: Source | None = None
    grammar: Source | None = None


FIELDS = frozenset(StructuredFields.__struct_fields__)


class NamedSchemaFormat(_Options, frozen=True, tag="json_schema"):
    """JSON of a schema, in the form of the Responses API."""

    name: FormatName
    schema: Schema
    strict: bool | None = None
    description: str | None = None


class TextConfig(_Options, frozen=True):
    """`text` of the Responses API."""

    format: TextFormat | JsonObjectFormat | NamedSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class SchemaFormat(_Options, frozen=True):
    """JSON of a schema, in Anthropic's form."""

    # A tag would be optional here: msgspec asks for one where there is a choice.
    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(_Options, frozen=True):
    """`output_config` of the Messages API. How much effort is the model's affair."""

    format: SchemaFormat | None = None
    effort: None = None


class OutputFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the Messages API that ask for a structure; the second is the older."""

    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None


OUTPUT_FIELDS = frozenset(OutputFields.__struct_fields__)


def read_grammar(fields: Mapping[str, Any]) -> Grammar | None:
    """What the answer of a chat or a completion must match, if anything. Raises InvalidRequest."""
    given = FIELDS & fields.keys()
    if not given:
        return None
    asked = convert({name: fields[name] for name in given}, StructuredFields)
    return only_one(
        _of_response_format(asked.response_format),
        *_of_structured_outputs(asked.structured_outputs),
        _of_schema(asked.guided_json, param="guided_json"),
        _of_source(asked.guided_regex, GrammarKind.REGEX, param="guided_regex"),
        _of_choices(asked.guided_choice, param="guided_choice"),
        _of_source(asked.guided_grammar, GrammarKind.EBNF, param="guided_grammar"),
        _of_schema(asked.json_schema, param="json_schema"),
        _of_source(asked.regex, GrammarKind.REGEX, param="regex"),
        _of_source(asked.ebnf, GrammarKind.EBNF, param="ebnf"),
        _of_source(asked.grammar, GrammarKind.EBNF, param="grammar"),
    )


def read_output(fields: Mapping[str, Any]) -> Grammar | None:
    """What the answer to a request of the Messages API must match. Raises InvalidRequest."""
    given = OUTPUT_FIELDS & fields.keys()
    if not given:
        return None
    asked = convert({name: fields[name] for name in given}, OutputFields)
    config, older = asked.output_config, asked.output_format
    return only_one(
        None
        if config is None or config.format is None
        else _of_schema(config.format.schema, param="output_config.format.schema"),
        None if older is None else _of_schema(older.schema, param="output_format.schema"),
    )


def grammar_of_text(config: TextConfig) -> Grammar | None:
    """What the answer to a request of the Responses API must match. Raises InvalidRequest."""
    match config.format:
        case JsonObjectFormat():
            return _any_object(param="text.format")
        case NamedSchemaFormat(schema=schema):
            return _of_schema(schema, param="text.format.schema")
        case _:
            return None


def text_as_told(config: TextConfig) -> dict[str, Any]:
    """`text` of a response object: what was asked for, with what that means."""
    return {"format": msgspec.to_builtins(config.format or TextFormat())}


def only_one(*grammars: Grammar | None) -> Grammar | None:
    """The one of these that there is, if any. Raises InvalidRequest where there are more."""
    given = [grammar for grammar in grammars if grammar is not None]
    if len(given) > 1:
        names = " and ".join(f"'{grammar.param}'" for grammar in given)
        raise InvalidRequest(
            f"{names} exclude each other.", param=given[1].param, code="invalid_value"
        )
    return given[0] if given else None


def check_supported(grammar: Grammar | None, kinds: Iterable[GrammarKind]) -> None:
    """Raise InvalidRequest for a grammar that is of none of the `kinds` that the engine can follow.

    What is wrong within a grammar the engine says, before the first token.
    """
    if grammar is not None and grammar.kind not in kinds:
        raise InvalidRequest(
            f"'{grammar.param}' is not supported: this engine cannot follow"
            f" {_KIND_WORDS[grammar.kind]}.",
            param=grammar.param,
            code="unsupported_value",
        )


def schema_grammar(schema: Schema | bool, *, param: str) -> Grammar:
    """The grammar of JSON texts that satisfy `schema`. Raises InvalidRequest for one too big."""
    check_nesting(schema, param=param)
    return _checked(GrammarKind.JSON_SCHEMA, orjson.dumps(schema).decode(), param=param)


_KIND_WORDS = {
    GrammarKind.JSON_SCHEMA: "a JSON schema",
    GrammarKind.REGEX: "a regular expression",
    GrammarKind.EBNF: "a grammar",
}

# Every dialect of regular expressions gives them another meaning unless they are escaped.
_META = re.compile(r"[\\^$.|?*+()\[\]{}/]")
_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def _of_response_format(asked: ResponseFormat | None) -> Grammar | None:
    match asked:
        case JsonObjectsFormat(schema=None):
            return _any_object(param="response_format")
        case JsonObjectsFormat(schema=schema):
            return _of_schema(schema, param="response_format.schema")
        case JsonSchemaFormat(json_schema=named):
            return _of_schema(named.schema, param="response_format.json_schema.schema")
        case JsonFormat(schema=schema):
            return _of_schema(schema, param="response_format.schema")
        case RegexFormat(regex=source):
            return _of_source(source, GrammarKind.REGEX, param="response_format.regex")
        case EbnfFormat(ebnf=source):
            return _of_source(source, GrammarKind.EBNF, param="response_format.ebnf")
        case _:
            return None


def _of_structured_outputs(asked: StructuredOutputs | None) -> tuple[Grammar | None, ...]:
    if asked is None:
        return ()
    place = "structured_outputs"
    return (
        _of_schema(asked.json, param=f"{place}.json"),
        _of_source(asked.regex, GrammarKind.REGEX, param=f"{place}.regex"),
        _of_choices(asked.choice, param=f"{place}.choice"),
        _of_source(asked.grammar, GrammarKind.EBNF, param=f"{place}.grammar"),
        _any_object(param=f"{place}.json_object") if asked.json_object else None,
    )


def _of_schema(schema: Schema | str | None, *, param: str) -> Grammar | None:
    if schema is None:
        return None
    if isinstance(schema, dict):
        return schema_grammar(schema, param=param)
    value = load_value(schema)
    if not isinstance(value, dict | bool):
        raise InvalidRequest(
            f"'{param}' must be a JSON schema, or one as a string.",
            param=param,
            code="invalid_value",
        )
    return schema_grammar(value, param=param)


def _any_object(*, param: str) -> Grammar:
    return schema_grammar({"type": "object"}, param=param)


def _of_choices(choices: list[str] | None, *, param: str) -> Grammar | None:
    if choices is None:
        return None
    source = "|".join(map(_escaped, choices))
    return _checked(GrammarKind.REGEX, f"({source})", param=param)


def _escaped(text: str) -> str:
    text = _META.sub(r"\\\g<0>", text)
    return "".join(_CONTROLS.get(character, character) for character in text)


def _of_source(source: str | None, kind: GrammarKind, *, param: str) -> Grammar | None:
    return None if source is None else _checked(kind, source, param=param)


def _checked(kind: GrammarKind, source: str, *, param: str) -> Grammar:
    if len(source) > SCHEMA_CHARS_MAX:
        raise InvalidRequest(
            f"'{param}' must have at most {SCHEMA_CHARS_MAX} characters.",
            param=param,
            code="string_above_max_length",
        )
    return Grammar(kind=kind, source=source, param=param)
