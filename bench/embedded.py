"""What the server costs the embedded engine: tokens per second through it, and without it.

    python -m bench.embedded [--rounds 3] [--streams 1 8 32]

"direct" drives the same library in one process by the shortest loop there is: greedy, no
scheduler, no lanes, no HTTP. "server" is `fastserve` with one acceptor, and streams read over
sockets. Both prefill the same prompts, of about 30 tokens, and generate 64 tokens each; rounds
alternate, since machines drift. The share is of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson

TOKENS = 64
SEQUENCES = 32
MAX_SEQ_LEN = 512
QUESTIONS = [f"Tell me, in a few words, what is special about the number {n}." for n in range(64)]


def direct(streams: int) -> float:
    """Tokens per second of the bare library. In a process of its own: see main."""
    from fastserve.engine.cpus import available_cpus  # noqa: PLC0415
    from fastserve.engine.llama import Batch, Context, Model  # noqa: PLC0415
    from fastserve.engine.model_files import resolve_model  # noqa: PLC0415

    model = Model(str(resolve_model(None)), progress=lambda _: None)
    context = Context(
        model,
        num_sequences=SEQUENCES,
        sequence_tokens_max=MAX_SEQ_LEN,
        batch_rows_max=256,
        threads=available_cpus(),
    )
    prompts = [model.tokenize(_chat(question)) for question in QUESTIONS[:streams]]
    batch = Batch(256)
    best = 0.0
    for _ in range(2):  # the first one also brings the weights in
        began_s = time.perf_counter()
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
            last = [int(token) for token in context.logits(streams).argmax(axis=1)]
        best = max(best, streams * TOKENS / (time.perf_counter() - began_s))
        for sequence in range(streams):
            context.truncate(sequence)
    context.close()
    model.close()
    return best


async def through_server(port: int, model: str, streams: int) -> float:
    """Tokens per second of that many streams at once, all of them read to their end."""
    began_s = time.perf_counter()
    counts = await asyncio.gather(
        *(_stream(port, model, question) for question in QUESTIONS[:streams])
    )
    assert set(counts) == {TOKENS}, counts
    return sum(counts) / (time.perf_counter() - began_s)


async def _stream(port: int, model: str, question: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    writer.write(
        b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    answer = await reader.read()
    writer.close()
    usage = next(line for line in answer.splitlines() if b'"choices":[],' in line)
    return int(orjson.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"])


def _chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--direct", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.direct is not None:
        print(direct(options.direct))
        return
    with tempfile.TemporaryDirectory() as directory:
        port_file = Path(directory) / "port"
        server = subprocess.Popen(
            [sys.executable, "-m", "fastserve", "--frontends", "1", "--port", "0",
             "--port-file", str(port_file), "--served-model-name", "m", "--log-level", "warning",
             "--engine-max-seq-len", str(MAX_SEQ_LEN), "--engine-max-num-seqs", str(SEQUENCES)],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert server.stdout is not None
        server.stdout.readline()  # the ready line
        try:
            _compare(int(port_file.read_text()), options.rounds, options.streams)
        finally:
            server.terminate()
            server.wait()


def _compare(port: int, rounds: int, all_streams: list[int]) -> None:
    asyncio.run(through_server(port, "m", 1))
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    for streams in all_streams:
        bare, served = [], []
        for _ in range(rounds):
            command = [sys.executable, "-m", "bench.embedded", "--direct", str(streams)]
            said = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            )
            bare.append(float(said.stdout))
            served.append(max(asyncio.run(through_server(port, "m", streams)) for _ in range(2)))
        share = statistics.median(served) / statistics.median(bare)
        print(
            f"{streams:3d} streams: direct {_shown(bare)}, server {_shown(served)} tokens/s,"
            f" share {share:.0%}",
            flush=True,
        )


def _shown(values: list[float]) -> str:
    return "/".join(f"{value:.0f}" for value in values)


if __name__ == "__main__":
    main()
