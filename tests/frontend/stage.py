"""A frontend without processes: a model of 256 bytes, and an engine that says what it is told.

Exchanges are real ones, over a connection that only keeps what was sent. So a test speaks of
requests and of the bytes of answers, and plays the engine's part by hand.
"""

from __future__ import annotations

import json
import queue
from typing import TYPE_CHECKING, Any

import orjson

from fastserve.errors import Overloaded
from fastserve.frontend.exchanges import Frontend
from fastserve.frontend.liveness import Liveness
from fastserve.frontend.model import Model
from fastserve.frontend.observing import Observer
from fastserve.frontend.state import ServingState
from fastserve.generation import Finish, FinishReason, ModelCard
from fastserve.http1.exchange import Exchange
from fastserve.http1.parser import parse_head
from fastserve.lane.ids import request_ids
from fastserve.lane.messages import Abort, Heartbeat, Outputs, Submit, SubmitGroup
from fastserve.metrics.board import Board
from fastserve.metrics.catalog import OFFSETS
from fastserve.metrics.exposition import ServerInfo
from fastserve.metrics.meter import Meter
from fastserve.text.byte_level import BYTE_TO_CHARACTER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fastserve.frontend.preparer import Preparer
    from fastserve.frontend.response_store import ResponseStore
    from fastserve.frontend.tracing import Tracer
    from fastserve.generation import TokenLogprob
    from fastserve.lane.messages import ToEngine
    from fastserve.metrics.catalog import Counter
    from fastserve.text.tokenizer import Tokenizer

WORDS = ("one", "two", "three", "four", "five")
END, USER = 256 + len(WORDS), 257 + len(WORDS)
VOCAB_SIZE = 258 + len(WORDS)
MAX_SEQ_LEN = 64
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"

STOP = Finish(reason=FinishReason.STOP)
LENGTH = Finish(reason=FinishReason.LENGTH)
FAILED = Finish(reason=FinishReason.ERROR, error="out of luck")


def write_card(directory: Path) -> ModelCard:
    """A model whose token n is byte n; then some words after a space, and two control tokens."""
    vocabulary = {BYTE_TO_CHARACTER[byte]: byte for byte in range(256)}
    vocabulary |= {f"{BYTE_TO_CHARACTER[32]}{word}": 256 + n for n, word in enumerate(WORDS)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    path = directory / "tokenizer.json"
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [
                    {"id": END, "content": "<|end|>", "special": True} | special,
                    {"id": USER, "content": "<|user|>", "special": True} | special,
                ],
                "pre_tokenizer": byte_level | {"trim_offsets": True},
                "decoder": byte_level | {"trim_offsets": True},
                "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
            }
        )
    )
    return ModelCard(
        name="bytes",
        tokenizer_path=str(path),
        chat_template=TEMPLATE,
        bos_token="",
        eos_token="<|end|>",
        eos_token_ids=(END,),
        vocab_size=VOCAB_SIZE,
        max_seq_len=MAX_SEQ_LEN,
    )


class Asked:
    """One request: its exchange, whose connection it is, and what was sent to its client."""

    persists = True

    def __init__(self, head: bytes, body: bytes) -> None:
        self.sent = b""
        self.num_writes = 0
        self.exchange = Exchange(
            self,  # type: ignore[arg-type] # as much of a Connection as an exchange uses
            head=parse_head(head, header_count_max=100, body_bytes_max=1 << 30),
            body=body,
            send=self._send,
        )

    def _send(self, data: bytes) -> None:
        self.sent += data
        self.num_writes += 1

    def answered(self, *, close: bool) -> None:
        pass

    @property
    def ended(self) -> bool:
        return self.exchange.ended

    @property
    def status(self) -> int:
        return int(self.sent.split(b" ", 2)[1])

    def header(self, name: str) -> str | None:
        for line in self.sent.split(b"\r\n\r\n", 1)[0].decode().split("\r\n")[1:]:
            if line.lower().startswith(f"{name}: "):
                return line.partition(": ")[2]
        return None

    def json(self) -> Any:
        return orjson.loads(self.sent.split(b"\r\n\r\n", 1)[1])

    def blocks(self) -> list[str]:
        """What has come of a stream so far, part by part."""
        text = b""
        rest = self.sent.split(b"\r\n\r\n", 1)[1]
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            text += rest[: int(size, 16)]
            rest = rest[int(size, 16) + 2 :]
        assert text == b"" or text.endswith(b"\n\n")
        return text.decode().split("\n\n")[:-1]

    def chunks(self) -> list[Any]:
        """The objects of a stream so far."""
        events = [block for block in self.blocks() if not block.startswith(":")]
        data = [event.removeprefix("data: ") for event in events]
        return [orjson.loads(each) for each in data if each != "[DONE]"]

    def said(self, index: int = 0) -> str:
        """The text of one choice so far."""
        choices = [choice for chunk in self.chunks() for choice in chunk.get("choices", ())]
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content", "")
            for choice in choices
            if choice["index"] == index
        )

    def pause(self) -> None:
        """The client does not read: as a connection says it."""
        self.exchange.pause()

    def resume(self) -> None:
        self.exchange.resume()


class Timer:
    """A call that is to come when the test says so."""

    def __init__(self, delay: float, callback: Callable[[], None]) -> None:
        self.delay = delay
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Stage:
    """A frontend with its engine: `inbox` is what that was sent."""

    def __init__(
        self,
        card: ModelCard,
        *,
        requests_in_flight_max: int = 1000,
        request_timeout_s: float = 0.0,
        off_loop_bytes_min: int = 1 << 20,
        response_store: ResponseStore | None = None,
        tracer: Tracer | None = None,
        log_prompts: bool = False,
        refuse_unknown_fields: bool = False,
        preparer: Preparer | None = None,
        off_process_bytes_min: int = 1 << 30,
        **arguments: Any,
    ) -> None:
        """`arguments`: of the model, besides its card."""
        self.inbox: list[ToEngine] = []
        self.full = False
        self.timers: list[Timer] = []
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.liveness = Liveness(stall_unhealthy_s=1e9)
        self.state = ServingState(self.liveness)
        self.board = Board.make(1, recent_max=8)
        self.frontend = Frontend(
            loop=self,  # type: ignore[arg-type] # as much of a loop as a frontend uses
            engine=self,
            request_ids=request_ids(lane=3, incarnation=1),
            state=self.state,
            board=self.board,
            info=ServerInfo(version="0"),
            observer=Observer(
                Meter(self.board.numbers(0)),
                recent=self.board.recent(0),
                tracer=tracer,
                log_prompts=log_prompts,
            ),
            requests_in_flight_max=requests_in_flight_max,
            request_timeout_s=request_timeout_s,
            off_loop_bytes_min=off_loop_bytes_min,
            response_store=response_store,
            refuse_unknown_fields=refuse_unknown_fields,
            preparer=preparer,
            off_process_bytes_min=off_process_bytes_min,
        )
        self.state.model = Model(card, template_bytes_max=1 << 20, **arguments)
        self.beat(ready=True)

    def beat(self, *, ready: bool, now_s: float = 0.0) -> None:
        heartbeat = Heartbeat(ready=ready, num_running=2, num_waiting=1, steps=0)
        self.liveness.observe(heartbeat, now_s=now_s)

    # The engine, and the event loop.

    def send(self, message: ToEngine) -> None:
        if self.full:
            raise Overloaded("the engine does not keep up", rejection="lane_full")
        self.inbox.append(message)

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.calls.put(callback)

    def run_call(self) -> None:
        """Wait for a thread to be done, and do on the loop what it asked for."""
        self.calls.get(timeout=20)()

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(delay, callback))
        return self.timers[-1]

    def count(self, counter: Counter, *values: str) -> float:
        """What a series of a counter stands at."""
        at = OFFSETS[counter.name] + (counter.series.index(values) if values else 0)
        return self.board.numbers(0)[at]

    @property
    def submits(self) -> list[Submit]:
        submits: list[Submit] = []
        for message in self.inbox:
            if isinstance(message, Submit | SubmitGroup):
                submits += [message] if isinstance(message, Submit) else message.submits
        return submits

    @property
    def aborted(self) -> list[int]:
        aborts = [message for message in self.inbox if isinstance(message, Abort)]
        return [request_id for abort in aborts for request_id in abort.request_ids]

    # The client, and what the engine says.

    def ask(
        self, path: str = "/v1/completions", *, raw: bytes | None = None, **fields: Any
    ) -> Asked:
        """POST: `fields`, or a body as it is."""
        if path.endswith("completions") and raw is None:
            fields = {"prompt": "p"} | fields if "chat" not in path else fields
        return self.request("POST", path, body=orjson.dumps(fields) if raw is None else raw)

    def chat(self, **fields: Any) -> Asked:
        messages = [{"role": "user", "content": "hi"}]
        return self.ask("/v1/chat/completions", **{"messages": messages} | fields)

    def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Sequence[str] = (),
        version: str = "1.1",
    ) -> Asked:
        """Any request, refused by its head or served: as a connection does it."""
        lines = [
            f"{method} {path} HTTP/{version}",
            "Host: x",
            f"Content-Length: {len(body)}",
            *headers,
        ]
        asked = Asked(("\r\n".join(lines) + "\r\n\r\n").encode(), body)
        refusal = self.frontend.check(asked.exchange.head)
        if refusal is not None:
            asked.exchange.respond(refusal)
        else:
            self.frontend.serve(asked.exchange)
        return asked

    def say(
        self,
        tokens: bytes | Sequence[int] = b"",
        finish: Finish | None = None,
        *,
        logprobs: list[TokenLogprob] | None = None,
        request: int = -1,
    ) -> None:
        """One delta for one of the requests submitted, by default the last."""
        self.frontend.on_outputs(
            Outputs(
                request_ids=[self.submits[request].request_id],
                token_ids=list(tokens),
                counts=None if len(tokens) == 1 else [len(tokens)],
                finishes={} if finish is None else {0: finish},
                logprobs={} if logprobs is None else {0: logprobs},
            )
        )

    def hear_prompt(self, logprobs: list[TokenLogprob], *, request: int = -1) -> None:
        """What the engine tells of the prompt of one of the requests, before any token."""
        self.frontend.on_outputs(
            Outputs(
                request_ids=[self.submits[request].request_id],
                token_ids=[],
                counts=[0],
                prompt_logprobs={0: logprobs},
            )
        )

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.state.model is not None
        return self.state.model.tokenizer
