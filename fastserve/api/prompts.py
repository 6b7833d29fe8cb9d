"""The prompts of a completion, or what is to be embedded: their forms, and how they are cut to fit.

Knows nothing of the other fields (requests.py) or of tokenizing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from fastserve.api.body import INT64_MAX, convert, missing, wrong_type
from fastserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

# vLLM's, per request.
PROMPTS_MAX = 1024
# OpenAI's, per request.
INPUTS_MAX = 2048

# vLLM's word for "as many as fit".
FIT = -1

Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Side = Literal["left", "right"]


class _TokenIds(msgspec.Struct, frozen=True):
    """A prompt of token ids alone: checked by itself, so that an error names the right item."""

    prompt: list[Count]


class _InputIds(msgspec.Struct, frozen=True):
    """The same, of a text that is to be embedded."""

    prompt: list[Count] = msgspec.field(name="input")


def read_prompts(value: object) -> tuple[object, ...]:
    """The prompts in the one form for all: a text, token ids, or an array of texts or of ids.

    Raises InvalidRequest. What is within an array is checked by the Struct that takes it.
    """
    return _read(value, param="prompt", alone=_TokenIds, most=PROMPTS_MAX)


def read_inputs(value: object) -> tuple[object, ...]:
    """The same of the texts that are to be embedded."""
    return _read(value, param="input", alone=_InputIds, most=INPUTS_MAX)


def _read(
    value: object, *, param: str, alone: type[_TokenIds] | type[_InputIds], most: int
) -> tuple[object, ...]:
    if value is None:
        raise missing(param)
    if not isinstance(value, str | list):
        raise wrong_type(param, want="a string or an array", got=value)
    if not value:
        raise empty(param)
    if isinstance(value, str):
        return (value,)
    if isinstance(value[0], int | float):
        return (convert({param: value}, alone).prompt,)
    if len(value) > most:
        raise InvalidRequest(
            f"'{param}' must have at most {most} items.",
            param=param,
            code="array_above_max_length",
        )
    for index, prompt in enumerate(value):
        if prompt in ("", []):
            raise empty(f"{param}[{index}]")
    return tuple(value)


def truncated(
    token_ids: list[int], *, keep: int | None, side: Side, max_seq_len: int, num_wanted: int
) -> list[int]:
    """What is left of a prompt of which at most `keep` tokens are to be kept (None: all).

    FIT keeps what leaves room for `num_wanted` tokens of answer. `side` is where tokens go from
    (vLLM's `truncate_prompt_tokens` and `truncation_side`). The same list if nothing goes.
    """
    if keep is None:
        return token_ids
    if keep == FIT:
        keep = max(max_seq_len - num_wanted, 1)
    if len(token_ids) <= keep:
        return token_ids
    return token_ids[-keep:] if side == "left" else token_ids[:keep]


def check_ids(ids: dict[int, float] | Sequence[int] | None, *, param: str, vocab_size: int) -> None:
    """Raise InvalidRequest if any of these ids is none of the model's."""
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(
            f"'{param}' has a token id that is not below the vocabulary's {vocab_size}.",
            param=param,
            code="integer_above_max_value",
        )


def empty(param: str) -> InvalidRequest:
    """The error for a field that must not be empty."""
    return InvalidRequest(f"'{param}' must not be empty.", param=param, code="invalid_value")
