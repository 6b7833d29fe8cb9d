"""`python -m bench micro`: what each room costs by itself, against a budget.

CPU time, the best of several batches, so that neighbours disturb little. A room that costs twice
its budget has become slower, whatever the machine is doing: exit code 1. Budgets are for a machine
like the one in the table's comment; --scale 2 is for one half as fast.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fastserve.api.chunks import ChatChunks
from fastserve.api.requests import parse_chat
from fastserve.engine.fanout import Fanout
from fastserve.engine.interface import StepOutputs
from fastserve.engine.model_files import describe
from fastserve.frontend.in_flight import Choice, InFlight
from fastserve.frontend.model import Model
from fastserve.frontend.observing import Observer
from fastserve.frontend.prepare import prepare_chat
from fastserve.generation import SamplingParams
from fastserve.http1.limits import Limits
from fastserve.http1.reader import RequestReader
from fastserve.lane.codec import KEY_BYTES, Codec
from fastserve.lane.ids import request_ids
from fastserve.lane.messages import Outputs, Submit
from fastserve.load.chats import chat_bodies
from fastserve.metrics.board import Board
from fastserve.metrics.catalog import INTER_TOKEN_LATENCY
from fastserve.metrics.exposition import ServerInfo, expose
from fastserve.metrics.meter import Meter
from fastserve.metrics.names import NAMES
from fastserve.metrics.recent import RequestRecord
from fastserve.text.answer import AnswerParser
from fastserve.text.chat_template import ChatTemplate
from fastserve.text.stream import TextStream
from fastserve.text.tool_calls.formats import TOOL_FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.frontend.streams import Answer
    from fastserve.generation import RequestId, TokenLogprob

_BATCH_S = 0.02
_BATCHES = 9
_TIMES_BUDGET_MAX = 2.0
_BODY = chat_bodies(model="m", tokens=64, stream=True, number=1)[0]
_RUNNING = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Something to do again and again. `make` prepares it; one call does `units` of `unit`."""

    name: str
    unit: str
    budget_us: float
    make: Callable[[], Callable[[], object]]
    units: int = 1


def parser() -> Callable[[], object]:
    """A POST of a small chat, in one read: head and body."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept: */*\r\n"
        b"User-Agent: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    request = head % len(_BODY) + _BODY
    reader = RequestReader(Limits())

    def read() -> None:
        reader.feed(request)
        assert reader.next_head()
        assert reader.next_body()

    return read


def validation() -> Callable[[], object]:
    """The body becomes a request."""
    return functools.partial(parse_chat, _BODY)


def template() -> Callable[[], object]:
    """A chat's messages become the text of a prompt, guarded against control tokens."""
    model, messages = _model(), parse_chat(_BODY).messages
    card = model.card
    assert card.chat_template is not None
    chat = ChatTemplate(card.chat_template, bos_token=card.bos_token, eos_token=card.eos_token)
    return lambda: chat.render(model.tokenizer.guard(messages))


def prompt() -> Callable[[], object]:
    """Validation, template and tokenizer together, of messages that are not remembered."""
    model = _model()
    bodies = itertools.cycle(chat_bodies(model="m", tokens=64, stream=True))
    return lambda: prepare_chat(next(bodies), model)


def tokenizer() -> Callable[[], object]:
    """About 20 words: more such texts in turn than the tokenizer remembers."""
    model = _model()
    bodies = chat_bodies(model="m", tokens=64, stream=True)
    texts = itertools.cycle([str(parse_chat(body).messages[1]["content"]) for body in bodies])
    return lambda: model.tokenizer.encode(next(texts), parse_special=True)


def lane_submit() -> Callable[[], object]:
    """A request crosses a lane: encoded, signed, checked, decoded."""
    codec = Codec(bytes(KEY_BYTES))
    submit = Submit(
        request_id=next(request_ids(lane=0, incarnation=0)),
        prompt_token_ids=list(range(1000, 1050)),
        sampling=SamplingParams(max_tokens=64, temperature=0.7),
    )
    return lambda: codec.decode(codec.encode(submit))


def lane_outputs() -> Callable[[], object]:
    """A step's tokens are parted by lane, and cross it."""
    codec, fanout = Codec(bytes(KEY_BYTES)), Fanout()
    ids = list(itertools.islice(request_ids(lane=0, incarnation=0), _RUNNING))
    step = StepOutputs(request_ids=list(map(int, ids)), token_ids=list(range(_RUNNING)))

    def cross() -> None:
        for outputs in fanout.part(step).values():
            codec.decode(codec.encode(outputs))

    return cross


def detokenizer() -> Callable[[], object]:
    """A token becomes text."""
    return _pushing(TextStream(_model().tokenizer))


def stops() -> Callable[[], object]:
    """A token becomes text in which two stop strings are looked for."""
    return _pushing(TextStream(_model().tokenizer, stops=("\n\n", "User:")))


def parts() -> Callable[[], object]:
    """A piece of a call's arguments is parsed, where there may be calls."""
    parser = AnswerParser.of_model(tools=TOOL_FORMATS["hermes"], schemas={"f": None})
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "')
    return lambda: parser.push(" word")


def render() -> Callable[[], object]:
    """A text becomes the event of a chunk, in HTTP's framing."""
    chunks = ChatChunks(completion_id="chatcmpl-0123456789abcdef", created=0, model="m", index=0)

    def frame() -> bytes:
        event = chunks.text(" word")
        return b"%x\r\n%b\r\n" % (len(event), event)

    return frame


def chunks() -> Callable[[], object]:
    """A step's tokens become the chunks of plain streams, and are given to their connections."""
    board = Board.make(1, recent_max=1)
    in_flight = InFlight(Observer(Meter(board.numbers(0)), recent=board.recent(0)))
    head, tail = b"x" * 150, b"y" * 60
    ids = list(itertools.islice(request_ids(lane=0, incarnation=0), _RUNNING))
    for request_id in ids:
        choice = _Plain(request_id)
        choice.pieces = {1: b'" word"'}
        choice.frame_head, choice.frame_tail = head, tail
        choice.frame_bytes = len(head) + len(tail)
        choice.write_chunk = _taken
        in_flight.add(choice)
    outputs = Outputs(request_ids=list(map(int, ids)), token_ids=[1] * _RUNNING)
    return lambda: in_flight.on_outputs(outputs)


class _Plain(Choice):
    """A stream that has begun, and has nothing else to do but say what comes."""

    __slots__ = ()

    def __init__(self, request_id: RequestId) -> None:
        nobody = cast("Answer", None)
        super().__init__(nobody, request_id=request_id, wrote_s=0.0)
        self.last_s = time.monotonic()

    def push(self, *_: object) -> None:
        raise AssertionError("it has lent out all that its chunks are made of")

    def hear_prompt(self, logprobs: list[TokenLogprob]) -> None:  # noqa: ARG002 - Choice's
        raise AssertionError("nobody asked for any")


def _taken(_: bytes) -> None:
    pass


def observe() -> Callable[[], object]:
    """The gap between two tokens is read off the clock, and counted."""
    count = Meter(Board.make(1).numbers(0)).timer(INTER_TOKEN_LATENCY)
    clock = time.monotonic
    last_s = clock() - 0.02
    return lambda: count(clock() - last_s)


def record() -> Callable[[], object]:
    """A request that has ended is remembered for /perf_metrics."""
    ring = Board.make(1, recent_max=1000).recent(0)
    record = RequestRecord(
        received_unix_s=1.7e9, prepared_s=0.001, submitted_s=0.001, scheduled_s=0.002,
        first_token_s=0.03, last_token_s=0.6, finished_s=0.6, prompt_tokens=50, cached_tokens=0,
        generation_tokens=64, num_choices=1, status=200, endpoint="/v1/chat/completions",
        finish_reason="length", stream=True, request_id="0123456789ab-1f", trace_id="",
    )  # fmt: skip
    return lambda: ring.write(record)


def scrape() -> Callable[[], object]:
    """/metrics of a server with 32 acceptors, under every name."""
    board = Board.make(32)
    for lane in range(32):
        Meter(board.numbers(lane)).observe(INTER_TOKEN_LATENCY, 0.02)
    info = ServerInfo(version="1", engine="sim", names=NAMES)
    return lambda: expose(board.all_numbers(), info=info, model="m", now_s=1.0)


# Budgets are 1.25 times what each room took on one core of a virtual machine (AMD EPYC, family 25,
# 2.6 GHz) with CPython 3.11. Whoever makes a room faster or slower on purpose sets its budget anew.
# fmt: off
ROOMS = (
    Room(name="parser",       unit="request", budget_us=7.0,  make=parser),
    Room(name="validation",   unit="request", budget_us=6.5,  make=validation),
    Room(name="template",     unit="request", budget_us=16.5, make=template),
    Room(name="tokenizer",    unit="request", budget_us=11.5, make=tokenizer),
    Room(name="prompt",       unit="request", budget_us=48.0, make=prompt),
    Room(name="lane submit",  unit="request", budget_us=14.0, make=lane_submit),
    Room(name="lane outputs", unit="token",   budget_us=0.11, make=lane_outputs, units=_RUNNING),
    Room(name="detokenizer",  unit="token",   budget_us=0.20, make=detokenizer),
    Room(name="stops",        unit="token",   budget_us=0.25, make=stops),
    Room(name="parts",        unit="token",   budget_us=1.6,  make=parts),
    Room(name="chunks",       unit="token",   budget_us=0.38, make=chunks, units=_RUNNING),
    Room(name="render",       unit="token",   budget_us=0.33, make=render),
    Room(name="observe",      unit="token",   budget_us=0.32, make=observe),
    Room(name="record",       unit="request", budget_us=1.75, make=record),
    Room(name="scrape",       unit="scrape",  budget_us=11_500, make=scrape),
)
# fmt: on


def main(argv: list[str]) -> int:
    """Measure the rooms and print a table. Returns 1 if one is over twice its budget."""
    arguments = _arguments().parse_args(argv)
    rooms = [room for room in ROOMS if re.search(arguments.room, room.name)]
    print(f"{'room':<14} {'us':>8} {'budget':>8}  per")
    slow = 0
    for room in rooms:
        took_us = measure_us(room.make(), units=room.units)
        budget_us = room.budget_us * arguments.scale
        is_slow = took_us > _TIMES_BUDGET_MAX * budget_us
        slow += is_slow
        mark = "  SLOW" if is_slow else ""
        print(f"{room.name:<14} {took_us:>8.3f} {budget_us:>8.3f}  {room.unit}{mark}", flush=True)
    return int(slow > 0 or not rooms)


def measure_us(
    do: Callable[[], object], *, units: int = 1, clock: Callable[[], float] = time.process_time
) -> float:
    """Microseconds of CPU time for one of `units`: the best of some batches."""
    times, took_s = 1, 0.0
    while took_s < _BATCH_S:
        times *= 2
        took_s = _batch_s(do, times=times, clock=clock)
    best_s = min(_batch_s(do, times=times, clock=clock) for _ in range(_BATCHES))
    return best_s / times / units * 1e6


def _batch_s(do: Callable[[], object], *, times: int, clock: Callable[[], float]) -> float:
    began_s = clock()
    for _ in itertools.repeat(None, times):
        do()
    return clock() - began_s


@functools.cache
def _model() -> Model:
    """The default model, without its weights."""
    with tempfile.TemporaryDirectory() as directory:
        card = describe(None, name=None, max_seq_len=None, fallback_directory=Path(directory))
        return Model(card, template_bytes_max=1 << 20)


def _pushing(stream: TextStream) -> Callable[[], object]:
    tokens = itertools.cycle([[token_id] for token_id in range(1000, 3000)])
    return lambda: stream.push(next(tokens))


def _arguments() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m bench micro", description=__doc__)
    arguments.add_argument("--room", default="", metavar="REGEX", help="only rooms that it is in")
    arguments.add_argument("--scale", type=float, default=1.0, help="times every budget (1)")
    return arguments
