"""What a client asks for, what it hears, and whether that was right. Pure: no socket, no clock.

Each request has tokens of its own, in an order of its own: a token that is not its own, comes
twice or is missing is seen in the text. Of every request there is one ending, and an ending that is
not on the list is FALSE.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson

from tests.e2e.scripted import tokenizer

if TYPE_CHECKING:
    import random

# Every error that a server in distress may answer with, and its status. A client's own mistakes and
# bare 500s (`server_error`) are not among them: whoever hears one has found a fault.
HONEST = {
    "engine_dead": 503,
    "engine_starting": 503,
    "engine_error": 500,
    "overloaded": 429,
    "shutting_down": 503,
}
# Far more than any wait for a settled server lasts, at the pace of either engine.
ENDLESS_TOKENS: dict[str, int] = {"sim": 8000, "embedded": 2000}
# The detail of a cut that came after the beginning of an answer.
CUT_SHORT = "in the middle of its answer"
_WORD = re.compile(rb" [a-z]{2,9}")
# Enough for the parsing of a request to leave the event loop.
_LARGE_BODY_BYTES = 100_000
_LEAVES, _LARGE, _LONG, _STREAMED, _CHAT, _ENDLESS = 0.12, 0.05, 0.05, 0.6, 0.4, 0.08


class Ending(enum.StrEnum):
    WELL = enum.auto()  # the whole answer
    ERROR = enum.auto()  # an honest error
    LEFT = enum.auto()  # the client itself went away
    CUT = enum.auto()  # the connection ended before the answer did
    STALE = enum.auto()  # so did a kept one, before the first byte: RFC 9112 9.3.1 says, try again
    REFUSED = enum.auto()  # nobody listens
    LATE = enum.auto()  # no end within the client's patience
    FALSE = enum.auto()  # an answer that no client should ever hear


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One HTTP request. `pieces` are the texts of its tokens; it leaves after some of its events
    (streamed) or after some milliseconds (whole)."""

    path: str
    fields: dict[str, Any]
    pieces: tuple[str, ...]
    stream: bool
    leaves_after: int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def request(self) -> bytes:
        """The bytes of it."""
        body = orjson.dumps(self.fields, option=orjson.OPT_NON_STR_KEYS)
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: chaos\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(slots=True)
class Heard:
    """What came back. `complete`: to the end that its framing promised. `fault`: what no server may
    send; nothing after it was read."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[str] = field(default_factory=list)
    complete: bool = False
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`detail`: the type of the error, or what was false."""

    ending: Ending
    detail: str = ""


@cache
def _words() -> list[tuple[int, str]]:
    table = tokenizer().token_bytes
    return [(i, raw.decode()) for i, raw in enumerate(table) if _WORD.fullmatch(raw)]


def simulated(rng: random.Random, **script: Any) -> Ask:
    """A request with a script; `script` may have more in it, such as a death."""
    if not script and rng.random() < _ENDLESS:
        return endless(rng, engine="sim", leaves_after=rng.randint(50, 500))
    count = rng.randint(300, 500) if rng.random() < _LONG else rng.randint(1, 100)
    words = [rng.choice(_words())]
    while len(words) < count:
        if (word := rng.choice(_words())) != words[-1]:
            words.append(word)
    script = {"token_ids": [word[0] for word in words]} | script
    if rng.random() < _LONG:
        script["delay_ms"] = rng.randint(50, 500)
    return _ask(rng, [text for _, text in words], sim=script)


def embedded(rng: random.Random) -> Ask:
    """A request that a real model can only answer with one token, again and again."""
    if rng.random() < _ENDLESS:
        return endless(rng, engine="embedded", leaves_after=rng.randint(50, 500))
    token_id, text = rng.choice(_words())
    return _ask(
        rng,
        [text] * rng.randint(1, 24),
        logit_bias={token_id: 100},
        ignore_eos=True,
        temperature=0,
    )


def endless(rng: random.Random, *, engine: str, leaves_after: int) -> Ask:
    """A request that ends by abort alone: whoever fails to abort it will be seen with it."""
    return Ask(
        path="/v1/completions",
        fields={"max_tokens": ENDLESS_TOKENS[engine], "prompt": f"go {rng.randint(0, 999)}",
                "ignore_eos": True},
        pieces=(),
        stream=False,
        leaves_after=leaves_after,
    )  # fmt: skip


def lasting(rng: random.Random, *, engine: str) -> Ask:
    """A stream that is still going on whenever the server is told to end."""
    words = [rng.choice(_words()) for _ in range(ENDLESS_TOKENS[engine])]
    if engine == "embedded":
        words = words[:1] * len(words)
        extra: dict[str, Any] = {"logit_bias": {words[0][0]: 100}, "temperature": 0}
    else:
        extra = {"sim": {"token_ids": [token_id for token_id, _ in words]}}
    return Ask(
        path="/v1/completions",
        fields={"max_tokens": len(words), "prompt": "go on", "ignore_eos": True, "stream": True}
        | extra,
        pieces=tuple(text for _, text in words),
        stream=True,
    )


def _ask(rng: random.Random, pieces: list[str], **fields: Any) -> Ask:
    stream, chat, leaves = (rng.random() < share for share in (_STREAMED, _CHAT, _LEAVES))
    prompt = f"go {rng.randint(0, 999)}"
    if rng.random() < _LARGE:
        fields["user"] = "x" * _LARGE_BODY_BYTES
    said = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    return Ask(
        path="/v1/chat/completions" if chat else "/v1/completions",
        fields={"max_tokens": len(pieces), "stream": stream} | said | fields,
        pieces=tuple(pieces),
        stream=stream,
        leaves_after=rng.randint(0, 40) if leaves else None,
    )


def judge(ask: Ask, heard: Heard) -> Verdict:
    """Say how `ask` ended, if its client stayed."""
    if heard.fault:
        return Verdict(Ending.FALSE, heard.fault)
    if not heard.status:
        return Verdict(Ending.CUT)
    if heard.status != 200:
        return _judge_status(heard)
    return (_judge_stream if ask.stream else _judge_whole)(ask, heard)


def _judge_status(heard: Heard) -> Verdict:
    if not heard.complete:
        return Verdict(Ending.CUT, CUT_SHORT)
    if heard.headers.get("content-type") != "application/json":
        return _false(f"{heard.status} that is no JSON: {heard.body[:200]!r}")
    kind = _error_type(orjson.loads(heard.body))
    if HONEST.get(kind) != heard.status:
        return _false(f"{heard.status} {heard.body[:200]!r}")
    if heard.status != 500 and not heard.headers.get("retry-after", "").isdigit():
        return _false(f"a {heard.status} without Retry-After")
    return Verdict(Ending.ERROR, kind)


def _judge_whole(ask: Ask, heard: Heard) -> Verdict:
    if not heard.complete:
        return Verdict(Ending.CUT, CUT_SHORT)
    answer = orjson.loads(heard.body)
    [choice] = answer["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    if text != ask.text:
        return _false(f"said {text!r} in place of {ask.text!r}")
    if choice["finish_reason"] != "length":
        return _false(f"ended by {choice['finish_reason']}")
    if answer["usage"]["completion_tokens"] != len(ask.pieces):
        return _false(f"counted {answer['usage']['completion_tokens']} of {len(ask.pieces)} tokens")
    return Verdict(Ending.WELL)


def _judge_stream(ask: Ask, heard: Heard) -> Verdict:
    events = list(heard.events)
    done = bool(events) and events[-1] == "[DONE]"
    objects = [orjson.loads(event) for event in (events[:-1] if done else events)]
    error = _error_type(objects[-1]) if objects and "error" in objects[-1] else ""
    deltas = objects[:-1] if error else objects
    text = ""
    finish_reasons: list[str] = []
    for delta in deltas:
        if "error" in delta:
            return _false("more than one error, or something after it")
        for choice in delta["choices"]:
            if finish_reasons:
                return _false("a delta after the finish")
            text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            finish_reasons += [reason] if (reason := choice["finish_reason"]) else []
    if not ask.text.startswith(text):
        return _false(f"said {text!r} in place of {ask.text!r}")
    if not heard.complete:
        return Verdict(Ending.CUT, CUT_SHORT)
    if error:
        honest = error in HONEST and not done and not finish_reasons
        return Verdict(Ending.ERROR, error) if honest else _false(f"ended by an event of {error}")
    if (text, finish_reasons, done) != (ask.text, ["length"], True):
        return _false(f"ended after {len(text)} of {len(ask.text)} characters, {finish_reasons}")
    return Verdict(Ending.WELL)


def _error_type(answer: dict[str, Any]) -> str:
    error = answer.get("error", {})
    whole = set(error) == {"message", "type", "param", "code"}
    return str(error["type"]) if whole else f"malformed {answer}"


def _false(what: str) -> Verdict:
    return Verdict(Ending.FALSE, what)
