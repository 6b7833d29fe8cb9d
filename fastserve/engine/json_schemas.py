"""JSON Schemas for a library that builds grammars of them, made to mean what they say.

The library refuses most of what it cannot express. What it would pass over in silence is rewritten
here, or refused: an answer must satisfy its schema, or there is none. Source of the meanings: JSON
Schema, drafts 4 to 2020-12, Validation.

Pure; knows nothing of the library but that.
"""

from __future__ import annotations

from typing import Any

from fastserve.errors import InvalidRequest

# The formats that the library writes exactly. By the specification, any other asserts nothing
# unless a validator knows it ("format" is an annotation), so it may as well be absent.
FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)

# Whose values are data and not schemas.
_DATA = frozenset({"const", "default", "enum", "example", "examples", "required"})
# Whose values are schemas by name: the names mean nothing.
_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
# The library's own settings; a client's would undo ours.
_SETTINGS = "x-guidance"


def exact(schema: object) -> dict[str, Any]:
    """`schema` as the library can take it, with the same meaning. Raises InvalidRequest.

    True and false are schemas too: anything, and nothing.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest("no JSON value satisfies this schema")
    if "draft-03" in str(schema.get("$schema")):
        raise InvalidRequest("draft 3 of JSON Schema is not supported")
    return _exact(schema)


def _exact(schema: dict[str, Any]) -> dict[str, Any]:
    made = {}
    for key, value in schema.items():
        if key == _SETTINGS:
            continue
        if key in _DATA:
            made[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            made[key] = {name: _inner(inner) for name, inner in value.items()}
        else:
            made[key] = _inner(value)
    _drop_unknown_format(made)
    _use_numeric_bounds(made)
    _check_min_properties(made)
    return made


def _inner(value: object) -> object:
    if isinstance(value, dict):
        return _exact(value)
    return [_inner(item) for item in value] if isinstance(value, list) else value


def _drop_unknown_format(schema: dict[str, Any]) -> None:
    known = schema.get("format")
    if isinstance(known, str) and known not in FORMATS:
        del schema["format"]


def _use_numeric_bounds(schema: dict[str, Any]) -> None:
    """Draft 4 has exclusive bounds as a flag beside the bound; later drafts as the bound itself."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        flag = schema.get(exclusive)
        if isinstance(flag, bool):
            del schema[exclusive]
            if flag and bound in schema:
                schema[exclusive] = schema.pop(bound)


def _check_min_properties(schema: dict[str, Any]) -> None:
    """No grammar tells whether two names are the same, so it cannot count different ones."""
    least = schema.get("minProperties")
    required = schema.get("required")
    certain = len(set(required)) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(certain, 1):
        raise InvalidRequest(
            "'minProperties' is supported only up to 1, or up to the number of 'required' ones"
        )
