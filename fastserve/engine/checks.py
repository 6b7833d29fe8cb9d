"""What no engine can run, whatever its library is: every adapter refuses it in the same words.

A library may fail on such a request, and take the others of its batch with it, or ignore what it
does not know. So an adapter asks here first, and adds what its own library lacks.

Pure. Knows nothing of any library.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from fastserve.errors import ContextLengthExceeded, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection

    from fastserve.generation import ModelCard
    from fastserve.lane.messages import Submit


def check_request(submit: Submit, *, card: ModelCard, vocab_size: int) -> int:
    """Return how many tokens the answer may have: `max_tokens`, or what the context leaves.

    Where the prompt's logprobs are wanted, or its embedding, that may be none. `vocab_size`: the
    width of the model's logits, which a card's may exceed. Raises InvalidRequest, and
    ContextLengthExceeded for a prompt that leaves no room for a token of answer.
    """
    prompt, params = submit.prompt_token_ids, submit.sampling
    if submit.embed != bool(card.embedding_size):
        does = "embeds texts and generates none" if card.embedding_size else "makes no embeddings"
        raise InvalidRequest(f"this model {does}", param="model")
    room = card.max_seq_len - len(prompt)
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    least = 0 if submit.embed or params.prompt_logprobs is not None else 1
    if room < min(params.max_tokens, 1):
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens; with one of answer, the model's context "
            f"holds {card.max_seq_len}"
        )
    if params.max_tokens < least:
        raise InvalidRequest(f"max_tokens is less than {least}", param="max_tokens")
    if params.grammar is not None and params.grammar.kind not in card.grammar_kinds:
        raise InvalidRequest(
            f"this engine cannot follow a grammar of kind {params.grammar.kind}",
            param=params.grammar.param,
        )
    for param, ids in (
        ("prompt", prompt),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if ids and not _are_within(ids, vocab_size):
            raise InvalidRequest(
                f"{param} has a token id that is not within 0 to {vocab_size - 1}", param=param
            )
    return min(params.max_tokens, room)


def _are_within(ids: Collection[int], size: int) -> bool:
    # A long prompt is an array of unsigned numbers, and each look at them all takes milliseconds.
    unsigned = isinstance(ids, array) and ids.typecode == "I"
    return max(ids) < size and (unsigned or min(ids) >= 0)


def refuse_script(submit: Submit) -> None:
    """Raise InvalidRequest for a script, which only a simulated engine follows."""
    if submit.sim is not None:
        raise InvalidRequest("this engine is not simulated", param="sim")
