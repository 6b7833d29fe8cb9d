"""The engine core with a scripted adapter, over real lanes: messages in, columns out."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import pytest

from fastserve.control import Beat, ControlSocket, LaneClosed, Progress, Ready, Stop
from fastserve.engine.admission import Admission, Queue, queue_of
from fastserve.engine.core import EngineCore
from fastserve.engine.interface import EngineStats, StepOutputs
from fastserve.errors import InvalidRequest
from fastserve.generation import (
    Finish,
    FinishReason,
    ModelCard,
    RefusalReason,
    RequestId,
    SamplingParams,
)
from fastserve.lane.client import LaneClient
from fastserve.lane.messages import Abort, Attached, Heartbeat, Outputs, Submit, SubmitGroup
from fastserve.lane.server import LaneServer
from fastserve.metrics.board import Board
from fastserve.metrics.catalog import (
    ABORTS,
    ENGINE_BATCH_SIZE,
    ENGINE_STEP_TIME,
    ENGINE_STEPS,
    ENGINE_UP,
    HEARTBEAT_AGE,
    KV_CACHE_USAGE,
    LANE_DROPS,
    LAST_STEP_TIME,
    NUM_RUNNING,
    OFFSETS,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
    SERIES_AT,
    Counter,
)
from fastserve.metrics.meter import Meter
from tests.e2e.harness import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from fastserve.engine.interface import Pump
    from fastserve.metrics.catalog import Histogram, Metric

KEY = bytes(32)
DEADLINE_S = 20.0
CARD = ModelCard(
    name="scripted",
    tokenizer_path="",
    chat_template=None,
    bos_token="",
    eos_token="",
    eos_token_ids=(),
    vocab_size=100,
    max_seq_len=100,
)


class ScriptedEngine:
    """One token a step for each request, the prompt's first id, until max_tokens."""

    def __init__(self) -> None:
        self.running: dict[RequestId, list[int]] = {}
        self.aborted: list[RequestId] = []
        self.closed = False
        self.step_s = 0.0
        self.num_places = 1 << 20

    def describe(self) -> ModelCard:
        return CARD

    def load(self, progress: Callable[[float], None]) -> None:
        progress(0.5)

    def add(self, request: Submit) -> None:
        if request.sim is not None:
            raise InvalidRequest("no scripts here")
        self.running[request.request_id] = [
            request.prompt_token_ids[0],
            request.sampling.max_tokens,
        ]

    def abort(self, request_ids: Collection[RequestId]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self, pump: Pump) -> StepOutputs:
        pump(timeout_s=self.step_s)
        outputs = StepOutputs()
        for request_id, state in list(self.running.items()):
            outputs.request_ids.append(request_id)
            outputs.token_ids.append(state[0])
            state[1] -= 1
            if not state[1]:
                del self.running[request_id]
                finish = Finish(reason=FinishReason.LENGTH)
                outputs.finishes[len(outputs.request_ids) - 1] = finish
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=0,
            kv_cache_usage=0.5,
            prefix_cache_queries=len(self.aborted) + 3,
            prefix_cache_hits=2,
        )

    def queue(self) -> Queue:
        return queue_of(
            (1 for _ in self.running),
            num_waiting=len(self.running),
            num_tokens=len(self.running),
            num_free=self.num_places,
        )

    def close(self) -> None:
        self.closed = True


class Running:
    """A core in a thread, and the supervisor's end of its control socket."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engine = ScriptedEngine()
        self.row = Board.make(1).engine_numbers()
        self.control, theirs = ControlSocket.pair()
        self._ours = ControlSocket(theirs)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        lanes = LaneServer(
            run_directory=self.directory,
            engine_incarnation=0,
            key=KEY,
            in_flight_frames_max=1000,
            full_timeout_s=5,
        )
        core = EngineCore(
            self.engine,
            lanes=lanes,
            control=self._ours,
            admission=Admission(max_queued_requests=2, max_queued_tokens=100),
            heartbeat_interval_s=0.02,
            meter=Meter(self.row),
        )
        # Told to stop before the model was there.
        with contextlib.suppress(SystemExit):
            core.start()
            core.run()
        lanes.close(linger_ms=0)

    def client(self, lane: int, *, incarnation: int = 0) -> LaneClient:
        return LaneClient(
            lane=lane,
            incarnation=incarnation,
            run_directory=self.directory,
            engine_incarnation=0,
            key=KEY,
            in_flight_frames_max=1000,
        )

    def counted(self, metric: Metric, *values: str) -> float:
        """The first word of what the engine tells on the board."""
        known = isinstance(metric, Counter)
        return self.row[SERIES_AT[metric.name, values] if known else OFFSETS[metric.name]]

    def sum(self, histogram: Histogram) -> float:
        return self.row[OFFSETS[histogram.name] + histogram.words - 1]

    def stop(self) -> None:
        self.control.send(Stop())
        self.ended()
        self.control.close()

    def ended(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._ours.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.stop()


def read(client: LaneClient, *, until: Callable[[list[object]], bool]) -> list[object]:
    messages: list[object] = []
    give_up_s = time.monotonic() + DEADLINE_S
    while not until(messages):
        assert time.monotonic() < give_up_s, messages
        select.select([client.fd], [], [], 0.05)
        messages += chain.from_iterable(client.receive(frames_max=1000))
    return messages


def outputs_of(messages: list[object]) -> list[Outputs]:
    return [message for message in messages if isinstance(message, Outputs)]


def finished(messages: list[object]) -> bool:
    return any(outputs.finishes for outputs in outputs_of(messages))


def submit(
    number: int, *, lane: int = 1, incarnation: int = 0, max_tokens: int = 3, **more: object
) -> Submit:
    return Submit(
        request_id=RequestId(lane << 57 | incarnation << 40 | number),
        prompt_token_ids=[number],
        sampling=SamplingParams(max_tokens=max_tokens),
        **more,  # type: ignore[arg-type]  # a table of options
    )


def attached(client: LaneClient) -> None:
    def ready(messages: list[object]) -> bool:
        return any(isinstance(message, Heartbeat) and message.ready for message in messages)

    messages = read(client, until=ready)
    assert messages[0] == Attached(CARD)


def test_a_request_becomes_one_message_per_step(running: Running) -> None:
    client = running.client(1)
    attached(client)
    client.send(submit(7))
    outputs = outputs_of(read(client, until=finished))
    assert [each.token_ids for each in outputs] == [[7], [7], [7]]
    assert outputs[-1].finishes == {0: Finish(reason=FinishReason.LENGTH)}
    client.close()


def test_gathered_tokens_come_once(running: Running) -> None:
    client = running.client(1)
    attached(client)
    client.send(submit(7, gather=True))
    [outputs] = outputs_of(read(client, until=finished))
    assert outputs.token_ids == [7, 7, 7]
    client.close()


def test_a_refused_request_is_answered_as_invalid(running: Running) -> None:
    client = running.client(1)
    attached(client)
    client.send(submit(7, sim={}))
    [outputs] = outputs_of(read(client, until=finished))
    assert outputs.token_ids == []
    assert outputs.finishes == {
        0: Finish(reason=FinishReason.ERROR, error="no scripts here", invalid=True)
    }
    client.close()


def test_an_abort_takes_effect_inside_a_step(running: Running) -> None:
    running.engine.step_s = DEADLINE_S
    client = running.client(1)
    attached(client)
    request = submit(7, max_tokens=1000)
    client.send(request)
    read(
        client,
        until=lambda messages: any(
            isinstance(message, Heartbeat) and message.num_running for message in messages
        ),
    )
    running.engine.step_s = 0.0
    client.send(Abort([request.request_id]))
    read(
        client,
        until=lambda messages: any(
            isinstance(message, Heartbeat) and not message.num_running for message in messages
        ),
    )
    assert running.engine.aborted == [request.request_id]
    running.control.send(Stop())  # the long step is still being pumped
    client.close()


@pytest.mark.parametrize("how", ["detach", "supervisor", "successor"])
def test_a_lane_that_ends_aborts_what_it_has(running: Running, how: str) -> None:
    client = running.client(1)
    attached(client)
    request = submit(7, max_tokens=10**9)
    client.send(request)
    read(client, until=lambda messages: bool(outputs_of(messages)))
    successor = None
    if how == "detach":
        client.close()
    elif how == "supervisor":
        running.control.send(LaneClosed(1, 0))
    else:
        successor = running.client(1, incarnation=1)
        attached(successor)
    give_up_s = time.monotonic() + DEADLINE_S
    while request.request_id not in running.engine.aborted:
        assert time.monotonic() < give_up_s
        time.sleep(0.005)
    assert running.engine.running == {}
    if successor is not None:
        successor.close()
    if how != "detach":
        client.close()


def test_the_late_words_of_an_earlier_incarnation_change_nothing(running: Running) -> None:
    client = running.client(1, incarnation=5)
    attached(client)
    running.control.send(LaneClosed(1, 4))
    # It was stuck in a socket's buffer while the acceptor died and its successor attached.
    late = submit(6, incarnation=4, max_tokens=10**9)
    client.send(late)
    client.send(submit(7, incarnation=5))
    assert finished(read(client, until=finished))
    assert running.engine.running == {}, "nobody would ever abort it"
    client.close()


def test_the_supervisor_hears_progress_and_ready(running: Running) -> None:
    client = running.client(1)
    attached(client)
    words = [word for word in running.control.receive() if not isinstance(word, Beat)]
    assert words == [Progress(0.5), Ready("scripted")]
    client.close()


def test_the_core_ends_when_the_supervisor_is_gone(tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.control.close()
    running.ended()


def eventually(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def test_steps_and_batches_are_on_the_board(running: Running) -> None:
    client = running.client(1)
    attached(client)
    running.engine.step_s = 0.01
    client.send(submit(7, max_tokens=3))
    read(client, until=finished)
    eventually(lambda: running.counted(ENGINE_STEPS) == 3)
    assert running.sum(ENGINE_BATCH_SIZE) == 3
    assert 0.03 <= running.sum(ENGINE_STEP_TIME) < DEADLINE_S
    assert 0.01 <= running.counted(LAST_STEP_TIME) < DEADLINE_S
    client.close()


def test_a_heartbeat_is_on_the_board_too(running: Running) -> None:
    client = running.client(1)
    attached(client)
    eventually(lambda: running.counted(ENGINE_UP) == 1)
    assert 0 <= time.monotonic() - running.counted(HEARTBEAT_AGE) < DEADLINE_S
    assert running.counted(KV_CACHE_USAGE) == 0.5
    request = submit(7, max_tokens=10**9)
    client.send(request)
    eventually(lambda: running.counted(NUM_RUNNING) == 1)
    client.send(Abort([request.request_id]))
    eventually(lambda: running.counted(NUM_RUNNING) == 0)
    # What the engine counts from its own beginning is added once, however often it says so.
    eventually(lambda: running.counted(PREFIX_CACHE_QUERIES) == 4)
    assert running.counted(PREFIX_CACHE_HITS) == 2
    client.close()


def test_what_dies_with_an_acceptor_is_counted(running: Running) -> None:
    client = running.client(1)
    attached(client)
    client.send(submit(7, max_tokens=10**9))
    client.send(submit(8, max_tokens=10**9))
    read(client, until=lambda messages: bool(outputs_of(messages)))
    eventually(lambda: len(running.engine.running) == 2)
    running.control.send(LaneClosed(1, 0))
    eventually(lambda: running.counted(ABORTS, "lane_closed") == 2)
    client.send(submit(9))
    eventually(lambda: running.counted(LANE_DROPS, "stale_submit") == 1)
    client.close()


def test_a_stop_while_the_model_loads_ends_the_loading(tmp_path: Path) -> None:
    class Slow(ScriptedEngine):
        def load(self, progress: Callable[[float], None]) -> None:
            give_up_s = time.monotonic() + DEADLINE_S
            while time.monotonic() < give_up_s:
                progress(0.5)

    control, theirs = ControlSocket.pair()
    ours = ControlSocket(theirs)
    lanes = LaneServer(
        run_directory=tmp_path,
        engine_incarnation=0,
        key=KEY,
        in_flight_frames_max=1000,
        full_timeout_s=5,
    )
    control.send(Stop())
    core = EngineCore(
        Slow(),
        lanes=lanes,
        control=ours,
        admission=Admission(max_queued_requests=0, max_queued_tokens=0),
        heartbeat_interval_s=0.02,
        meter=Meter(Board.make(1).engine_numbers()),
    )
    with pytest.raises(SystemExit) as left:
        core.start()
    assert left.value.code == 0
    lanes.close(linger_ms=0)
    control.close()
    ours.close()


# ---- admission: two may queue, of at most 100 tokens


def refusals(client: LaneClient, *numbers: int, lane: int = 1) -> list[Finish]:
    """The ends of requests that were not taken: one message each, without a token."""
    outputs = outputs_of(read(client, until=lambda seen: len(outputs_of(seen)) >= len(numbers)))
    assert [(each.request_ids, each.counts) for each in outputs] == [
        ([submit(number, lane=lane).request_id], [0]) for number in numbers
    ]
    return [each.finishes[0] for each in outputs]


def fill(running: Running, client: LaneClient, *numbers: int, lane: int = 1) -> None:
    """Have these requests taken, which never end, by an engine that is in the middle of a step."""
    running.engine.num_places = 1
    running.engine.step_s = 30.0
    for number in numbers:
        one = submit(number, lane=lane, max_tokens=10**9)
        client.send(one)
        wait_until(partial(running.engine.running.__contains__, one.request_id))


def test_what_queues_is_counted_over_every_lane(running: Running) -> None:
    clients = {lane: running.client(lane) for lane in (1, 2, 3)}
    for lane, client in clients.items():
        attached(client)
        fill(running, client, 1, lane=lane)
    for lane, client in clients.items():
        client.send(submit(2, lane=lane))
        [finish] = refusals(client, 2, lane=lane)
        assert finish.error == "2 of at most 2 requests are queued"
        assert finish.refusal is not None
        assert finish.refusal.reason is RefusalReason.QUEUED_REQUESTS
        assert 1 <= finish.refusal.retry_after_s <= 60
    num_running = len(running.engine.running)
    clients[1].send(Abort([submit(1, lane=1).request_id]))
    # What another lane sends next may come sooner than this.
    eventually(lambda: len(running.engine.running) == num_running - 1)
    fill(running, clients[2], 3, lane=2)
    for client in clients.values():
        client.close()


def test_a_group_is_taken_as_a_whole_or_not_at_all(running: Running) -> None:
    client = running.client(1)
    attached(client)
    fill(running, client, 1, 2)
    client.send(SubmitGroup([submit(number) for number in (3, 4)]))
    assert all(finish.refusal is not None for finish in refusals(client, 3, 4))
    assert len(running.engine.running) == 2
    fill(running, client, 5)  # for one alone there was room
    client.close()


def test_what_an_idle_engine_has_no_room_for_is_not_to_come_again(running: Running) -> None:
    running.engine.num_places = 1
    client = running.client(1)
    attached(client)
    client.send(SubmitGroup([submit(number) for number in (1, 2, 3, 4)]))
    for finish in refusals(client, 1, 2, 3, 4):
        assert finish.invalid
        assert finish.refusal is None
    client.close()
