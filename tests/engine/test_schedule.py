"""Who runs, in which slot, and how much of whose prompt a step computes."""

from __future__ import annotations

from fastserve.engine.admission import Queue
from fastserve.engine.sampler import Sampler
from fastserve.engine.schedule import Request, Schedule
from fastserve.generation import RequestId, SamplingParams

PARAMS = SamplingParams(max_tokens=10)


def request(number: int, *, prompt: int) -> Request:
    return Request(
        request_id=RequestId(number),
        token_ids=list(range(prompt)),
        num_prompt=prompt,
        sampling=PARAMS,
        sampler=Sampler(PARAMS, vocab_size=100, prompt_token_ids=(), ending_token_ids=()),
    )


def schedule(*prompts: int, num_slots: int = 4) -> Schedule:
    """Requests 1, 2, ... with prompts of so many tokens, as many admitted as there are slots."""
    made = Schedule(num_slots=num_slots)
    for number, prompt in enumerate(prompts, 1):
        made.add(request(number, prompt=prompt))
    made.admit()
    place(made)
    return made


def place(one: Schedule) -> None:
    for running in one.running.values():
        running.placed = True


def step(one: Schedule) -> list[tuple[int, int]]:
    """The plan as (request, tokens), after which all of it is computed and answered."""
    place(one)
    plan = one.plan(prefill_tokens=10)
    for chunk in plan:
        last = chunk.is_last
        chunk.request.num_computed += chunk.count
        if last:
            chunk.request.token_ids.append(7)
    return [(chunk.request.request_id, chunk.count) for chunk in plan]


def slots(one: Schedule) -> dict[int, int | None]:
    return {number: running.slot for number, running in one.running.items()}


def test_a_prompt_is_computed_in_chunks_and_then_each_token() -> None:
    one = schedule(25)
    assert [step(one) for _ in range(5)] == [[(1, 10)], [(1, 10)], [(1, 5)], [(1, 1)], [(1, 1)]]


def test_the_budget_goes_to_prompts_in_the_order_they_came() -> None:
    one = schedule(8, 8, 8)
    assert step(one) == [(1, 8), (2, 2)]
    assert step(one) == [(1, 1), (2, 6), (3, 4)]
    assert step(one) == [(1, 1), (2, 1), (3, 4)]


def test_decode_never_waits_for_the_budget() -> None:
    one = schedule(2, 2, 2, 30)
    step(one)
    assert step(one) == [(1, 1), (2, 1), (3, 1), (4, 10)]


def test_who_finds_no_slot_waits_until_one_is_free() -> None:
    one = schedule(2, 2, 2, num_slots=2)
    assert (list(one.running), list(one.waiting)) == ([1, 2], [3])
    one.remove(RequestId(1))
    one.admit()
    assert slots(one) == {2: 1, 3: 0}


def test_a_request_that_waits_is_removed_and_an_unknown_one_is_no_error() -> None:
    one = schedule(2, 2, num_slots=1)
    one.remove(RequestId(2))
    one.remove(RequestId(99))
    assert (list(one.running), list(one.waiting)) == ([1], [])


def test_a_gap_is_filled_from_the_highest_slot() -> None:
    one = schedule(2, 2, 2, 2)
    one.remove(RequestId(2))
    assert one.compact() == (3, 1)
    assert slots(one) == {1: 0, 3: 2, 4: 1}
    assert one.compact() is None
    # The plan is in the order of slots, for neighbours to be computed together.
    assert [number for number, _ in step(one)] == [1, 4, 3]
    one.add(request(5, prompt=2))
    one.admit()
    assert slots(one)[5] == 3


def test_nothing_is_moved_without_a_gap() -> None:
    assert schedule(2, 2).compact() is None
    assert schedule(2, 2, num_slots=2).compact() is None
    assert schedule().compact() is None


def test_the_youngest_is_preempted_and_computes_prompt_and_answer_anew() -> None:
    one = schedule(4, 4)
    one.add(request(3, prompt=2))
    step(one)
    step(one)
    preempted = one.preempt()
    assert preempted is not None
    assert (preempted.request_id, preempted.num_computed, preempted.slot) == (2, 0, None)
    assert list(one.waiting) == [2, 3]
    one.admit()
    assert list(one.running) == [1], "it would only be preempted again"
    one.remove(RequestId(1))
    one.admit()
    assert list(one.running) == [2, 3]
    assert step(one) == [(2, 6), (3, 2)]


def test_who_is_not_placed_is_not_planned_and_leaves_nothing() -> None:
    one = schedule(4, 4)
    one.running[RequestId(2)].placed = False
    assert [chunk.request.request_id for chunk in one.plan(prefill_tokens=10)] == [1]
    one.remove(RequestId(2))
    assert one.left == {}


def test_what_a_request_computed_stays_in_its_slot_when_it_goes() -> None:
    one = schedule(4, 15)
    step(one)
    one.remove(RequestId(2))
    one.remove(RequestId(1))
    assert {slot: tokens.tolist() for slot, tokens in one.left.items()} == {
        0: [0, 1, 2, 3],
        1: [0, 1, 2, 3, 4, 5],
    }


def test_who_decodes_is_told_from_who_computes_a_prompt() -> None:
    one = schedule(4)
    assert not one.decoding()
    step(one)
    assert one.decoding()
    one.preempt()
    one.remove(RequestId(1))
    assert not one.decoding()


def test_a_request_alone_is_not_preempted() -> None:
    one = schedule(4)
    assert one.preempt() is None
    assert list(one.running) == [1]


def test_what_queues_waits_without_a_slot_for_the_next_step() -> None:
    one = schedule(5, 6, 7, 8, num_slots=2)
    assert one.queue() == Queue(num_places=0, num_requests=2, num_tokens=15)
    one.remove(RequestId(1))
    assert one.queue() == Queue(num_places=0, num_requests=1, num_tokens=8)
    one.remove(RequestId(4))
    assert one.queue() == Queue(num_places=0)
    one.remove(RequestId(2))
    assert one.queue() == Queue(num_places=1)


def test_one_that_was_preempted_queues_again_whatever_slot_is_free() -> None:
    one = schedule(5, 6, num_slots=2)
    one.preempt()
    assert one.queue() == Queue(num_places=0, num_requests=1, num_tokens=6)
    one.remove(RequestId(1))
    assert one.queue() == Queue(num_places=1)
    one.admit()
    assert one.queue() == Queue(num_places=1)
