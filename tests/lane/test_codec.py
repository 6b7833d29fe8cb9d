"""A frame means the message that was signed, and nothing else is ever decoded."""

from __future__ import annotations

import hmac
import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.generation import (
    LOGPROB_MIN,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    ModelCard,
    RequestId,
    SamplingParams,
    TokenLogprob,
    packed_embedding,
)
from fastserve.lane.codec import VERSION_ATTACHED, BadFrame, Codec, Message
from fastserve.lane.messages import (
    Abort,
    Attach,
    Attached,
    Detach,
    Heartbeat,
    Outputs,
    Submit,
)

KEY = bytes(range(32))
HIGHEST_ID = RequestId((1 << 63) - 1)

MESSAGES: list[Message] = [
    Submit(
        request_id=HIGHEST_ID,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(
            max_tokens=7,
            temperature=0.5,
            seed=-5,
            logit_bias={3: -100.0, 49151: 2.5},
            stop_token_ids=(4, 5),
            logprobs=2,
            grammar=Grammar(kind=GrammarKind.REGEX, source="(yes|no)"),
        ),
        gather=True,
        sim={"token_ids": [1]},
    ),
    Submit(
        request_id=RequestId(1),
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=0),
        embed=True,
    ),
    Abort([RequestId(1), HIGHEST_ID]),
    Attach(lane=63, incarnation=4, address="ipc:///run/x/lane-63-4"),
    Attached(
        ModelCard(
            name="model",
            tokenizer_path="/t.json",
            chat_template=None,
            bos_token="",
            eos_token="</s>",
            eos_token_ids=(2, 3),
            vocab_size=10,
            max_seq_len=64,
            grammar_kinds=(GrammarKind.JSON_SCHEMA, GrammarKind.REGEX),
            embedding_size=8,
            add_eos=True,
        )
    ),
    Detach(lane=1, incarnation=2),
    Heartbeat(ready=True, num_running=1, num_waiting=2, steps=3, kv_cache_usage=0.25),
    Outputs(
        request_ids=[1, 2],
        token_ids=[10, 11, 12],
        counts=[2, 1],
        finishes={1: Finish(reason=FinishReason.STOP, stop_token_id=12)},
        logprobs={0: [TokenLogprob(logprob=-0.5, top=((10, -0.5), (4, -1.0)))] * 2},
        prompt_logprobs={1: [TokenLogprob(logprob=-2.5, top=((3, -0.5),))]},
    ),
    Outputs(
        request_ids=[1],
        token_ids=[],
        counts=[0],
        finishes={0: Finish(reason=FinishReason.STOP, embedding=packed_embedding([0.6, 0.8]))},
    ),
    Outputs(
        request_ids=[3],
        token_ids=[],
        counts=[0],
        finishes={0: Finish(reason=FinishReason.ERROR, error="no", invalid=True)},
    ),
]


def test_several_messages_cross_in_one_frame_and_in_order() -> None:
    codec = Codec(KEY)
    assert codec.decode_all(codec.encode_all(MESSAGES)) == MESSAGES
    assert codec.decode_all(codec.encode_all(MESSAGES[:1])) == MESSAGES[:1]
    assert codec.encode_all(MESSAGES[:1]) == codec.encode(MESSAGES[0])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    codec = Codec(KEY)
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    ("logprob", "told"),
    [
        (math.nan, LOGPROB_MIN),
        (-math.inf, LOGPROB_MIN),
        (math.inf, 0.0),
        (-1e30, LOGPROB_MIN),
        (-3.5, -3.5),
    ],
)
def test_what_json_cannot_say_is_clamped(logprob: float, told: float) -> None:
    codec = Codec(KEY)
    entry = TokenLogprob(logprob=logprob, top=((1, logprob),))
    message = codec.decode(
        codec.encode(Outputs(request_ids=[1], token_ids=[1], logprobs={0: [entry]}))
    )
    assert isinstance(message, Outputs)
    assert message.logprobs == {0: [TokenLogprob(logprob=told, top=((1, told),))]}


def test_any_changed_byte_is_noticed() -> None:
    codec = Codec(KEY)
    frame = codec.encode(Abort([RequestId(1)]))
    for at in range(len(frame)):
        changed = bytearray(frame)
        changed[at] ^= 1
        with pytest.raises(BadFrame):
            codec.decode(bytes(changed))


def test_many_token_ids_go_behind_the_body_in_four_bytes_each() -> None:
    codec = Codec(KEY)
    prompts = [array("I", [0, 7, 2**32 - 1] * 5000), [1, 2], array("I"), array("I", [9])]
    submits = [
        Submit(
            request_id=RequestId(number),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1),
        )
        for number, prompt in enumerate(prompts)
    ]
    frame = codec.encode_all([submits[0], Abort([RequestId(5)]), *submits[1:]])
    assert len(frame) < 4 * len(prompts[0]) + 1000
    assert codec.decode_all(frame) == [submits[0], Abort([RequestId(5)]), *submits[1:]]
    assert codec.decode(codec.encode(submits[0])) == submits[0]


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\xff[]",
        b'\x00\x00\x00\x0b["abort",[]]',
        b'\x00\x00\x00\x0b["abort",[]]\x01\x02\x03\x04',
        b'\x00\x00\x00\x0e["submit",1,8]\x01\x02\x03\x04',
        b'\x00\x00\x00\x0e["submit",1,3]\x01\x02\x03',
    ],
)
def test_what_does_not_belong_behind_a_body_is_a_bad_frame(rest: bytes) -> None:
    signed = VERSION_ATTACHED + rest
    with pytest.raises(BadFrame):
        Codec(KEY).decode(signed + hmac.digest(KEY, signed, "sha256"))


def test_another_key_is_not_ours() -> None:
    with pytest.raises(BadFrame, match="tag"):
        Codec(KEY).decode(Codec(bytes(32)).encode(Abort([])))


@given(st.binary(max_size=200))
def test_noise_is_a_bad_frame(noise: bytes) -> None:
    with pytest.raises(BadFrame):
        Codec(KEY).decode(noise)
