"""Bodies for every route that takes one: such as are fine, and such as never are."""

from __future__ import annotations

from typing import Any

_USER = {"role": "user", "content": "Hi"}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
_IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}

_FUNCTION = {"name": "f", "description": "Do.", "parameters": {"type": "object"}, "strict": None}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALLS = [
    _USER,
    {
        "role": "assistant", "content": None, "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "done"},
]  # fmt: skip
_USE = {"name": "f", "description": "Do.", "input_schema": {"type": "object"}}
_USES = [
    _USER,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no", "is_error": True},
            {"type": "text", "text": "And?"},
        ],
    },
]

_SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 1, "top_k": -1, "min_p": 0.1, "seed": -1, "stop": "x",
    "presence_penalty": -2, "repetition_penalty": 1.5, "logit_bias": {"9": -100},
    "ignore_eos": True, "stop_token_ids": [1, 2],
}  # fmt: skip

FINE: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [_USER]},
        {"messages": [_PARTS, {"role": "assistant", "content": None}, _USER], "max_tokens": 2},
        {"messages": [_USER], "max_completion_tokens": 2, "max_tokens": None, **_SAMPLING},
        {"messages": [_USER], "max_tokens": 2, "logprobs": True, "top_logprobs": 2, "n": 2},
        {"messages": [_USER], "max_tokens": 2, "tools": [], "response_format": {"type": "text"}},
        {"messages": _CALLS, "max_tokens": 2, "tools": [_TOOL], "tool_choice": "none", "new": 1},
        {"prompt_token_ids": [1, 2], "max_tokens": 2, "priority": -3},
        {
            "messages": [_USER, {"role": "assistant", "content": "So"}], "max_tokens": 2,
            "continue_final_message": True, "echo": True, "truncate_prompt_tokens": 2,
            "truncation_side": "right", "return_token_ids": True,
        },
        {"messages": [_USER], "response_format": {"type": "json_object"}, "max_tokens": 2},
        {"messages": [_USER], "max_tokens": 2, "response_format": {
            "type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}},
        {"messages": [_USER], "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}},
    ],
    "/v1/completions": [
        {"prompt": "Hi"},
        {"prompt": ["Hi", "Ho"], "stop": ["a", "b"], **(_SAMPLING | {"stop": []})},
        {"prompt": [1, 2, 3], "logprobs": 2, "n": 2, "best_of": 2},
        {"prompt": [[1], [2, 3]], "echo": True, "max_tokens": 0},
        {
            "prompt": "Hi", "echo": True, "logprobs": 1, "max_tokens": 0, "priority": 2,
            "truncate_prompt_tokens": -1, "return_tokens_as_token_ids": True,
        },
        {"prompt": "Hi", "guided_json": "{}"},
        {"prompt": "Hi", "regex": "a+"},
        {"prompt": "Hi", "grammar": "root ::= [a-z]"},
    ],
    "/v1/responses": [
        {"input": "Hi", "max_output_tokens": 2},
        {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 2, **_SAMPLING},
        {
            "input": [
                {"type": "message", "role": "assistant",
                 "content": [{"type": "output_text", "text": "Hi"}]},
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            ],
            "instructions": "Be brief.", "max_output_tokens": 2, "metadata": {"a": "b"},
            "reasoning": {"effort": "low", "summary": None}, "truncation": "disabled",
            "text": {"format": {"type": "text"}}, "store": False,
        },
        {
            "input": [
                {"role": "user", "content": "Hi"},
                {"type": "reasoning", "id": "rs_1", "summary": [],
                 "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "done"},
            ],
            "tools": [{"type": "function"} | _FUNCTION], "tool_choice": "none",
            "max_output_tokens": 2, "parallel_tool_calls": False,
        },
        {"input": "Hi", "max_output_tokens": 2, "text": {
            "format": {"type": "json_schema", "name": "a", "schema": {}}, "verbosity": "medium"}},
    ],
    "/v1/messages": [
        {"messages": [_USER], "max_tokens": 2},
        {
            "messages": [_PARTS, {"role": "assistant", "content": "Hi"}, _USER], "max_tokens": 2,
            "system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["x"],
            "temperature": 0, "top_k": 1, "thinking": {"type": "disabled"}, "metadata": {},
        },
        {"messages": _USES, "max_tokens": 2, "tools": [_USE], "tool_choice": {"type": "none"}},
        {
            "messages": [_USER], "max_tokens": 2, "tools": [_USE | {"type": None}],
            "tool_choice": {"type": "none", "disable_parallel_tool_use": None},
        },
        {"messages": [_USER], "max_tokens": 2,
         "output_config": {"format": {"type": "json_schema", "schema": {}}}},
    ],
    "/v1/messages/count_tokens": [
        {"messages": [_USER]},
        {"messages": [_USER, _PARTS], "system": "Be brief.", "tools": []},
    ],
    "/v1/embeddings": [
        {"input": "Hi"},
        {"input": ["Hi", [1, 2]], "encoding_format": "base64", "user": "me"},
        {"input": [1, 2, 3], "encoding_format": "float"},
        {"input": [[1, 2], [3]], "dimensions": 8},
    ],
    "/tokenize": [
        {"prompt": "Hi", "add_special_tokens": False, "return_token_strs": True},
        {"content": "Hi", "with_pieces": True, "parse_special": False, "add_special": True},
        {"messages": [_USER], "add_generation_prompt": False},
    ],
    "/detokenize": [{"tokens": []}, {"tokens": [1, 2, 3], "skip_special_tokens": None}],
}  # fmt: skip

WRONG: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {},
        {"messages": []},
        {"messages": "Hi"},
        {"messages": [{"role": "nobody", "content": "Hi"}]},
        {"messages": [_IMAGE]},
        {"messages": [_USER], "temperature": 3},
        {"messages": [_USER], "n": 0},
        {"messages": [_USER], "n": 1.5},
        {"messages": [_USER], "stop": ""},
        {"messages": [_USER], "stop": ["x"] * 17},
        {"messages": [_USER], "logit_bias": {"9": 101}},
        {"messages": [_USER], "response_format": "json_object"},
        {"messages": [_USER], "response_format": {"type": "poem"}},
        {"messages": [_USER], "response_format": {"type": "json_schema"}},
        {"messages": [_USER], "response_format": {"type": "regex", "regex": ""}},
        {"messages": [_USER], "response_format": {"type": "json_object", "schema": 1}},
        {"messages": [_USER], "grammar": {"kind": "regex", "source": "a"}},
        {"messages": [_USER], "structured_outputs": {"whitespace_pattern": " "}},
        {"messages": [_USER], "guided_choice": []},
        {"messages": [_USER], "guided_whitespace_pattern": " "},
        {"messages": [_USER], "audio": {}},
        {"messages": [_USER], "tools": [{}], "tool_choice": "none"},
        {"messages": [_USER], "tools": [_TOOL], "tool_choice": "some"},
        {"messages": [_USER], "tools": [_TOOL | {"type": "custom"}]},
        {"messages": [_USER], "tools": [{"type": "function", "function": {"name": "f g"}}]},
        {"messages": [_USER], "include_reasoning": "no"},
        {"messages": [_USER], "prompt_token_ids": []},
        {"prompt_token_ids": None},
        {"messages": [_USER], "truncate_prompt_tokens": -2},
        {"messages": [_USER], "truncation_side": "up"},
        {"messages": [_USER], "priority": 2**63},
    ],
    "/v1/completions": [
        {},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [""]},
        {"prompt": [-1]},
        {"prompt": {"a": 1}},
        {"prompt": "Hi", "logprobs": 21},
        {"prompt": "Hi", "echo": "yes"},
        {"prompt": "Hi", "suffix": "x"},
    ],
    "/v1/responses": [
        {},
        {"input": []},
        {"input": 1},
        {"input": [{"type": "web_search_call"}]},
        {"input": [{"type": "function_call_output", "call_id": 1, "output": "x"}]},
        {"input": "Hi", "tools": [{"type": "web_search"}]},
        {"input": "Hi", "tools": [_TOOL]},
        {"input": "Hi", "tool_choice": {"type": "web_search"}},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": "Hi", "max_output_tokens": 0},
        {"input": "Hi", "include": ["all"]},
        {"input": "Hi", "metadata": {"a": 1}},
        {"input": "Hi", "metadata": {"a" * 65: ""}},
        {"input": "Hi", "reasoning": {"summary": "auto"}},
        {"input": "Hi", "background": True},
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a"}}},
        {"input": "Hi", "text": {"verbosity": "high"}},
        {"input": "Hi", "max_tokens": 1},
        {"input": "Hi", "n": 2},
    ],
    "/v1/messages": [
        {},
        {"messages": [_USER]},
        {"messages": [], "max_tokens": 1},
        {"messages": [{"role": "system", "content": "Hi"}], "max_tokens": 1},
        {"messages": [{"role": "user"}], "max_tokens": 1},
        {"messages": [_IMAGE], "max_tokens": 1},
        {"messages": [_USER], "max_tokens": 0},
        {"messages": [_USER], "max_tokens": 1, "temperature": 1.5},
        {"messages": [_USER], "max_tokens": 1, "stop_sequences": "x"},
        {"messages": [_USER], "max_tokens": 1, "system": 1},
        {"messages": [_USER], "max_tokens": 1, "output_format": {"type": "json_schema"}},
        {"messages": [_USER], "max_tokens": 1, "output_format": {"schema": {}}},
        {"messages": [_USER], "max_tokens": 1, "output_config": {"format": {"schema": {}}}},
        {"messages": [{"role": "user", "content": [{"type": {}}]}], "max_tokens": 1},
        {"messages": [{"role": "user", "content": [{"type": []}]}], "max_tokens": 1},
        {"messages": [_USER], "max_tokens": 1, "output_config": {"effort": "low"}},
        {"messages": [_USER], "max_tokens": 1, "thinking": {"type": "enabled"}},
        {"messages": [_USER], "max_tokens": 1, "tools": [{"name": "f"}]},
        {"messages": [_USER], "max_tokens": 1, "tools": [_USE | {"type": "bash_20250124"}]},
        {"messages": [_USER], "max_tokens": 1, "tools": [_USE], "tool_choice": {"type": "one"}},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 1},
    ],
    "/v1/messages/count_tokens": [{}, {"messages": [_USER], "container": "x"}],
    "/v1/embeddings": [
        {},
        {"input": ""},
        {"input": []},
        {"input": ["Hi", ""]},
        {"input": [[]]},
        {"input": [-1]},
        {"input": [1.5]},
        {"input": {"text": "Hi"}},
        {"input": "Hi", "encoding_format": "int8"},
        {"input": "Hi", "dimensions": 0},
    ],
    "/tokenize": [
        {},
        {"prompt": None},
        {"prompt": 1},
        {"messages": []},
        {"content": "Hi", "with_pieces": 1},
    ],
    "/detokenize": [{}, {"tokens": [-1]}, {"tokens": "Hi"}, {"tokens": [1.5]}],
}
# What is asked with is what would be asked.
for _bodies in (FINE, WRONG):
    _bodies["/v1/responses/input_tokens"] = _bodies["/v1/responses"]
