"""`python -m bench.gpu_check --model DIR`: all of fastserve over a real engine, looked at once.

Starts servers, asks them everything that an engine must answer for, kills one's worker, drains the
other, and prints what it saw; each line is a check, and says what was seen whether it holds or not.
Exit codes: 0 all of it holds, 1 something does not, 2 there is no GPU or no TensorRT-LLM here.

`--engine llamacpp` or `sim` does the same without a GPU, which is how this page itself is tested.
What follows `--` goes to fastserve: `-- --tp_size 8 --kv_cache_dtype fp8`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import shutil
import statistics
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.checked_server import EXIT_ENGINE_DEAD, CheckedServer, CheckFailed, gpu_memory_mib

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

STREAMS = 64
TOKENS = 32
# More than any engine makes in the time that a check takes.
LONG_TOKENS = 1500
ABORT_S = 2.0
TOLD_S = 10.0
GONE_S = 10.0
PROMPT = "The history of the lighthouse begins"
LONG_PROMPT = "The keeper wrote in the log what the night had brought. " * 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of what was seen."""

    check: str
    ok: bool
    seconds: float
    seen: str


class Report:
    """Runs checks one after the other, and prints each as soon as it is over."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def run(self, check: str, look: Callable[[], str]) -> None:
        started_s = time.monotonic()
        try:
            ok, seen = True, look()
        except CheckFailed as failed:
            ok, seen = False, str(failed)
        # A check that breaks is one that does not hold, and the others are still worth knowing.
        except Exception as error:
            traceback.print_exc()
            ok, seen = False, f"{type(error).__name__}: {error}".splitlines()[0]
        row = Row(check=check, ok=ok, seconds=time.monotonic() - started_s, seen=seen)
        self.rows.append(row)
        verdict = "ok  " if ok else "FAIL"
        print(f"{verdict}  {row.seconds:7.2f} s  {check:<38}  {seen}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Check what the arguments name. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--engine", choices=("trtllm", "llamacpp", "sim"), default="trtllm")
    parser.add_argument("--model", help="a Hugging Face directory; for llamacpp a GGUF file")
    parser.add_argument("--start-timeout-s", type=float, default=900.0)
    parser.add_argument("--streams", type=int, default=STREAMS, help="how many at once")
    parser.add_argument("flags", nargs="*", help="after --: flags of fastserve")
    asked = parser.parse_args(argv)
    lacking = _lacking(asked.engine, asked.model)
    if lacking:
        print(f"gpu_check: nothing was checked: {lacking}", file=sys.stderr)
        return 2
    _print_machine()
    flags = ["--engine", asked.engine, "--served-model-name", "m", *asked.flags]
    if asked.model is not None:
        flags += ["--model", asked.model]
    rows = check(flags, start_timeout_s=asked.start_timeout_s, streams=asked.streams)
    failed = [row.check for row in rows if not row.ok]
    print(
        f"\n{len(rows) - len(failed)} of {len(rows)} hold"
        + "".join(f"\n  not: {f}" for f in failed)
    )
    return 1 if failed else 0


def _lacking(engine: str, model: str | None) -> str:
    """What this machine has not, in words, or nothing."""
    if importlib.util.find_spec("openai") is None:
        return "the client is missing: pip install openai"
    if engine != "trtllm":
        return ""
    if shutil.which("nvidia-smi") is None or not _lines("nvidia-smi", "-L"):
        return "there is no NVIDIA GPU here (nvidia-smi lists none)"
    if importlib.util.find_spec("tensorrt_llm") is None:
        return "TensorRT-LLM is not installed (pip install 'fastserve[trtllm]')"
    return "" if model is not None else "trtllm needs --model DIR"


def _print_machine() -> None:
    for name in ("fastserve", "tensorrt-llm", "xllamacpp", "torch", "mpi4py"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            print(f"{name} {importlib.metadata.version(name)}")
    print(f"python {sys.version.split()[0]}")
    if shutil.which("nvidia-smi") is not None:
        print(*_lines("nvidia-smi", "-L"), sep="\n")
    print()


def _lines(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def check(
    flags: Sequence[str],
    *,
    start_timeout_s: float,
    environment: Mapping[str, str] | None = None,
    streams: int = STREAMS,
) -> list[Row]:
    """Look at two servers that `flags` make. Returns what was seen."""
    report = Report()
    memory_mib = gpu_memory_mib()

    def start() -> CheckedServer:
        return CheckedServer(flags, environment=environment, start_timeout_s=start_timeout_s)

    with start() as server:
        report.run("it becomes ready", server.await_ready)
        if report.rows[-1].ok:
            _ask(report, Asker(server), streams=streams)
            report.run("SIGTERM lets a stream finish; exit 0", lambda: _drain(server))
            report.run("nothing is left", lambda: server.nothing_left(memory_mib=memory_mib))
        else:
            print(server.log_tail(), file=sys.stderr)
    if report.rows[0].ok:
        with start() as server:
            report.run("it becomes ready again", server.await_ready)
            report.run("a worker is killed: clients are told", lambda: _kill(server))
            report.run("nothing is left", lambda: server.nothing_left(memory_mib=memory_mib))
    return report.rows


def _ask(report: Report, asker: Asker, *, streams: int) -> None:
    report.run("an answer has as many tokens as asked", asker.whole)
    report.run("a chat is answered", asker.chat)
    report.run("a stream says what the answer says", asker.streamed)
    report.run("log probabilities", asker.logprobs)
    report.run("a stop string ends, and is cut", asker.stop)
    report.run("a seed repeats, or is refused", asker.seed)
    report.run("a JSON schema is followed, or refused", asker.schema)
    report.run("who leaves is forgotten by the engine", asker.leave)
    report.run(f"{streams} streams at once", lambda: asker.crowd(streams))
    report.run("a prompt that was there before", asker.prefix)


class Asker:
    """A client of one server, and the checks that it makes."""

    def __init__(self, server: CheckedServer) -> None:
        self._server = server
        self._client = server.client()

    def _complete(self, **more: Any) -> Any:  # noqa: ANN401 - the client's fields and types
        fields = {
            "model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0,
            "extra_body": {"ignore_eos": True},
        } | more  # fmt: skip
        return self._client.completions.create(**fields)

    def whole(self) -> str:
        answer = self._complete()
        told = answer.usage
        _expect(told.completion_tokens == TOKENS, f"{told.completion_tokens} of {TOKENS} tokens")
        reason = answer.choices[0].finish_reason
        _expect(reason == "length", f"it ended with {reason}")
        return f"{told.prompt_tokens} + {told.completion_tokens} tokens: {_short(answer)}"

    def chat(self) -> str:
        answer = self._client.chat.completions.create(
            model="m",
            max_tokens=TOKENS,
            messages=[{"role": "user", "content": "What is a lighthouse?"}],
        )
        text = answer.choices[0].message.content
        _expect(bool(text), "the answer is empty")
        return f"{answer.choices[0].finish_reason}: {text[:60]!r}"

    def streamed(self) -> str:
        whole = self._complete().choices[0].text
        chunks = [one.choices[0] for one in self._complete(stream=True) if one.choices]
        text = "".join(one.text for one in chunks)
        _expect(text == whole, f"{text!r} is not {whole!r}")
        ends = [one.finish_reason for one in chunks if one.finish_reason is not None]
        _expect(ends == ["length"], f"it ended with {ends}")
        return f"{len(chunks)} chunks, {len(text)} characters"

    def logprobs(self) -> str:
        told = self._complete(logprobs=3).choices[0].logprobs
        _expect(len(told.token_logprobs) == TOKENS, f"for {len(told.token_logprobs)} tokens")
        worst = min(told.token_logprobs)
        _expect(max(told.token_logprobs) <= 0.0, f"one is {max(told.token_logprobs)}")
        tops = [sorted(top.values(), reverse=True) for top in told.top_logprobs]
        pairs = list(zip(told.token_logprobs, tops, strict=True))
        off = sum(abs(chosen - top[0]) > 1e-3 for chosen, top in pairs)
        _expect(off == 0, f"{off} greedy tokens are not the likeliest")
        return f"{TOKENS} tokens, the least likely {worst:.2f}"

    def stop(self) -> str:
        whole = self._complete().choices[0].text
        stop = whole[len(whole) // 2 :][:3]
        choice = self._complete(stop=stop).choices[0]
        _expect(choice.finish_reason == "stop", f"it ended with {choice.finish_reason}")
        _expect(choice.text == whole[: whole.index(stop)], f"{choice.text!r} with stop {stop!r}")
        return f"at {stop!r}, after {len(choice.text)} characters"

    def seed(self) -> str:
        def texts() -> list[str]:
            return [one.text for one in self._complete(seed=7, temperature=1.0, n=2).choices]

        return self._or_refused(lambda: self._same(texts(), texts()))

    @staticmethod
    def _same(first: list[str], second: list[str]) -> str:
        _expect(first == second, f"{first} and {second}")
        return f"twice the same two choices, {'un' if first[0] != first[1] else ''}like each other"

    def schema(self) -> str:
        schema = {"type": "object", "properties": {"height_m": {"type": "integer"}},
                  "required": ["height_m"], "additionalProperties": False}  # fmt: skip
        wanted = {"type": "json_schema", "json_schema": {"name": "tower", "schema": schema}}

        def ask() -> str:
            answer = self._client.chat.completions.create(
                model="m",
                max_tokens=TOKENS * 2,
                messages=[{"role": "user", "content": "How high is a lighthouse? Answer in JSON."}],
                response_format=wanted,
            )
            text = answer.choices[0].message.content
            _expect("height_m" in text, f"{text!r}")
            return f"followed: {text!r}"

        return self._or_refused(ask)

    def _or_refused(self, ask: Callable[[], str]) -> str:
        import openai  # noqa: PLC0415 - a client that only this page needs

        try:
            return ask()
        except openai.BadRequestError as refused:
            return f"refused: {refused.message}"[:100]

    def leave(self) -> str:
        chunks = self._complete(stream=True, max_tokens=LONG_TOKENS)
        next(iter(chunks))
        self._server.await_in_engine(1, timeout_s=ABORT_S)
        left_s = time.monotonic()
        chunks.close()
        self._server.await_in_engine(0, timeout_s=ABORT_S)
        return f"after {time.monotonic() - left_s:.2f} s, by its own count"

    def crowd(self, streams: int) -> str:
        firsts_s: list[float] = []
        lock = threading.Lock()

        def ask(number: int) -> int:
            asked_s = time.monotonic()
            tokens = 0
            prompt = f"{number}. {PROMPT}"
            options = {"include_usage": True}
            for chunk in self._complete(prompt=prompt, stream=True, stream_options=options):
                if chunk.choices and not tokens:
                    with lock:
                        firsts_s.append(time.monotonic() - asked_s)
                    tokens = 1
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
            return tokens

        began_s = time.monotonic()
        with ThreadPoolExecutor(streams) as pool:
            counts = list(pool.map(ask, range(streams)))
        took_s = time.monotonic() - began_s
        _expect(counts == [TOKENS] * streams, f"they got {sorted(set(counts))} tokens")
        return (
            f"{sum(counts) / took_s:.0f} tokens/s, first after {statistics.median(firsts_s):.3f} s"
        )

    def prefix(self) -> str:
        first, second = self._long_prompt(), self._long_prompt()
        return f"{first}, then {second}"

    def _long_prompt(self) -> str:
        asked_s = time.monotonic()
        told = self._complete(prompt=LONG_PROMPT, max_tokens=1).usage
        took_s = time.monotonic() - asked_s
        cached = getattr(told.prompt_tokens_details, "cached_tokens", "?")
        return f"{told.prompt_tokens} tokens in {took_s:.3f} s ({cached} cached)"


def _drain(server: CheckedServer) -> str:
    """End the server while a stream is under way."""
    stream = server.stream(prompt=PROMPT, max_tokens=TOKENS)
    next(stream)
    server.terminate()
    rest = sum(1 for _ in stream)
    code = server.await_exit(timeout_s=60.0)
    _expect(code == 0, f"exit code {code}")
    return f"{rest} more chunks, exit code {code}"


def _kill(server: CheckedServer) -> str:
    """Kill what computes: one rank where there are some, or else the engine's process."""
    stream = server.stream(prompt=PROMPT, max_tokens=LONG_TOKENS)
    next(stream)
    name = server.kill_worker()
    killed_s = time.monotonic()
    told = server.error_of(stream)
    told_s = time.monotonic() - killed_s
    _expect("engine_dead" in told, f"the client saw: {told}")
    _expect(told_s < TOLD_S, f"the client was told after {told_s:.1f} s")
    code = server.await_exit(timeout_s=GONE_S)
    _expect(code == EXIT_ENGINE_DEAD, f"exit code {code}")
    return (
        f"{name}: told after {told_s:.2f} s, exit {code} after {time.monotonic() - killed_s:.2f} s"
    )


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailed(otherwise)


def _short(answer: Any) -> str:  # noqa: ANN401 - the client's type
    return repr(answer.choices[0].text[:60])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
