"""Whether a value fits a JSON Schema (draft 2020-12), as far as our document uses the language.

A keyword that is not known here is an error, so that no schema is taken to say less than it does.
"""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_NOTES = {"title", "description", "default", "discriminator"}

_TYPES: dict[str, Callable[[Any], bool]] = {
    "array": lambda value: isinstance(value, list),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
}

# Keyword -> the type it is about, and when it holds.
_BOUNDS: dict[str, tuple[type | tuple[type, ...], Callable[[Any, Any], bool]]] = {
    "minimum": ((int, float), operator.ge),
    "maximum": ((int, float), operator.le),
    "exclusiveMinimum": ((int, float), operator.gt),
    "minLength": (str, lambda value, bound: len(value) >= bound),
    "maxLength": (str, lambda value, bound: len(value) <= bound),
    "pattern": (str, lambda value, form: re.search(form, value) is not None),
    "minItems": (list, lambda value, bound: len(value) >= bound),
    "maxItems": (list, lambda value, bound: len(value) <= bound),
    "maxProperties": (dict, lambda value, bound: len(value) <= bound),
}


def fits(value: Any, schema: Any, *, document: Any) -> bool:
    """Whether `value` fits `schema`, whose references lead into `document`."""
    return all(
        _holds(keyword, said, value, schema, document)
        for keyword, said in schema.items()
        if keyword not in _NOTES
    )


def resolve(reference: str, document: Any) -> Any:
    """What a reference within the document leads to."""
    found = document
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    return found


def _holds(keyword: str, said: Any, value: Any, schema: Any, document: Any) -> bool:
    if keyword in _BOUNDS:
        kinds, holds = _BOUNDS[keyword]
        return not isinstance(value, kinds) or holds(value, said)
    match keyword:
        case "type":
            return _TYPES[said](value)
        case "$ref":
            return fits(value, resolve(said, document), document=document)
        case "anyOf":
            return any(fits(value, option, document=document) for option in said)
        case "enum":
            return any(value == e and isinstance(value, bool) == isinstance(e, bool) for e in said)
        case "required":
            return not isinstance(value, dict) or all(name in value for name in said)
        case "items":
            return not isinstance(value, list) or all(
                fits(item, said, document=document) for item in value
            )
        case "propertyNames":
            return not isinstance(value, dict) or all(
                fits(name, said, document=document) for name in value
            )
        case "properties":
            return not isinstance(value, dict) or all(
                fits(value[name], inner, document=document)
                for name, inner in said.items()
                if name in value
            )
        case "additionalProperties":
            if not isinstance(value, dict) or said is True:
                return True
            rest = value.keys() - schema.get("properties", {}).keys()
            if said is False:
                return not rest
            return all(fits(value[name], said, document=document) for name in rest)
    raise AssertionError(f"unknown keyword: {keyword}")
