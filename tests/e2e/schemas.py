"""Answers of the embedded model to schemas that other people wrote, held against a validator.

    python -m tests.e2e.schemas [--number 150] [--url URL] [DIRECTORY...]

The schemas are those of the data models in the openai and anthropic packages, and the ones that
check-jsonschema bundles of SchemaStore; or whatever JSON files are in some directories. An answer
cut by its limit of tokens is no answer: a schema is asked after again with more of a push towards
its end. What the server refuses is counted by itself. Fails if any answer does not satisfy its
schema.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic.types
import check_jsonschema.builtin_schemas
import jsonschema
import openai
import openai.types
import pydantic

from tests.e2e.harness import Server
from tests.e2e.scripted import ids_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType

PARALLEL = 8
MODELS_OF_MODULE_MAX = 2
# A trivial model says little about an engine.
PROPERTIES_MIN = 2
# With each try the tokens that end a value become likelier.
PUSHES = (0, 6, 12)
MAX_TOKENS = 256

ENDS = ['"', '",', '"}', "}", "]", "},", "],", "}}", "null", "[]", "{}"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one schema: "done", "cut", "refused", or "invalid", and why."""

    name: str
    word: str
    why: str = ""
    tokens: int = 0


def of_models(*packages: ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas of the data models in these packages, by name, each once, in an order of chance.

    Modules are imported as it goes: there are thousands.
    """
    names = sorted(name for package in packages for name in _modules(package))
    random.Random(1).shuffle(names)
    seen = set()
    for name in names:
        # Some define dozens that differ in little.
        found = itertools.islice(_models_of(importlib.import_module(name)), MODELS_OF_MODULE_MAX)
        for model, schema in found:
            text = json.dumps(schema, sort_keys=True)
            if text not in seen:
                seen.add(text)
                yield model, schema


def _models_of(module: ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in sorted(vars(module).items()):
        if not isinstance(value, type) or value.__module__ != module.__name__:
            continue
        # A model may refer to what no schema can say.
        with contextlib.suppress(pydantic.errors.PydanticUserError):
            schema = value.model_json_schema() if issubclass(value, pydantic.BaseModel) else {}
            if len(schema.get("properties", ())) >= PROPERTIES_MIN:
                yield f"{module.__name__}.{name}", schema


def _modules(package: ModuleType) -> Iterator[str]:
    root = Path(package.__path__[0])
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not any(part.startswith("_") for part in parts):
            yield ".".join((package.__name__, *parts))


def of_directory(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas in the JSON files of a directory."""
    for path in sorted(directory.rglob("*.json")):
        with contextlib.suppress(ValueError):
            value = json.loads(path.read_text())
            if isinstance(value, dict):
                yield path.stem, value


def bundled() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema that the packages here bring: SchemaStore's, then thousands of models."""
    yield from of_directory(Path(check_jsonschema.builtin_schemas.__file__).parent / "vendor")
    yield from models()


def models() -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas of the clients' data models."""
    return of_models(openai.types, anthropic.types)


def ask(
    client: openai.OpenAI,
    model: str,
    name: str,
    schema: dict[str, Any],
    *,
    pushes: Sequence[int] = PUSHES,
) -> Outcome:
    """Ask for a value of `schema` until an answer is complete, and judge that."""
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    spent = 0
    for seed, push in enumerate(pushes):
        bias = {str(ids_of(end)[0]): push for end in ENDS if push and len(ids_of(end)) == 1}
        try:
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"Give me an example of {name}, in JSON."}],
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "example", "schema": schema, "strict": True},
                },
                temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, logit_bias=bias,
            )  # fmt: skip
        except openai.BadRequestError as error:
            said = error.body["message"] if isinstance(error.body, dict) else error.message
            return Outcome(name, "refused", said, spent)
        assert answer.usage is not None
        spent += answer.usage.completion_tokens
        if answer.choices[0].finish_reason != "stop":
            continue
        text = answer.choices[0].message.content or ""
        try:
            validator.validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            return Outcome(name, "invalid", f"{error}\n{text}", spent)
        return Outcome(name, "done", text, spent)
    return Outcome(name, "cut", tokens=spent)


def ask_all(
    client: openai.OpenAI,
    schemas: Iterable[tuple[str, dict[str, Any]]],
    *,
    pushes: Sequence[int] = PUSHES,
) -> Iterator[Outcome]:
    """The outcomes of all of them, a few at a time."""
    model = client.models.list().data[0].id
    with ThreadPoolExecutor(PARALLEL) as pool:
        yield from pool.map(lambda each: ask(client, model, *each, pushes=pushes), schemas)


def told(outcomes: list[Outcome]) -> str:
    """How many came to what, and why."""
    counts = Counter(outcome.word for outcome in outcomes)
    lines = [f"{len(outcomes)} schemas: " + ", ".join(f"{n} {word}" for word, n in counts.items())]
    reasons = Counter(
        outcome.why.partition(": ")[2][:100] for outcome in outcomes if outcome.word == "refused"
    )
    lines += [f"  {number} refused: {reason}" for reason, number in reasons.most_common()]
    lines += [f"  {each.name}: {each.why}" for each in outcomes if each.word == "invalid"]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Ask after many schemas. Returns 1 if an answer does not satisfy its schema."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.schemas")
    parser.add_argument("directories", nargs="*", type=Path)
    parser.add_argument("--number", type=int, default=150)
    parser.add_argument("--url", help="a server that runs already (default: one of our own)")
    options = parser.parse_args(argv)
    found = [each for directory in options.directories for each in of_directory(directory)]
    schemas = list(itertools.islice(found or bundled(), options.number))
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        if options.url:
            client = openai.OpenAI(base_url=options.url, api_key="none", max_retries=0)
        else:
            client = stack.enter_context(Server()).client()
        outcomes = []
        for outcome in ask_all(client.with_options(timeout=600), schemas):
            print(f"{outcome.word:8} {outcome.tokens:4} tokens  {outcome.name}", flush=True)
            outcomes.append(outcome)
        client.close()
    took_s = time.monotonic() - began_s
    tokens = sum(outcome.tokens for outcome in outcomes)
    print(told(outcomes))
    print(f"{tokens} tokens in {took_s:.0f} s")
    return int(any(outcome.word == "invalid" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
