"""A step's outputs reach each lane once, and what nobody reads as it comes is gathered."""

from __future__ import annotations

from fastserve.engine.fanout import Fanout
from fastserve.engine.interface import StepOutputs
from fastserve.generation import Finish, FinishReason, TokenLogprob
from fastserve.lane.ids import LANE_SHIFT
from fastserve.lane.messages import Outputs

LENGTH = Finish(reason=FinishReason.LENGTH)
LANE_0, LANE_2 = 5, (2 << LANE_SHIFT) | 5


def test_a_step_is_parted_by_lane() -> None:
    step = StepOutputs([LANE_0, LANE_2, LANE_0 + 1], [10, 20, 11], finishes={1: LENGTH})
    assert Fanout().part(step) == {
        0: Outputs(request_ids=[LANE_0, LANE_0 + 1], token_ids=[10, 11]),
        2: Outputs(request_ids=[LANE_2], token_ids=[20], finishes={0: LENGTH}),
    }


def test_counts_say_which_tokens_are_whose() -> None:
    step = StepOutputs([LANE_0, LANE_2, LANE_0 + 1], [1, 2, 3, 4], counts=[2, 0, 2])
    assert Fanout().part(step) == {
        0: Outputs(request_ids=[LANE_0, LANE_0 + 1], token_ids=[1, 2, 3, 4], counts=[2, 2]),
        2: Outputs(request_ids=[LANE_2], token_ids=[], counts=[0]),
    }


def test_gathered_tokens_leave_together_with_the_finish() -> None:
    fanout = Fanout()
    fanout.gather(LANE_0)
    entry = TokenLogprob(logprob=-1.0)
    for token in (1, 2):
        step = StepOutputs([LANE_0], [token], logprobs={0: [entry]})
        assert fanout.part(step) == {}
    step = StepOutputs([LANE_0], [3], finishes={0: LENGTH}, logprobs={0: [entry]})
    assert fanout.part(step) == {
        0: Outputs(
            request_ids=[LANE_0],
            token_ids=[1, 2, 3],
            counts=[3],
            finishes={0: LENGTH},
            logprobs={0: [entry] * 3},
        )
    }
    # The id is free again: a later request of it, were there one, is not gathered.
    assert fanout.part(StepOutputs([LANE_0], [4])) == {
        0: Outputs(request_ids=[LANE_0], token_ids=[4])
    }


def test_what_was_aborted_is_forgotten() -> None:
    fanout = Fanout()
    fanout.gather(LANE_0)
    fanout.part(StepOutputs([LANE_0], [1]))
    fanout.forget([LANE_0, 99])
    assert fanout.part(StepOutputs([LANE_0], [2]))[0].token_ids == [2]


def test_prompt_logprobs_go_where_the_tokens_go() -> None:
    fanout = Fanout()
    fanout.gather(LANE_2)
    one, two = [TokenLogprob(logprob=-1.0)], [TokenLogprob(logprob=-2.0)]
    step = StepOutputs([LANE_2, LANE_0, LANE_0 + 1], [1, 2, 3], prompt_logprobs={0: one, 2: two})
    assert fanout.part(step) == {
        0: Outputs(request_ids=[LANE_0, LANE_0 + 1], token_ids=[2, 3], prompt_logprobs={1: two})
    }
    assert fanout.part(StepOutputs([LANE_0], [4]))[0].prompt_logprobs == {}
    step = StepOutputs([LANE_0, LANE_2], [5, 6], finishes={1: LENGTH})
    assert fanout.part(step)[2] == Outputs(
        request_ids=[LANE_2],
        token_ids=[1, 6],
        counts=[2],
        finishes={0: LENGTH},
        prompt_logprobs={0: one},
    )
    # One lane and nothing gathered is the short way.
    step = StepOutputs([LANE_0], [7], prompt_logprobs={0: one})
    assert fanout.part(step)[0].prompt_logprobs == {0: one}


def test_prompt_logprobs_of_what_was_aborted_are_forgotten() -> None:
    fanout = Fanout()
    fanout.gather(LANE_0)
    fanout.part(StepOutputs([LANE_0], [1], prompt_logprobs={0: [TokenLogprob(logprob=-1.0)]}))
    fanout.forget([LANE_0])
    assert fanout.part(StepOutputs([LANE_0], [2]))[0].prompt_logprobs == {}
