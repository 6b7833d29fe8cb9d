"""The prompts of a completion: their forms as they are sent, and how they are cut to fit.

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

# vLLM's word for "as many as fit".
FIT = -1

Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Side = Literal["left", "right"]


class _TokenIds(msgspec.Struct, frozen=True):
    """A prompt of token ids alone: checked by itself, so that an error names the right item."""

    prompt: list[Count]


def read_prompts(value: object) -> tuple[object, ...]:
    """The prompts in the one form for all: a text, token ids, or an array of texts or of ids.

    Raises InvalidRequest. What is within an array is checked by the Struct that takes it.
    """
    if value is None:
        raise missing("prompt")
    if not isinstance(value, str | list):
        raise wrong_type("prompt", want="a string or an array", got=value)
    if not value:
        raise empty("prompt")
    if isinstance(value, str):
        return (value,)
    if isinstance(value[0], int | float):
        return (convert({"prompt": value}, _TokenIds).prompt,)
    if len(value) > PROMPTS_MAX:
        raise InvalidRequest(
            f"'prompt' must have at most {PROMPTS_MAX} items.",
            param="prompt",
            code="array_above_max_length",
        )
    for index, prompt in enumerate(value):
        if prompt in ("", []):
            raise empty(f"prompt[{index}]")
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
