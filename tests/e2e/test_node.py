"""openai's client for Node reads what openai's client for Python reads."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.harness import Server, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

if shutil.which("npm") is None or shutil.which("node") is None:
    pytest.skip("npm is not on this machine", allow_module_level=True)

KEY = "node-key"
# Pings come between tokens: the client must pass over comments.
FLAGS = (
    "--engine", "sim", "--sim-step-ms", "20", "--served-model-name", "m", "--frontends", "1",
    "--limits-sse-ping-interval-s", "0.05", "--api-key", KEY,
)  # fmt: skip

SCRIPT = """
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const asked = { model: "m", max_tokens: 12, temperature: 0 };
const prompt = "Speak";
const messages = [{ role: "user", content: "Speak \\u{1F525}" }];
const found = {};

async function chunks(stream) {
  const all = [];
  for await (const chunk of stream) all.push(chunk);
  return all;
}

async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code ?? null,
             type: error.type ?? null, message: String(error.message) };
  }
  return null;
}

found.models = (await client.models.list()).data.map((model) => model.id);
found.completion = await client.completions.create({ ...asked, prompt });
found.completionChunks = await chunks(
  await client.completions.create({ ...asked, prompt, stream: true,
    stream_options: { include_usage: true } }));
found.chat = await client.chat.completions.create({ ...asked, messages });
found.chatChunks = await chunks(
  await client.chat.completions.create({ ...asked, messages, stream: true }));
const response = await client.completions.create({ ...asked, prompt }).asResponse();
found.requestId = response.headers.get("x-request-id");
found.notFound = await failure(client.completions.create({ ...asked, model: "other", prompt }));
found.invalid = await failure(client.completions.create({ ...asked, prompt, max_tokens: -1 }));
found.broken = await failure((async () => chunks(await client.completions.create({
  ...asked, prompt, stream: true, sim: { fail_at: 3 } })))());
const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
found.unauthorized = await failure(stranger.models.list());

const controller = new AbortController();
let seen = 0;
try {
  const long = await client.completions.create(
    { ...asked, prompt, max_tokens: 4000, stream: true }, { signal: controller.signal });
  for await (const _ of long) if (++seen === 3) controller.abort();
} catch (error) {
  found.abort = error.constructor.name;
}
found.seen = seen;
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def found(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the client for Node saw of a server."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    install(folder)
    (folder / "script.mjs").write_text(SCRIPT)
    run = subprocess.run(
        ["node", "script.mjs", f"{server.url}/v1", KEY],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def install(folder: Path) -> None:
    run = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--silent", "openai"],
        cwd=folder, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr + run.stdout


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in choices
    )


def test_whole_answers_are_those_that_python_sees(found: dict[str, Any], server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        whole = client.completions.create(model="m", max_tokens=12, temperature=0, prompt="Speak")
    assert found["models"] == ["m"]
    assert found["completion"]["choices"][0]["text"] == whole.choices[0].text
    assert found["completion"]["usage"]["completion_tokens"] == 12
    assert found["requestId"]


@pytest.mark.parametrize(
    ("whole", "chunks"), [("completion", "completionChunks"), ("chat", "chatChunks")]
)
def test_streams_say_the_same(found: dict[str, Any], whole: str, chunks: str) -> None:
    choice = found[whole]["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert len(found[chunks]) >= 12
    assert text_of(found[chunks]) == text


def test_the_usage_comes_last(found: dict[str, Any]) -> None:
    last = found["completionChunks"][-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("case", "name", "status", "code"),
    [
        ("notFound", "NotFoundError", 404, "model_not_found"),
        ("invalid", "BadRequestError", 400, "integer_below_min_value"),
        ("unauthorized", "AuthenticationError", 401, "invalid_api_key"),
    ],
)
def test_errors_are_recognized(
    found: dict[str, Any], case: str, name: str, status: int, code: str
) -> None:
    error = found[case]
    assert (error["name"], error["status"], error["code"]) == (name, status, code)
    assert len(error["message"]) > 10


def test_an_error_in_a_stream_is_one(found: dict[str, Any]) -> None:
    assert found["broken"]["name"] == "APIError"
    assert found["broken"]["code"] == "generation_failed"


def test_a_client_that_stops_reading_is_gone(found: dict[str, Any], server: Server) -> None:
    assert found["seen"] == 3
    wait_until(lambda: server.num_in_engine() == 0, deadline_s=10.0)
