"""`python -m bench large`: what large prompts do to a stream on the same acceptor.

One acceptor and the sim engine. A stream is read token by token, by itself and then while clients
post prompts of megabytes, turn about, so that what else the machine does is in both. The bound is
that the p99 of its gaps with them stays within --within-ms of that without: exit code 1 beyond it.

Posting is done by a process of its own, which sends bodies that it made before.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import multiprocessing
import random
import shutil
import socket
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from bench.servers import Server, running
from fastserve.engine.model_files import describe
from fastserve.load.build import LoadError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.synchronize import Event

_MEGABYTE = 1_000_000
_TIMEOUT_S = 300.0
_SETTLE_S = 1.0
_COMMON = (
    "the of and to in is that for it was on are as with they be at one have this from or had by "
    "hot but some what there we can out other were all your when up use word how said an each"
)
_WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """The gaps between the tokens of a stream, in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, gaps_s: list[float]) -> Gaps:
        percentiles = statistics.quantiles(gaps_s, n=100)
        return cls(
            p50_ms=percentiles[49] * 1e3, p99_ms=percentiles[98] * 1e3, max_ms=max(gaps_s) * 1e3
        )


def main(argv: list[str]) -> int:
    """Print a line for each turn, and the p99 of all turns of a kind. Returns 1 past the bound."""
    asked = _arguments().parse_args(argv)
    server = Server(
        name="fastserve K=1",
        command="{python} -m fastserve --engine sim --sim-step-ms {step_ms} --port {port} "
        "--frontends 1 --log-level warning --model {model} "
        f"--limits-text-template-bytes-max 16000000 {asked.flags}",
    )
    bodies = make_bodies(asked.clients, kind=asked.kind, megabytes=tuple(asked.megabytes))
    gaps_s: dict[bool, list[float]] = {False: [], True: []}
    with (
        tempfile.TemporaryDirectory() as folder,
        running(
            server,
            step_ms=asked.step_ms,
            model=make_model(Path(folder)),
            cores=None,
            start_timeout_s=60.0,
        ) as up,
    ):
        _wait_ready(up.port)
        print(f"{'':<8}{'tokens':>8}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'posts':>7}")
        for turn in range(2 * asked.turns):
            loaded = turn % 2 == 1
            with posting(bodies if loaded else [], port=up.port) as count:
                found_s = read_stream(up.port, num_tokens=int(asked.seconds * 1e3 / asked.step_ms))
            gaps_s[loaded] += found_s
            told = Gaps.of(found_s)
            print(
                f"{'loaded' if loaded else 'bare':<8}{len(found_s) + 1:>8}{told.p50_ms:>9.2f}"
                f"{told.p99_ms:>9.2f}{told.max_ms:>9.2f}{count.value:>7}",
                flush=True,
            )
    bare, loaded_gaps = Gaps.of(gaps_s[False]), Gaps.of(gaps_s[True])
    more_ms = loaded_gaps.p99_ms - bare.p99_ms
    print(f"p99 bare {bare.p99_ms:.2f} ms, loaded {loaded_gaps.p99_ms:.2f} ms: {more_ms:+.2f} ms")
    return int(more_ms > asked.within_ms)


def make_model(folder: Path) -> str:
    """The default model's tokenizer and template, of a model that can read all that is posted."""
    card = describe(None, name=None, max_seq_len=None, fallback_directory=folder)
    model = folder / "long"
    model.mkdir()
    shutil.copy(card.tokenizer_path, model / "tokenizer.json")
    settings = {"eos_token": card.eos_token, "chat_template": card.chat_template}
    (model / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
    (model / "config.json").write_bytes(orjson.dumps({"max_position_embeddings": 8_000_000}))
    return str(model)


def make_bodies(count: int, *, kind: str, megabytes: tuple[float, float] = (1, 4)) -> list[bytes]:
    """Requests of so many megabytes, each with a text of its own, for one token."""
    least, most = (int(each * _MEGABYTE) for each in megabytes)
    chances = [random.Random(number) for number in range(count)]
    return [_body(chance, kind=kind, size=chance.randint(least, most)) for chance in chances]


def _body(chance: random.Random, *, kind: str, size: int) -> bytes:
    if kind == "ids":
        ids = [chance.randrange(1000, 9999) for _ in range(size // 5)]
        return _post("/v1/completions", {"prompt": ids, "max_tokens": 1})
    words: list[str] = []
    length = 0
    while length < size:
        words += chance.choices(_WORDS, k=1000)
        words.append(f"{chance.random()}")
        length += 4500
    text = " ".join(words)[:size]
    if kind == "chat":
        messages = [{"role": "user", "content": text}]
        return _post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    return _post("/v1/completions", {"prompt": text, "max_tokens": 1})


def _post(path: str, fields: dict[str, object]) -> bytes:
    body = orjson.dumps(fields)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(slots=True)
class Count:
    """How many were answered, once the context is over."""

    value: int = 0


@contextlib.contextmanager
def posting(requests: list[bytes], *, port: int) -> Iterator[Count]:
    """A client for each of `requests` posts it again and again, in a process of its own."""
    count = Count()
    if not requests:
        yield count
        return
    context = multiprocessing.get_context("fork")
    stop, answered = context.Event(), context.Value("i", 0)
    poster = context.Process(target=_post_all, args=(requests, port, stop, answered), daemon=True)
    poster.start()
    time.sleep(_SETTLE_S)
    try:
        yield count
        with answered.get_lock():
            count.value = answered.value
    finally:
        stop.set()
        poster.join(1.0)
        poster.kill()
        poster.join()
        # What the server still works on must not be in the next turn.
        _wait_idle(port)


def _post_all(requests: list[bytes], port: int, stop: Event, answered: object) -> None:
    def client(request: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
            while not stop.is_set():
                connection.sendall(request)
                head = connection.recv(65536)
                if not head.startswith(b"HTTP/1.1 200"):
                    raise LoadError(f"answered {head[:200]!r}")
                with answered.get_lock():  # type: ignore[attr-defined] # a Synchronized
                    answered.value += 1  # type: ignore[attr-defined] # the same

    threads = [threading.Thread(target=client, args=(each,), daemon=True) for each in requests]
    for thread in threads:
        thread.start()
    stop.wait()


def _wait_ready(port: int) -> None:
    """Return once requests are welcome: a server tells its models before."""
    give_up_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < give_up_s:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.05)
    raise LoadError("not ready")


def _wait_idle(port: int) -> None:
    """Return once two probes in a row, a second apart, were answered at once."""
    quick = 0
    while quick < 2:
        began_s = time.monotonic()
        read_stream(port, num_tokens=5)
        quick = quick + 1 if time.monotonic() - began_s < 0.5 else 0
        time.sleep(_SETTLE_S / 2)


def read_stream(port: int, *, num_tokens: int) -> list[float]:
    """Read a stream of so many tokens; return the gaps between them, in seconds."""
    fields: dict[str, object] = {"prompt": "Hi", "max_tokens": num_tokens, "stream": True}
    arrivals_s: list[float] = []
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(_post("/v1/completions", fields))
        last = b""
        while b"data: [DONE]" not in last:
            piece = connection.recv(65536)
            if not piece:
                raise LoadError(f"the stream ended early: {last[-200:]!r}")
            now_s = time.perf_counter()
            # Of tokens that arrive together all but one waited for nothing.
            arrivals_s += [now_s] * piece.count(b'"text":" ')
            last = last[-20:] + piece
    if len(arrivals_s) < num_tokens:
        raise LoadError(f"{len(arrivals_s)} of {num_tokens} tokens came")
    return [after - before for before, after in pairwise(arrivals_s)]


def _arguments() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m bench large", description=__doc__)
    arguments.add_argument("--clients", type=int, default=32, help="who post prompts (32)")
    arguments.add_argument("--kind", choices=("text", "chat", "ids"), default="text")
    arguments.add_argument(
        "--megabytes", type=float, nargs=2, default=(1, 4), metavar=("LEAST", "MOST"),
        help="of a prompt, drawn evenly (1 4)",
    )  # fmt: skip
    arguments.add_argument("--step-ms", type=float, default=10.0, help="of the engine (10)")
    arguments.add_argument("--seconds", type=float, default=10.0, help="of a turn (10)")
    arguments.add_argument("--turns", type=int, default=3, help="of each kind (3)")
    arguments.add_argument("--within-ms", type=float, default=20.0, help="the bound (20)")
    arguments.add_argument("--flags", default="", help="more flags of the server, in one word")
    return arguments
