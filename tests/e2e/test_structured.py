"""Structured output through a real server: what clients of each kind get, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e import schemas
from tests.e2e.harness import DEADLINE_S
from tests.e2e.scripted import ids_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Server


class Step(BaseModel):
    kind: Literal["boil", "chop", "fry"]
    minutes: Annotated[int, Field(ge=1, le=90)]


class Recipe(BaseModel):
    name: Annotated[str, Field(max_length=16)]
    steps: Annotated[list[Step], Field(min_length=1, max_length=3)]
    vegan: bool | None


ASK: Any = [{"role": "user", "content": "Give me a recipe for soup."}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= sum\nsum ::= digit (" + " digit){1,3}\ndigit ::= [0-9]'
ENDLESS = {
    "type": "object",
    "properties": {"a": {"$ref": "#"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(embedded: Server) -> Iterator[openai.OpenAI]:
    with embedded.client() as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def claude(embedded: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=embedded.url, api_key="none", max_retries=0, timeout=DEADLINE_S
    ) as client:
        yield client


# ---- clients that parse


def test_openai_parses_what_it_asked_for(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=ASK, response_format=Recipe, max_tokens=200, n=2
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.parsed is not None
        assert 1 <= len(choice.message.parsed.steps) <= 3


def test_openai_parses_a_stream(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=ASK, response_format=Recipe, max_tokens=200
    ) as stream:
        deltas = [event for event in stream if event.type == "content.delta"]
        answer = stream.get_final_completion()
    assert len(deltas) > 5
    assert "".join(event.delta for event in deltas) == answer.choices[0].message.content
    assert isinstance(answer.choices[0].message.parsed, Recipe)


def test_openai_parses_a_response(client: openai.OpenAI, model: str) -> None:
    response = client.responses.parse(
        model=model, input="Soup?", text_format=Recipe, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Recipe)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    assert client.responses.retrieve(response.id).text == response.text


def test_anthropic_parses_what_it_asked_for(claude: anthropic.Anthropic, model: str) -> None:
    # Its client writes bounds into descriptions, so a schema of our own has them.
    message = claude.messages.create(
        model=model, max_tokens=60, messages=ASK,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )  # fmt: skip
    [block] = message.content
    assert block.type == "text"
    assert json.loads(block.text)["answer"] in ("yes", "no")
    assert message.stop_reason == "end_turn"

    class Verdict(BaseModel):
        answer: Literal["yes", "no"]

    parsed = claude.messages.parse(model=model, max_tokens=60, messages=ASK, output_format=Verdict)
    assert isinstance(parsed.parsed_output, Verdict)


# ---- every way to ask


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "verdict", "schema": SCHEMA, "strict": True}}},
         r'\{"answer": "(yes|no)", "sure": (true|false)\}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}},
         r'\{"answer": "(yes|no)", "sure": (true|false)\}'),
        ({"structured_outputs": {"regex": r"[A-Z]{2}\d{3}"}}, r"[A-Z]{2}\d{3}"),
        ({"structured_outputs": {"choice": ["red", "light blue", "(none)"]}},
         r"red|light blue|\(none\)"),
        ({"structured_outputs": {"grammar": GRAMMAR}}, r"\d( \+ \d){1,3}"),
        ({"guided_regex": r"^\d{4}-\d{2}$"}, r"\d{4}-\d{2}"),
        ({"ebnf": GRAMMAR}, r"\d( \+ \d){1,3}"),
        ({"grammar": GRAMMAR}, r"\d( \+ \d){1,3}"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}},
         r'\{"answer": "(yes|no)", "sure": (true|false)\}'),
    ],
)  # fmt: skip
def test_the_whole_text_matches(
    client: openai.OpenAI, model: str, fields: dict[str, Any], pattern: str
) -> None:
    chat = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=80, n=3, temperature=1.5, extra_body=fields
    )
    text = client.completions.create(
        model=model, prompt="The answer: ", max_tokens=80, logprobs=1, extra_body=fields
    )
    streamed = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=80, stream=True, extra_body=fields
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in streamed]
    said = [choice.message.content or "" for choice in chat.choices]
    for each in (*said, text.choices[0].text, "".join(pieces)):
        assert re.fullmatch(pattern, each), each
    assert {choice.finish_reason for choice in chat.choices} == {"stop"}
    assert text.choices[0].finish_reason == "stop"


def test_any_object(client: openai.OpenAI, model: str) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model=model, messages=ASK, response_format={"type": "json_object"}, max_tokens=300,
            seed=seed, logit_bias={str(token_id): 4 for token_id in ids_of('"}')},
        )  # fmt: skip
        content = answer.choices[0].message.content or ""
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(content), dict)
        else:
            assert content.startswith("{")


# ---- schemas of other people

DOZEN = 12


@pytest.mark.timeout(400)
def test_answers_satisfy_a_dozen_schemas_that_nobody_here_wrote(client: openai.OpenAI) -> None:
    patient = client.with_options(timeout=300)
    asked = itertools.islice(schemas.models(), DOZEN)
    outcomes = list(schemas.ask_all(patient, asked, pushes=(6, 12)))
    words = Counter(outcome.word for outcome in outcomes)
    assert set(words) <= {"done", "cut"}, schemas.told(outcomes)
    assert words["done"] >= DOZEN // 2, schemas.told(outcomes)


# ---- what is refused


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"type": "array", "uniqueItems": True}}}},
         "response_format.json_schema.schema"),
        ({"guided_json": {"type": "thing"}}, "guided_json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= other"}}, "structured_outputs.grammar"),
        ({"regex": "a", "ebnf": "root ::= x"}, "ebnf"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(
    client: openai.OpenAI, model: str, fields: dict[str, Any], param: str, *, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model, messages=ASK, max_tokens=9, stream=stream, extra_body=fields
        )
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_schema_that_cannot_come_to_an_end_ends_with_an_error(
    client: openai.OpenAI, model: str
) -> None:
    fields: Any = {"guided_json": ENDLESS}
    with pytest.raises(openai.BadRequestError, match="cannot be followed"):
        client.chat.completions.create(model=model, messages=ASK, extra_body=fields)
    stream = client.chat.completions.create(
        model=model, messages=ASK, extra_body=fields, stream=True
    )
    with pytest.raises(openai.APIError, match="cannot be followed"):
        list(stream)


def test_an_engine_that_follows_no_grammar_says_so(sim: Server) -> None:
    with sim.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="sim", messages=ASK, response_format={"type": "json_object"}
        )
    assert caught.value.param == "response_format"
    assert "this engine cannot follow" in caught.value.message
