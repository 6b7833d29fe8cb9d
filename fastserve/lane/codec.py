"""The bytes that cross a lane.

A frame is signed: a version byte, an orjson body, an HMAC-SHA256 tag of both. The tag is checked
before the body is read, so nothing unsigned is ever decoded. A body is a JSON array whose first
item names the message, or says that what follows are the bodies of several. Long prompts follow
it in binary.

JSON has no NaN and no infinities, and orjson would write null: log-probabilities are clamped here.

Knows nothing of sockets (client.py, server.py).
"""

from __future__ import annotations

import dataclasses
import hmac
import operator
from array import array
from typing import TYPE_CHECKING, Any, assert_never

import orjson

from fastserve.generation import (
    LOGPROB_MIN,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    ModelCard,
    Refusal,
    RefusalReason,
    SamplingParams,
    TokenLogprob,
)
from fastserve.lane.messages import (
    Abort,
    Attach,
    Attached,
    Detach,
    Heartbeat,
    Outputs,
    Submit,
    SubmitGroup,
    ToAcceptor,
    ToEngine,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VERSION = b"\x01"
# The same with prompts in binary behind the body, whose length in four bytes comes before it.
VERSION_ATTACHED = b"\x02"
TAG_BYTES = 32
_BATCH = "batch"
_SIZE_BYTES = 4
KEY_BYTES = 32

Message = ToEngine | ToAcceptor


class BadFrame(Exception):
    """A frame that we did not sign, or of another version: to be counted and dropped."""


class Codec:
    """Messages to frames and back, under one key."""

    __slots__ = ("_keyed",)

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        # To copy it costs half as much as to begin anew: OpenSSL looks "sha256" up each time.
        self._keyed = hmac.new(key, digestmod="sha256")

    def encode(self, message: Message) -> bytes:
        """Return the frame of `message`."""
        if isinstance(message, Submit | SubmitGroup):
            return self.encode_all([message])
        return self._sign(VERSION + _dumped(_body(message)))

    def encode_all(self, messages: Sequence[Message]) -> bytes:
        """Return one frame of all `messages`, of which there is at least one."""
        if len(messages) == 1 and isinstance(messages[0], Outputs):
            return self._sign(VERSION + _dumped(_body(messages[0])))
        bodies = list(map(_body, messages))
        body = _dumped(bodies[0] if len(bodies) == 1 else [_BATCH, *bodies])
        attached = _attached_of(messages)
        if not attached:
            return self._sign(VERSION + body)
        size = len(body).to_bytes(_SIZE_BYTES, "big")
        return self._sign(b"".join((VERSION_ATTACHED, size, body, *attached)))

    def _sign(self, signed: bytes) -> bytes:
        return signed + self._tag(signed)

    def _tag(self, signed: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(signed)
        return keyed.digest()

    def decode(self, frame: bytes) -> Message:
        """Return the message in `frame`, which has but one. Raises BadFrame."""
        [message] = self.decode_all(frame)
        return message

    def decode_all(self, frame: bytes) -> list[Message]:
        """Return the messages in `frame`, in the order in which they were sent. Raises BadFrame."""
        signed, tag = frame[:-TAG_BYTES], frame[-TAG_BYTES:]
        if not hmac.compare_digest(self._tag(signed), tag):
            raise BadFrame("the tag is not ours")
        try:
            if signed[:1] == VERSION:
                body = orjson.loads(signed[1:])
                return [_message(one) for one in (body[1:] if body[0] == _BATCH else [body])]
            if signed[:1] == VERSION_ATTACHED:
                return _messages_attached(memoryview(signed)[1:])
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise BadFrame(f"a signed body that is no message: {error!r}") from error
        raise BadFrame(f"version {signed[:1]!r} is none of ours")


def _dumped(body: list[Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)


def _messages_attached(rest: memoryview) -> list[Message]:
    end = _SIZE_BYTES + int.from_bytes(rest[:_SIZE_BYTES], "big")
    body = orjson.loads(rest[_SIZE_BYTES:end])
    bodies = body[1:] if body[0] == _BATCH else [body]
    _take_attached(bodies, rest[end:])
    return list(map(_message, bodies))


def _body(message: Message) -> list[Any]:
    match message:
        case Outputs():
            return [
                "outputs",
                message.request_ids,
                message.token_ids,
                message.counts,
                [_finish_row(index, finish) for index, finish in message.finishes.items()],
                [_logprob_row(index, row) for index, row in message.logprobs.items()],
                [_logprob_row(index, row) for index, row in message.prompt_logprobs.items()],
            ]
        case Submit():
            return ["submit", *_submit_row(message)]
        case SubmitGroup(submits):
            return ["submit_group", [_submit_row(submit) for submit in submits]]
        case Abort():
            return ["abort", message.request_ids]
        case Attach():
            return ["attach", message.lane, message.incarnation, message.address]
        case Attached():
            return ["attached", dataclasses.asdict(message.card)]
        case Detach():
            return ["detach", message.lane, message.incarnation]
        case Heartbeat():
            return ["heartbeat", dataclasses.asdict(message)]
        case _:
            assert_never(message)


def _message(body: list[Any]) -> Message:
    match body:
        case ["outputs", request_ids, token_ids, counts, finishes, logprobs, prompt_logprobs]:
            return Outputs(
                request_ids=request_ids,
                token_ids=token_ids,
                counts=counts,
                finishes={row[0]: _finish(row) for row in finishes},
                logprobs={row[0]: _logprobs(row) for row in logprobs},
                prompt_logprobs={row[0]: _logprobs(row) for row in prompt_logprobs},
            )
        case ["submit", *row]:
            return _submit(row)
        case ["submit_group", rows]:
            return SubmitGroup([_submit(row) for row in rows])
        case ["abort", request_ids]:
            return Abort(request_ids)
        case ["attach", lane, incarnation, address]:
            return Attach(lane=lane, incarnation=incarnation, address=address)
        case ["attached", card]:
            return Attached(_card(card))
        case ["detach", lane, incarnation]:
            return Detach(lane=lane, incarnation=incarnation)
        case ["heartbeat", fields]:
            return Heartbeat(**fields)
        case _:
            raise ValueError(f"no such message: {body[:1]}")


def _prompt_item(token_ids: Sequence[int]) -> list[int] | int:
    """The ids, or how many bytes they are behind the body."""
    if isinstance(token_ids, array):
        return len(token_ids) * token_ids.itemsize
    return token_ids if isinstance(token_ids, list) else list(token_ids)


def _attached_of(messages: Sequence[Message]) -> list[bytes]:
    """The prompts that go behind a body and not into it: a million numbers take JSON 30 ms."""
    return [
        submit.prompt_token_ids.tobytes()
        for message in messages
        for submit in _submits_of(message)
        if isinstance(submit.prompt_token_ids, array)
    ]


def _submits_of(message: Message) -> Sequence[Submit]:
    if isinstance(message, Submit):
        return (message,)
    return message.submits if isinstance(message, SubmitGroup) else ()


def _take_attached(bodies: list[Any], attached: memoryview) -> None:
    """Put the prompts that came behind the bodies where their lengths are, in bytes."""
    at = 0
    for row, place in _prompt_places(bodies):
        if isinstance(row[place], int):
            end = at + row[place]
            token_ids = array("I")
            token_ids.frombytes(attached[at:end])
            row[place], at = token_ids, end
    if at != len(attached):
        raise ValueError("prompts that belong to no request")


def _prompt_places(bodies: list[Any]) -> Iterator[tuple[list[Any], int]]:
    """Where the prompts of these bodies are: a list, and an index in it."""
    for body in bodies:
        if body[0] == "submit":
            yield body, 2
        elif body[0] == "submit_group":
            yield from ((row, 1) for row in body[1])


def _submit_row(submit: Submit) -> list[Any]:
    return [
        submit.request_id,
        _prompt_item(submit.prompt_token_ids),
        _sampling_row(submit.sampling),
        submit.gather,
        submit.sim,
        submit.trace_headers,
        submit.embed,
    ]


def _submit(row: list[Any]) -> Submit:
    request_id, prompt_token_ids, sampling, gather, sim, trace_headers, embed = row
    return Submit(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_sampling(sampling),
        gather=gather,
        sim=sim,
        trace_headers=trace_headers,
        embed=embed,
    )


_SAMPLING_FIELDS = SamplingParams.__struct_fields__
_sampling_row = operator.attrgetter(*_SAMPLING_FIELDS)


def _sampling(row: list[Any]) -> SamplingParams:
    fields = dict(zip(_SAMPLING_FIELDS, row, strict=True))
    # JSON makes strings of a mapping's keys and lists of tuples.
    if fields["logit_bias"]:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
    if grammar := fields["grammar"]:
        fields["grammar"] = Grammar(**grammar | {"kind": GrammarKind(grammar["kind"])})
    return SamplingParams(**fields)


def _card(fields: dict[str, Any]) -> ModelCard:
    return ModelCard(
        **fields
        | {
            "eos_token_ids": tuple(fields["eos_token_ids"]),
            "grammar_kinds": tuple(map(GrammarKind, fields["grammar_kinds"])),
        }
    )


_FINISH_FIELDS = Finish.__struct_fields__
_finish_values = operator.attrgetter(*_FINISH_FIELDS)


def _finish_row(index: int, finish: Finish) -> list[Any]:
    return [index, *_finish_values(finish)]


def _finish(row: list[Any]) -> Finish:
    fields = dict(zip(_FINISH_FIELDS, row[1:], strict=True))
    fields["reason"] = FinishReason(fields["reason"])
    if refusal := fields["refusal"]:
        fields["refusal"] = Refusal(
            reason=RefusalReason(refusal["reason"]), retry_after_s=refusal["retry_after_s"]
        )
    return Finish(**fields)


def _logprob_row(index: int, row: list[TokenLogprob]) -> list[Any]:
    return [
        index,
        [
            [_clamped(entry.logprob), [[token, _clamped(logprob)] for token, logprob in entry.top]]
            for entry in row
        ],
    ]


def _logprobs(row: list[Any]) -> list[TokenLogprob]:
    return [
        TokenLogprob(logprob=logprob, top=tuple((token, value) for token, value in top))
        for logprob, top in row[1]
    ]


def _clamped(logprob: float) -> float:
    # A NaN compares false with everything, so it takes the floor too.
    return min(logprob, 0.0) if logprob > LOGPROB_MIN else LOGPROB_MIN
