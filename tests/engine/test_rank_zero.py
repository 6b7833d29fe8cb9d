"""Rank 0 and others, each a core with a scripted adapter, over real lanes: threads instead of MPI.

An acceptor speaks to rank 0 alone, and is answered by whichever rank has its request.
"""

from __future__ import annotations

import select
import threading
import time
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import pytest

from fastserve.config import Config, ServerConfig
from fastserve.config_engine import LlamaCppConfig
from fastserve.control import Beat, ControlSocket, EngineGone, Failed, LaneClosed, Ready, Stop
from fastserve.engine.admission import Admission, Queue
from fastserve.engine.arguments import EngineSettings
from fastserve.engine.interface import EngineStats, StepOutputs
from fastserve.engine.others import OtherRanks
from fastserve.engine.rank import RankCore, settings_of
from fastserve.engine.rank_zero import RankZeroCore
from fastserve.errors import EngineDead, StartError
from fastserve.generation import Finish, FinishReason, ModelCard, RequestId, SamplingParams
from fastserve.lane.client import LaneClient
from fastserve.lane.messages import Abort, Attached, Heartbeat, Outputs, Submit
from fastserve.lane.server import LaneServer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from fastserve.control import ControlMessage
    from fastserve.engine.interface import Pump

KEY = bytes(32)
DEADLINE_S = 20.0
BEAT_S = 0.02
ENDLESS = 10**9
# In the running batch of each rank, and in the queue of all.
PLACES = 2
QUEUED_MAX = 100
CARD = ModelCard(
    name="scripted", tokenizer_path="", chat_template=None, bos_token="", eos_token="",
    eos_token_ids=(), vocab_size=100, max_seq_len=100,
)  # fmt: skip


class ScriptedEngine:
    """For each request, its rank's number as a token, a step each, until max_tokens."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.left: dict[RequestId, int] = {}
        self.may_load = threading.Event()
        self.may_step = threading.Event()
        self.may_step.set()

    def describe(self) -> ModelCard:
        return CARD

    def load(self, progress: Callable[[float], None]) -> None:
        while not self.may_load.wait(0.005):
            progress(0.5)

    def add(self, request: Submit) -> None:
        self.left[request.request_id] = request.sampling.max_tokens

    def abort(self, request_ids: Collection[RequestId]) -> None:
        for request_id in request_ids:
            self.left.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.left)

    def queue(self) -> Queue:
        more = len(self.left) - PLACES
        return Queue(num_places=max(-more, 0), num_requests=max(more, 0))

    def step(self, pump: Pump) -> StepOutputs:
        pump(timeout_s=0.001)
        while not self.may_step.is_set():
            pump(timeout_s=0.01)
        outputs = StepOutputs(list(self.left), [self.rank] * len(self.left))
        for index, request_id in enumerate(outputs.request_ids):
            self.left[RequestId(request_id)] -= 1
            if not self.left[RequestId(request_id)]:
                del self.left[RequestId(request_id)]
                outputs.finishes[index] = Finish(reason=FinishReason.LENGTH)
        return outputs

    def stats(self) -> EngineStats:
        running = min(len(self.left), PLACES)
        return EngineStats(num_running=running, num_waiting=len(self.left) - running)

    def close(self) -> None:
        pass


class ThreadedRanks(OtherRanks):
    """The other ranks as threads, each behind the same sockets as a process has."""

    def __init__(self, directory: Path, engines: list[ScriptedEngine]) -> None:
        self.numbers = range(1, 1 + len(engines))
        self._directory = directory
        self._engines = engines
        self._poll = select.epoll()
        self._links = {}
        self._theirs: dict[int, ControlSocket] = {}
        self.threads: list[threading.Thread] = []

    def begin(self) -> None:
        for number, engine in zip(self.numbers, self._engines, strict=True):
            self._links[number], theirs = ControlSocket.pair()
            self._theirs[number] = ControlSocket(theirs)
            self._poll.register(self._links[number], select.EPOLLIN)
            thread = threading.Thread(target=self._run, args=(number, engine))
            self.threads.append(thread)
            thread.start()

    def _run(self, number: int, engine: ScriptedEngine) -> None:
        lanes = lane_server(self._directory, rank=number)
        core = RankCore(
            engine, lanes=lanes, control=self._theirs[number], heartbeat_interval_s=BEAT_S
        )
        core.start()
        core.run()
        lanes.close(linger_ms=0)

    def hear(self) -> Iterator[tuple[int, ControlMessage]]:
        for number, link in self._links.items():
            for message in link.receive():
                yield number, message

    def say(self, number: int, message: ControlMessage) -> None:
        """As if that rank had said so."""
        self._theirs[number].send(message)

    def describe(self, number: int) -> str:
        return f"thread {number}"

    def end(self) -> None:
        for link in self._links.values():
            link.send(Stop())
        for thread in self.threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        for link in (*self._links.values(), *self._theirs.values()):
            link.close()
        self._poll.close()


def lane_server(directory: Path, *, rank: int) -> LaneServer:
    return LaneServer(
        run_directory=directory,
        engine_incarnation=0,
        key=KEY,
        in_flight_frames_max=1000,
        full_timeout_s=5,
        rank=rank,
    )


class Running:
    """Rank 0 in a thread, two others, and the supervisor's end of the control socket."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.engines = [ScriptedEngine(rank) for rank in range(3)]
        self.others = ThreadedRanks(directory, self.engines[1:])
        self.control, theirs = ControlSocket.pair()
        self._ours = ControlSocket(theirs)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def load(self) -> None:
        for engine in self.engines:
            engine.may_load.set()

    def _run(self) -> None:
        lanes = lane_server(self._directory, rank=0)
        core = self.core = RankZeroCore(
            self.engines[0], lanes=lanes, control=self._ours, heartbeat_interval_s=BEAT_S,
            others=self.others, silent_timeout_s=DEADLINE_S,
            admission=Admission(max_queued_requests=QUEUED_MAX, max_queued_tokens=0),
        )  # fmt: skip
        try:
            core.start()
            core.run()
        except (EngineDead, StartError) as error:
            self.error = error
        core.close()
        lanes.close(linger_ms=0)

    def client(self, lane: int = 1, *, incarnation: int = 0) -> LaneClient:
        return LaneClient(
            lane=lane, incarnation=incarnation, run_directory=self._directory,
            engine_incarnation=0, key=KEY, in_flight_frames_max=1000,
        )  # fmt: skip

    def wait_ended(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def given(self) -> list[int]:
        """How many requests rank 0 takes each rank to have."""
        return [self.core._dispatcher.given(rank).num_requests for rank in range(3)]

    def loads(self) -> list[int]:
        return [len(engine.left) for engine in self.engines]

    def stop(self) -> None:
        self.load()
        for engine in self.engines:
            engine.may_step.set()
        self.control.send(Stop())
        self.wait_ended()
        self.others.end()
        self.control.close()
        self._ours.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.stop()


def wait_until(condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.002)


def read(client: LaneClient, *, until: Callable[[list[object]], bool]) -> list[object]:
    messages: list[object] = []
    give_up_s = time.monotonic() + DEADLINE_S
    while not until(messages):
        assert time.monotonic() < give_up_s, messages
        select.select([client.fd], [], [], 0.05)
        messages += chain.from_iterable(client.receive(frames_max=1000))
    return messages


def ready(messages: list[object]) -> bool:
    return any(isinstance(message, Heartbeat) and message.ready for message in messages)


def has_ended(request_id: RequestId, messages: list[object]) -> bool:
    return any(
        message.request_ids[at] == request_id
        for message in messages
        if isinstance(message, Outputs)
        for at in message.finishes
    )


def request(number: int, *, lane: int = 1, max_tokens: int = ENDLESS) -> Submit:
    return Submit(
        request_id=RequestId(lane << 57 | number),
        prompt_token_ids=[number],
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def test_the_engine_is_ready_when_the_last_rank_is(running: Running) -> None:
    client = running.client()
    running.engines[0].may_load.set()
    running.engines[1].may_load.set()
    messages = read(client, until=lambda messages: len(messages) > 10)
    assert messages[0] == Attached(CARD)
    assert sum(isinstance(message, Attached) for message in messages) == 1, "rank 0 alone greets"
    assert not ready(messages)
    assert not any(isinstance(word, Ready) for word in running.control.receive())
    running.engines[2].may_load.set()
    read(client, until=ready)
    assert any(isinstance(word, Ready) for word in running.control.receive())
    client.close()


def test_requests_are_shared_out_and_each_rank_answers_its_own(running: Running) -> None:
    running.load()
    client = running.client()
    read(client, until=ready)
    for number in range(6):
        client.send(request(number, max_tokens=5))
    ended: set[int] = set()
    tokens: dict[int, set[int]] = {}

    def all_ended(messages: list[object]) -> bool:
        for message in messages:
            if isinstance(message, Outputs):
                for index, request_id in enumerate(message.request_ids):
                    tokens.setdefault(request_id, set()).add(message.token_ids[index])
                ended.update(message.request_ids[index] for index in message.finishes)
        return len(ended) == 6

    read(client, until=all_ended)
    assert sorted(next(iter(each)) for each in tokens.values()) == [0, 0, 1, 1, 2, 2]
    assert all(len(each) == 1 for each in tokens.values()), "one rank has all of a request"
    client.close()


def test_the_queue_of_all_ranks_is_limited_to_the_request(running: Running) -> None:
    client = running.client()
    running.load()
    read(client, until=ready)
    room = len(running.engines) * PLACES + QUEUED_MAX
    for number in range(room + 10):
        client.send(request(number))
    refused: set[int] = set()

    def all_told(messages: list[object]) -> bool:
        for message in messages:
            if isinstance(message, Outputs):
                ended = message.finishes.items()
                refused.update(message.request_ids[at] for at, finish in ended if finish.refusal)
        return len(refused) == 10

    read(client, until=all_told)
    assert {request_id & 0xFFFF for request_id in refused} == set(range(room, room + 10))
    wait_until(lambda: sum(running.loads()) == room)
    client.send(Abort([request(3).request_id]))
    client.send(request(room + 10))
    wait_until(lambda: any(room + 10 == one & 0xFFFF for e in running.engines for one in e.left))
    client.close()


def test_a_rank_whose_requests_have_ended_is_given_the_next(running: Running) -> None:
    running.load()
    client = running.client()
    read(client, until=ready)
    running.engines[0].may_step.clear()
    running.engines[2].may_step.clear()
    for number in range(3):
        client.send(request(number, max_tokens=3))
    for number in range(3, 7):
        # Rank 0 has heard that rank 1 is done, and the others are as busy as before.
        wait_until(lambda: running.given() == [1, 0, 1])
        client.send(request(number, max_tokens=3))
        last = request(number).request_id
        read(client, until=partial(has_ended, last))
    wait_until(lambda: running.loads() == [1, 0, 1])
    client.close()


def test_an_abort_reaches_the_rank_that_has_the_request(running: Running) -> None:
    running.load()
    client = running.client()
    read(client, until=ready)
    requests = [request(number) for number in range(6)]
    for each in requests:
        client.send(each)
    wait_until(lambda: running.loads() == [2, 2, 2])
    client.send(Abort([each.request_id for each in requests[:5]]))
    wait_until(lambda: sorted(running.loads()) == [0, 0, 1])
    client.close()


@pytest.mark.parametrize("how", ["detach", "supervisor", "successor"])
def test_a_lane_that_ends_does_so_on_every_rank(running: Running, how: str) -> None:
    running.load()
    client, other = running.client(1), running.client(2)
    clients = [other] if how == "detach" else [client, other]
    read(client, until=ready)
    read(other, until=ready)
    for number in range(6):
        client.send(request(number))
    wait_until(lambda: running.loads() == [2, 2, 2])
    other.send(request(9, lane=2))
    wait_until(lambda: sum(running.loads()) == 7)
    if how == "detach":
        client.close()
    elif how == "supervisor":
        running.control.send(LaneClosed(1, 0))
    else:
        clients.append(running.client(1, incarnation=1))
    wait_until(lambda: sorted(running.loads()) == [0, 0, 1])
    # And what was given to nobody any more weighs on nobody.
    for number in range(10, 15):
        other.send(request(number, lane=2))
    wait_until(lambda: running.loads() == [2, 2, 2])
    if how == "successor":
        read(clients[-1], until=ready)
    for each in clients:
        each.close()


def test_one_rank_that_finishes_no_step_stalls_the_count_of_all(running: Running) -> None:
    running.load()
    client = running.client()
    read(client, until=ready)
    for number in range(3):
        client.send(request(number))
    wait_until(lambda: running.loads() == [1, 1, 1])
    running.engines[2].may_step.clear()

    def stands_still() -> bool:
        list(running.control.receive())
        time.sleep(5 * BEAT_S)
        beats = [word for word in running.control.receive() if isinstance(word, Beat)]
        return len(beats) > 1 and len({beat.steps for beat in beats}) == 1 and beats[-1].busy

    wait_until(stands_still)
    running.engines[2].may_step.set()
    wait_until(lambda: not stands_still())
    client.close()


@pytest.mark.parametrize(
    ("word", "error"),
    [
        pytest.param(Failed("no such model"), StartError("no such model"), id="cannot start"),
        pytest.param(EngineGone("it raised"), EngineDead("it raised"), id="dies"),
    ],
)
def test_a_rank_that_ends_ends_the_engine_with_its_words(
    running: Running, word: ControlMessage, error: Exception
) -> None:
    running.load()
    wait_until(lambda: running.others.threads)
    running.others.say(1, word)
    running.wait_ended()
    assert type(running.error) is type(error)
    assert str(running.error) == str(error)


@pytest.mark.parametrize(
    ("cpus", "threads"),
    [(2, [1, 1]), (1, [1, 1]), (3, [1, 2]), (64, [32, 32]), (7, [3, 4])],
)
def test_processors_are_shared_out(cpus: int, threads: list[int]) -> None:
    settings = _settings(dp_size=2, threads=0)
    shares = [settings_of(rank, settings, cpus=cpus).llamacpp.threads for rank in range(2)]
    assert shares == threads


def test_whoever_asks_for_threads_gets_as_many_on_each_rank() -> None:
    settings = _settings(dp_size=2, threads=5)
    assert settings_of(1, settings, cpus=2).llamacpp.threads == 5


def _settings(*, dp_size: int, threads: int) -> EngineSettings:
    config = Config(server=ServerConfig(dp_size=dp_size), llamacpp=LlamaCppConfig(threads=threads))
    return EngineSettings(
        server=config.server, engine=config.engine, llamacpp=config.llamacpp,
        trtllm=config.trtllm, sim=config.sim,
    )  # fmt: skip
