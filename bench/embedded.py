"""What the server costs the embedded engine, beside llama.cpp's own server and beside no server.

    python -m bench.embedded [--rounds 3] [--streams 1 8 32] [--ttft-rounds 5]

"direct" drives the library in one process by the shortest loop there is: greedy, no scheduler, no
lanes, no HTTP. "fastserve" has one acceptor; "llama.cpp" is its server out of the same wheel. All
get token ids of the same length, about 50, generate 64 tokens each, on as many threads, and no
prompt twice; they take turns, since machines drift. Shares are of the medians. CPU is that of all
of a server's processes, which company on the machine changes less than the time; the host's is what
the engine process uses on threads that do not compute. TTFT is of one request at a time, whose
first 400 tokens every one before it had, with what was computed being reused and not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import psutil

from fastserve.engine.cpus import available_cpus
from fastserve.engine.llama import Batch, Context, Model
from fastserve.engine.model_files import resolve_model
from fastserve.load.cpu import process_cpu_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOKENS = 64
SEQUENCES = 32
MAX_SEQ_LEN = 1024
SYSTEM_PROMPT_TOKENS = 400
# OpenMP's threads otherwise spin between decodes, where acceptors and load want the cores.
ENVIRONMENT = os.environ | {"OMP_WAIT_POLICY": "passive"}

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Who serves: where, what its requests have besides, its processes, and the engine's."""

    port: int
    pids: tuple[int, ...]
    engine_pid: int
    fields: dict[str, Any] = field(default_factory=dict)

    def cpu_s(self) -> float:
        return sum(process_cpu_s(pid) or 0.0 for pid in self.pids)


@dataclass(slots=True)
class Speed:
    """Tokens per second, and CPU milliseconds for each, of each round."""

    tokens_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        rates = "/".join(f"{rate:.0f}" for rate in self.tokens_per_s)
        return f"{rates} tokens/s at {statistics.median(self.cpu_ms):.2f} ms CPU"


def direct(prompts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Tokens per second of the bare library, and CPU seconds for each. In a process of its own."""
    model = Model(str(resolve_model(None)), progress=lambda _: None)
    context = Context(
        model,
        num_sequences=SEQUENCES,
        sequence_tokens_max=MAX_SEQ_LEN,
        batch_rows_max=256,
        threads=available_cpus(),
    )
    batch = Batch(256)
    num_tokens = len(prompts) * TOKENS
    rate = token_cpu_s = 0.0
    for _ in range(2):  # the first one also brings the weights in
        began_s, before_s = time.perf_counter(), time.process_time()
        last = []
        for sequence, prompt in enumerate(prompts):
            batch.clear()
            batch.add(prompt, position=0, sequence=sequence, logits=True)
            context.decode(batch)
            last.append(int(context.logits(1).argmax()))
        for step in range(1, TOKENS):
            batch.clear()
            for sequence, prompt in enumerate(prompts):
                position = len(prompt) + step - 1
                batch.add([last[sequence]], position=position, sequence=sequence, logits=True)
            context.decode(batch)
            last = [int(token) for token in context.logits(len(prompts)).argmax(axis=1)]
        rate = num_tokens / (time.perf_counter() - began_s)
        token_cpu_s = (time.process_time() - before_s) / num_tokens
        for sequence in range(len(prompts)):
            context.truncate(sequence)
    context.close()
    model.close()
    return rate, token_cpu_s


def direct_in_a_process(prompts: Sequence[Sequence[int]], speed: Speed) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "bench.embedded", "--direct"],
        input=json.dumps(prompts), env=ENVIRONMENT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    rate, token_cpu_s = json.loads(said.stdout)
    speed.tokens_per_s.append(rate)
    speed.cpu_ms.append(1000 * token_cpu_s)


def served(server: Server, prompts: Sequence[Sequence[int]], speed: Speed) -> None:
    before_s = server.cpu_s()
    speed.tokens_per_s.append(asyncio.run(through_server(server, prompts)))
    cpu_s = server.cpu_s() - before_s
    speed.cpu_ms.append(1000 * cpu_s / (len(prompts) * TOKENS))


async def through_server(server: Server, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens per second of that many streams at once, all of them read to their end."""
    began_s = time.perf_counter()
    answers = await asyncio.gather(*(_stream(server, prompt) for prompt in prompts))
    counts = [_completion_tokens(answer) for answer, _ in answers]
    assert set(counts) == {TOKENS}, counts
    return sum(counts) / (time.perf_counter() - began_s)


async def _stream(
    server: Server, prompt: Sequence[int], *, max_tokens: int = TOKENS
) -> tuple[bytes, float]:
    """The answer, and how long its first event took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = orjson.dumps(
        {
            "model": "m",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        | server.fields
    )
    began_s = time.perf_counter()
    writer.write(
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    first = await reader.readuntil(b"data: ")
    ttft_s = time.perf_counter() - began_s
    answer = first + await reader.read()
    writer.close()
    return answer, ttft_s


def _completion_tokens(answer: bytes) -> int:
    usage = next(line for line in answer.splitlines() if b'"usage":{' in line)
    return int(orjson.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"])


@contextlib.contextmanager
def fastserve(*settings: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as directory:
        port_file = Path(directory) / "port"
        process = subprocess.Popen(
            [sys.executable, "-m", "fastserve", "--frontends", "1", "--port", "0",
             "--port-file", str(port_file), "--served-model-name", "m", "--log-level", "warning",
             "--engine-max-seq-len", str(MAX_SEQ_LEN), "--engine-max-num-seqs", str(SEQUENCES),
             *settings],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()  # the ready line
        try:
            children = psutil.Process(process.pid).children(recursive=True)
            [engine] = [child for child in children if "engine" in " ".join(child.cmdline())]
            yield Server(
                port=int(port_file.read_text()),
                pids=(process.pid, *(child.pid for child in children)),
                engine_pid=engine.pid,
            )
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def llama_server() -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.peers.llamacpp_server", str(resolve_model(None)),
         "--sequences", str(SEQUENCES), "--max-seq-len", str(MAX_SEQ_LEN),
         "--threads", str(available_cpus())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        port = int(process.stdout.readline())
        yield Server(
            port=port,
            pids=(process.pid,),
            engine_pid=process.pid,
            fields={"cache_prompt": False},
        )
    finally:
        process.stdin.close()
        process.wait()


def host_cpu_s(pid: int) -> float:
    """What the engine's first thread and ZeroMQ's have used: they serve, the others compute.

    The first number of schedstat, in ns (Linux sched-stats.rst).
    """
    used_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        if int(task.name) == pid or name.startswith("ZMQ"):
            used_ns += int((task / "schedstat").read_text().split()[0])
    return used_ns / 1e9


def fresh_prompts(model: Model, count: int, *, beginning: Sequence[int] = ()) -> list[list[int]]:
    """Prompts that nobody has had, of which each is another from its first token on."""
    return [
        [*beginning, *model.tokenize(f"{number} is a number. " * 2), *model.tokenize(QUESTION)]
        for number in itertools.islice(_numbers, count)
    ]


QUESTION = (
    "Tell me, in a few words, what is special about it, to whom it means anything, and which "
    "others are like it.\nAnswer:"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--ttft-rounds", type=int, default=5)
    parser.add_argument("--direct", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.direct:
        print(json.dumps(direct(json.load(sys.stdin))))
        return
    model = Model(str(resolve_model(None)))
    without = ("--llamacpp-prefix-cache-bytes-max", "0")
    with fastserve(*without) as plain, llama_server() as peer:
        for server in (plain, peer):
            asyncio.run(through_server(server, fresh_prompts(model, 1)))
        for streams in options.streams:
            _compare_tokens(model, plain, peer, streams=streams, rounds=options.rounds)
        with fastserve() as reusing:
            _compare_ttft(model, plain, reusing, peer, rounds=options.ttft_rounds)


def _compare_tokens(model: Model, ours: Server, peer: Server, *, streams: int, rounds: int) -> None:
    bare, through, theirs, host_s = Speed(), Speed(), Speed(), 0.0
    for _ in range(rounds):
        direct_in_a_process(fresh_prompts(model, streams), bare)
        before_s = host_cpu_s(ours.engine_pid)
        served(ours, fresh_prompts(model, streams), through)
        host_s += host_cpu_s(ours.engine_pid) - before_s
        served(peer, fresh_prompts(model, streams), theirs)
    rate = statistics.median(through.tokens_per_s)
    print(
        f"{streams:3d} streams: direct {bare}; fastserve {through}; llama.cpp {theirs}; "
        f"fastserve of direct {rate / statistics.median(bare.tokens_per_s):.0%}, "
        f"of llama.cpp {rate / statistics.median(theirs.tokens_per_s):.0%}; "
        f"host CPU {1e6 * host_s / (rounds * streams * TOKENS):.0f} us/token",
        flush=True,
    )


def _compare_ttft(
    model: Model, plain: Server, reusing: Server, peer: Server, *, rounds: int
) -> None:
    system = model.tokenize("You are patient, brief and exact, and never speak of yourself. " * 40)
    system = system[:SYSTEM_PROMPT_TOKENS]
    remembering = dataclasses.replace(peer, fields={"cache_prompt": True})
    servers = {"without reuse": plain, "with": reusing, "llama.cpp with": remembering}
    ttft_ms: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(rounds + 1):
        for name, server in servers.items():
            [prompt] = fresh_prompts(model, 1, beginning=system)
            _, ttft_s = asyncio.run(_stream(server, prompt, max_tokens=2))
            if turn:  # the first one finds nothing to reuse
                ttft_ms[name].append(1000 * ttft_s)
    told = ", ".join(f"{name} {statistics.median(took):.0f} ms" for name, took in ttft_ms.items())
    print(f"TTFT after {SYSTEM_PROMPT_TOKENS} tokens in common: {told}", flush=True)


if __name__ == "__main__":
    main()
