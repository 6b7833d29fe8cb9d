"""The tests of llama.cpp's server, run against ours as far as they speak a dialect that we speak.

    python -m tests.e2e.llamacpp_suite --tests DIR

DIR is `tools/server/tests` of a llama.cpp tree, which llama-cpp-python's source distribution has
under `vendor/llama.cpp`. Their harness needs `pip install filelock requests wget`. What cannot pass
is said here, with the reason, and must fail: one that passes all the same is an error, too.

The module is also the plugin of their pytest that marks those tests.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.harness import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{{- message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""

# The names by which they ask for the model.
NAMES = [
    "gpt-3.5-turbo-instruct", "gpt-3.5-turbo", "gpt-4.1", "test", "codellama70b",
    "llama-test-model", "davinci-002",
]  # fmt: skip
KEY = "sk-this-is-the-secret-key"

OPEN = [
    "unit/test_chat_completion.py",
    "unit/test_compat_anthropic.py",
    "unit/test_compat_oai_responses.py",
    "unit/test_tokenize.py",
    "unit/test_tool_call.py",
    "unit/test_basic.py::test_server_start_simple",
    "unit/test_completion.py::test_completion_with_openai_library",
    "unit/test_completion.py::test_completion_stream_with_openai_library",
]
LOCKED = ["unit/test_security.py"]

WORDS = "asserts the words or the tokens of another model"
FINGERPRINT = "wants llama.cpp's build as system_fingerprint, and another model's words"
FIRST_NULL = "wants null in the first chunk, where OpenAI has an empty text"
FIELD = "is about a field of llama.cpp's own"
ROUTE = "is about a route of llama.cpp's own"
IMAGE = "wants 500 for an image; here it is 400"
ERROR_TYPE = "wants an error type of llama.cpp's own, where OpenAI has another"
FLAG = "needs a flag of llama.cpp's own"

# What cannot pass: a test, or some cases of it, and why.
CANNOT = {
    "test_chat_completion": FINGERPRINT,
    "test_chat_completion_cached_tokens": WORDS,
    "test_chat_completion_stream": FIRST_NULL,
    "test_chat_completion_with_openai_library": FINGERPRINT,
    "test_chat_template": FIELD,
    "test_chat_template_assistant_prefill": FIELD,
    "test_chat_template_continue_final_message_vllm_compat": FIELD,
    "test_apply_chat_template": ROUTE,
    "test_invalid_chat_completion_req[messages7]": "wants 400 for two assistant turns in a row",
    "test_chat_completion_with_timings_per_token": FIELD,
    "test_logprobs_stream": FIRST_NULL,
    "test_context_size_exceeded": ERROR_TYPE,
    "test_context_size_exceeded_stream": ERROR_TYPE,
    "test_return_progress": FIELD,
    "test_chat_completions_token_count": ROUTE,
    "test_verbose_debug": FIELD,
    "test_tokenize_with_bos": WORDS,
    "test_responses_with_openai_library": WORDS,
    "test_responses_stream_with_llama_telemetry": FIELD,
    "test_anthropic_tool_result_with_image": IMAGE,
    "test_anthropic_vision_format_accepted": IMAGE,
    "test_anthropic_vision_base64_with_multimodal_model": "needs a model that sees",
    "test_anthropic_empty_messages": "wants 200 without messages, where Anthropic has 400",
    "test_anthropic_thinking": "wants a budget to think ignored; it is refused",
    "test_anthropic_thinking_history_in_template": ROUTE,
    "test_completion_with_openai_library": WORDS,
    "test_completion_stream_with_openai_library": WORDS,
    "test_completion_without_tool_call_fast[STREAMED]": FIRST_NULL,
    "test_access_static_assets_without_api_key": "asks for the files of llama.cpp's page",
    "test_incorrect_api_key": ERROR_TYPE,
    "test_correct_api_key": ROUTE,
    "test_correct_api_key_anthropic_header": ROUTE,
    "test_cors_options": "wants 200 and the words of llama.cpp's headers",
    "test_cors_origins_localhost_reflects": FLAG,
    "test_cors_origins_localhost_rejects": FLAG,
    "test_cors_origins_defaults_to_localhost_with_tools_enabled": FLAG,
    "test_cors_proxy_only_forwards_explicit_proxy_headers": ROUTE,
    "test_local_media_file": FLAG,
}


def why_not(name: str) -> str | None:
    """Why the test of that name cannot pass, if so. Of its case only the last word counts."""
    test, _, case = name.partition("[")
    last = re.split(r"[-.]", case)[-1]
    return CANNOT.get(test) or CANNOT.get(f"{test}[{last}")


# ---- the plugin


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what cannot pass, and lead their paths to where they are with us."""
    for item in items:
        if reason := why_not(item.name):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    # Only now that they are collected can it be found.
    utils: Any = sys.modules["utils"]
    utils.ServerProcess.make_url = _url_of
    make_client: Any = openai.OpenAI.__init__

    def make(self: openai.OpenAI, *, base_url: str, **options: Any) -> None:
        make_client(self, base_url=base_url.removesuffix("/v1") + "/v1", **options)

    # They have imported the class by its name. (setattr, since its type is another.)
    setattr(openai.OpenAI, "__init__", make)  # noqa: B010


def _url_of(server: Any, path: str, host: str | None = None) -> str:
    """The address of a path: llama.cpp has some both with and without its beginning."""
    beginning = "/v1" if path.startswith(("/chat/", "/responses", "/completions")) else ""
    return f"http://127.0.0.1:{server.server_port}{beginning}{path}"


# ---- the command


def run(directory: Path, tests: Sequence[str], *flags: str) -> int:
    """Run these tests of theirs against a server with these flags; return pytest's code."""
    with Server(*flags) as server:
        return subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "-rxXfE", "--tb=short", "-m", "not slow",
                "-p", "no:cacheprovider", "-p", "tests.e2e.llamacpp_suite", "-c", "pytest.ini",
                *tests,
            ],
            cwd=directory,
            env=dict(os.environ)
            | {"DEBUG_EXTERNAL": "1", "PORT": str(server.port), "PYTHONPATH": os.getcwd()},
            check=False,
        ).returncode  # fmt: skip


def main(argv: list[str]) -> int:
    """Run them all. Returns 1 if one fails that can pass, or passes that cannot."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.llamacpp_suite")
    parser.add_argument("--tests", type=Path, required=True, metavar="DIR")
    directory = parser.parse_args(argv).tests
    common = ["--engine-max-seq-len", "512", "--cors-allow-origins", "*"]
    common += [part for name in NAMES for part in ("--served-model-name", name)]
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        tools = ["--chat-template", template.name, "--tool-parser", "hermes"]
        codes = [
            run(directory, OPEN, *common, *tools),
            run(directory, LOCKED, *common, "--api-key", KEY),
        ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
