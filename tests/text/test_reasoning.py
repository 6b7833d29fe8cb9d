"""Where a thought ends and the answer begins, whatever the prompt began."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve.text.answer import AnswerParser, Part
from fastserve.text.reasoning import REASONING_FORMATS, Thinking, ThoughtTokens
from tests.text.parts import Said, however_sliced, of_format, read

WITHIN, BEFORE, AFTER = Thinking.WITHIN, Thinking.BEFORE, Thinking.AFTER


@pytest.mark.parametrize(
    ("thinking", "text", "said"),
    [
        (WITHIN, "Hm.\n</think>\n\nYes.", [("thought", "Hm."), "Yes."]),
        (WITHIN, "<think>\nHm.</think>Yes.", [("thought", "Hm."), "Yes."]),
        (WITHIN, "\n\n</think>\nYes.", ["Yes."]),
        (WITHIN, "Hm </thin", [("thought", "Hm </thin")]),
        (WITHIN, "", []),
        (BEFORE, "<think>\nHm.\n</think>\n\nYes.", [("thought", "Hm."), "Yes."]),
        (BEFORE, "\n<think>Hm.</think> Yes. </think>", [("thought", "Hm."), "Yes. </think>"]),
        (BEFORE, " Yes.", [" Yes."]),
        (BEFORE, "<thin", ["<thin"]),
        (BEFORE, "Yes. <think>Hm.</think>", ["Yes. <think>Hm.</think>"]),
        (BEFORE, "<think>Hm.", [("thought", "Hm.")]),
        (AFTER, "Yes.</think>", ["Yes.</think>"]),
        (AFTER, "<think>Hm.</think>", ["<think>Hm.</think>"]),
    ],
)
def test_a_thought_is_told_from_the_answer(thinking: Thinking, text: str, said: Said) -> None:
    assert however_sliced(partial(AnswerParser.of_model, thinking=thinking), text) == said


def test_calls_follow_thoughts_and_none_are_within() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"I might {call}.\n</think>\n\n{call}"
    said = however_sliced(of_format("hermes", thinking=WITHIN), text)
    assert said == [("thought", f"I might {call}."), ("f", "{}")]


def test_a_thought_is_told_as_it_comes() -> None:
    parser = AnswerParser.of_model(thinking=WITHIN)
    assert parser.push("H") == [(Part.REASONING, "H")]
    assert parser.push("m.\n") == [(Part.REASONING, "m.")]
    assert parser.push("So\n</") == [(Part.REASONING, "\nSo")]
    assert parser.push("think>") == []
    assert parser.push("\n\nYes") == [(Part.CONTENT, "Yes")]


@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "think>", "\n", " ", "a", "</"]), max_size=12
    ),
    thinking=st.sampled_from(Thinking),
)
@settings(max_examples=200)
def test_no_slicing_changes_what_is_said(pieces: list[str], thinking: Thinking) -> None:
    make = partial(AnswerParser.of_model, thinking=thinking)
    assert read(make(), pieces) == however_sliced(make, "".join(pieces))


@pytest.mark.parametrize(
    ("name", "prompt", "thinking"),
    [
        ("qwen3", "<|im_start|>assistant\n", BEFORE),
        ("qwen3", "<|im_start|>assistant\n<think>\n", WITHIN),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", AFTER),
        ("qwen3", "<think> is a tag<|im_end|>\n<|im_start|>assistant\n", BEFORE),
        ("deepseek_r1", "<｜Assistant｜>", WITHIN),
        ("deepseek_r1", "<｜Assistant｜><think>\n", WITHIN),
        ("deepseek_r1", "<｜Assistant｜></think>", AFTER),
    ],
)
def test_where_an_answer_begins_is_seen_in_the_prompt(
    name: str, prompt: str, thinking: Thinking
) -> None:
    assert REASONING_FORMATS[name].beginning(prompt) is thinking


@pytest.mark.parametrize(
    ("thinking", "tokens", "number"),
    [
        (WITHIN, ["Hm", ".", "</think>", "Yes"], 3),
        (WITHIN, ["Hm", ".</th", "ink>\n", "Yes", "</think>"], 3),
        (WITHIN, ["Hm", "."], 2),
        (WITHIN, [], 0),
        (BEFORE, ["<think>", "Hm", "</think>", "Yes"], 3),
        (BEFORE, ["\n", " <th", "ink>", "Hm", "</think>", "Yes"], 5),
        (BEFORE, ["<think>", "Hm"], 2),
        (BEFORE, ["<th", "is", "<think>", "</think>"], 0),
        (BEFORE, ["<th"], 0),
        (AFTER, ["<think>", "Hm", "</think>"], 0),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 10])
def test_the_tokens_of_a_thought_are_counted(
    thinking: Thinking, tokens: list[str], number: int, size: int
) -> None:
    counter = ThoughtTokens([token.encode() for token in tokens], thinking)
    for start in range(0, len(tokens), size):
        counter.push(range(start, min(start + size, len(tokens))))
    assert counter.number == number
