"""Fields that clients send and we do not act on: which are refused, and which may be ignored.

A field that would change the answer is refused unless it has a value that asks for nothing: an
answer that quietly lacks what was asked for is worse than none. A field that only tells us
something is accepted. A field nobody knows is ignored, as the other open servers do, and counted.

The fields we do act on are in requests.py and structured.py; some are here all the same, since not
all dialects act on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

# They identify, label or advise; the right answer is the same without them. Whatever splits a
# text into special tokens and spaces, tokenizer.json says: we add no spaces of our own.
ACCEPTED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",
        "user",
    }
)

# Field -> the values that ask for nothing. OpenAI's fields first, then those of vLLM, SGLang and
# TensorRT-LLM, which change the output of the servers that know them.
HARMLESS: dict[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "detokenize": (True,),
    "disaggregated_params": (),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "input_ids": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "lora_request": (),
    "min_new_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_ignore_length": (0,),
    "prompt_logprobs": (),
    "prompt_token_ids": (),
    "repetition_detection": (),
    "return_context_logits": (False,),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "stop_regex": ([], ""),
    "structural_tag": (),
    "thinking": (),
    "thinking_token_budget": (),
    "top_p_min": (0,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
}


def sort_out(
    fields: dict[str, Any],
    *,
    ours: frozenset[str],
    accepted: frozenset[str] = ACCEPTED,
    harmless: Mapping[str, tuple[object, ...]] = HARMLESS,
) -> tuple[str, ...]:
    """Refuse what cannot be ignored among the fields that are not `ours`; return unknown names.

    Raises InvalidRequest naming the field.
    """
    unknown = []
    for name in fields.keys() - ours:
        if name in harmless:
            if not any(_same(fields[name], value) for value in harmless[name]):
                raise _refusal(name, some=bool(harmless[name]))
        elif name == "best_of":
            _check_best_of(fields)
        elif name not in accepted:
            unknown.append(name)
    return tuple(unknown)


def _same(value: object, other: object) -> bool:
    """Whether two JSON values are the same; to Python alone, false is 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _check_best_of(fields: dict[str, Any]) -> None:
    # The best n of n are all of them; anything else needs a choice that we do not make.
    if fields["best_of"] != fields.get("n", 1):
        raise _refusal("best_of", unless=" unless it equals 'n'")


def _refusal(name: str, *, some: bool = False, unless: str = "") -> InvalidRequest:
    """The error for a field; `some`: of its values are fine."""
    if some:
        return InvalidRequest(
            f"'{name}' is not supported with this value.", param=name, code="unsupported_value"
        )
    return InvalidRequest(
        f"'{name}' is not supported{unless}.", param=name, code="unsupported_parameter"
    )
