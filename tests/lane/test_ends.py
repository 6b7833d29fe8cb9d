"""Two real ends over real sockets: what is sent arrives in order, and nothing ever blocks."""

from __future__ import annotations

import select
import time
from itertools import chain
from typing import TYPE_CHECKING

import pytest
import zmq

from fastserve.errors import Overloaded
from fastserve.generation import RequestId
from fastserve.lane.client import LaneClient, ingress_address
from fastserve.lane.codec import Codec
from fastserve.lane.messages import Abort, Attach, Detach, Heartbeat, Outputs
from fastserve.lane.server import COMPANY_MESSAGES_MAX, LaneServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEY = bytes(32)
DEADLINE_S = 10.0
FRAMES_MAX = 10


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LaneServer]:
    server = LaneServer(
        run_directory=tmp_path,
        engine_incarnation=0,
        key=KEY,
        in_flight_frames_max=FRAMES_MAX,
        full_timeout_s=0.05,
    )
    yield server
    server.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LaneClient]:
    client = LaneClient(
        lane=3,
        incarnation=1,
        run_directory=tmp_path,
        engine_incarnation=0,
        key=KEY,
        in_flight_frames_max=FRAMES_MAX,
    )
    yield client
    client.close()


def received(end: LaneServer | LaneClient, *, number: int) -> list[object]:
    messages: list[object] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(messages) < number and time.monotonic() < deadline_s:
        select.select([end.fd], [], [], 0.05)
        if isinstance(end, LaneClient):
            messages += chain.from_iterable(end.receive(frames_max=1000))
        else:
            messages += end.receive()
    return messages


def attached(server: LaneServer, client: LaneClient) -> None:
    [attach] = received(server, number=1)
    assert isinstance(attach, Attach)
    assert (attach.lane, attach.incarnation) == (client.lane, client.incarnation)
    server.attach(attach.lane, incarnation=attach.incarnation, address=attach.address)


def test_a_client_attaches_and_both_ways_carry(server: LaneServer, client: LaneClient) -> None:
    attached(server, client)
    assert server.incarnation(3) == 1
    outputs = [Outputs(request_ids=[n], token_ids=[n]) for n in range(5)]
    for each in outputs:
        server.send(3, each)
    server.send_gathered()
    assert received(client, number=5) == outputs
    client.send(Abort([RequestId(7)]))
    assert received(server, number=1) == [Abort([RequestId(7)])]


def test_a_client_may_come_before_the_server(tmp_path: Path, client: LaneClient) -> None:
    server = LaneServer(
        run_directory=tmp_path,
        engine_incarnation=0,
        key=KEY,
        in_flight_frames_max=FRAMES_MAX,
        full_timeout_s=1,
    )
    attached(server, client)
    server.close()


def test_the_last_word_is_detach(server: LaneServer, tmp_path: Path) -> None:
    client = LaneClient(
        lane=1,
        incarnation=2,
        run_directory=tmp_path,
        engine_incarnation=0,
        key=KEY,
        in_flight_frames_max=FRAMES_MAX,
    )
    attached(server, client)
    client.close()
    assert received(server, number=1) == [Detach(lane=1, incarnation=2)]


def test_a_frame_that_we_did_not_sign_is_counted_and_dropped(
    server: LaneServer, client: LaneClient, tmp_path: Path
) -> None:
    attached(server, client)
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(ingress_address(tmp_path, engine_incarnation=0))
        stranger.send(b"\x01" + b"[]" + bytes(32))
        stranger.send(b"")
        client.send(Abort([]))
        deadline_s = time.monotonic() + DEADLINE_S
        messages: list[object] = []
        while (server.bad_frames < 2 or not messages) and time.monotonic() < deadline_s:
            messages += received(server, number=1)
    assert messages == [Abort([])]
    assert server.take_drops() == {"bad": 2, "not_attached": 0, "detached": 0}
    assert not any(server.take_drops().values())


def test_a_full_lane_is_held_then_given_up_and_never_blocks(
    server: LaneServer, client: LaneClient
) -> None:
    attached(server, client)
    beat = Heartbeat(ready=True, num_running=0, num_waiting=0, steps=0)
    deadline_s = time.monotonic() + DEADLINE_S
    stalled: list[int] = []
    while not stalled and time.monotonic() < deadline_s:
        server.send(3, beat)
        stalled = server.flush()
    assert stalled == [3]
    held = server.held()[3]
    assert held > 0
    server.detach(3)
    assert server.held() == {}
    assert server.take_drops() == {"bad": 0, "not_attached": 0, "detached": held}


def test_what_was_held_arrives_in_order_once_there_is_room(
    server: LaneServer, client: LaneClient
) -> None:
    attached(server, client)
    outputs = [Outputs(request_ids=[n], token_ids=[n]) for n in range(3 * FRAMES_MAX)]
    for each in outputs:
        server.send(3, each)
    messages: list[object] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(messages) < len(outputs) and time.monotonic() < deadline_s:
        messages += chain.from_iterable(client.receive(frames_max=1000))
        server.flush()
    assert messages == outputs


def test_an_ingress_that_nobody_reads_overloads_and_does_not_block(client: LaneClient) -> None:
    for _ in range(FRAMES_MAX - 1):  # the Attach has a place too
        client.send(Abort([]))
    with pytest.raises(Overloaded):
        client.send(Abort([]))


def test_what_is_sent_in_one_round_of_the_loop_leaves_in_one_frame_and_in_order(
    server: LaneServer, tmp_path: Path
) -> None:
    later: list[Callable[[], None]] = []
    client = patient_client(tmp_path, later)
    attached(server, client)
    aborts = [Abort([RequestId(n)]) for n in range(5)]
    for each in aborts:
        client.send(each)
    assert len(later) == 1
    assert frames_waiting(server) == []
    later.pop()()
    [frame] = frames_waiting(server)
    assert Codec(KEY).decode_all(frame) == aborts
    client.send(aborts[0])
    assert len(later) == 1, "the next round asks again"
    client.close()
    assert received(server, number=2) == [aborts[0], Detach(lane=4, incarnation=1)]


def test_a_message_waits_for_company_no_longer_than_a_moment(
    server: LaneServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    client = patient_client(tmp_path, [])
    client.send(Abort([RequestId(1)]))
    now_s += 0.0005
    client.send(Abort([RequestId(2)]))
    now_s += 0.0006
    client.send(Abort([RequestId(3)]))  # the round takes long: this one takes all along
    monkeypatch.undo()
    assert [type(message) for message in received(server, number=4)] == [Attach, *[Abort] * 3]
    client.close()


def test_what_is_sent_within_a_millisecond_of_a_frame_leaves_in_the_next(
    server: LaneServer, client: LaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached(server, client)
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    steps = [Outputs(request_ids=[n], token_ids=[n]) for n in range(6)]
    for each in steps[:4]:
        server.send(3, each)
        now_s += 0.0003
    assert server.flush() == []  # nothing is due yet
    now_s += 0.0002
    assert server.flush() == []
    server.send(3, steps[4])
    server.send_gathered()  # there will be no more
    server.send_gathered()
    now_s += 0.0011
    server.send(3, steps[5])
    monkeypatch.undo()
    assert [client._codec.decode_all(frame) for frame in frames_to(client)] == [
        steps[:1],
        steps[1:4],
        steps[4:5],
        steps[5:],
    ]


def test_company_has_a_limit(
    server: LaneServer, client: LaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached(server, client)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    step = Outputs(request_ids=[1], token_ids=[1])
    for _ in range(1 + COMPANY_MESSAGES_MAX + 1):
        server.send(3, step)
    monkeypatch.undo()
    sizes = [len(client._codec.decode_all(frame)) for frame in frames_to(client)]
    assert sizes == [1, COMPANY_MESSAGES_MAX]


def frames_to(client: LaneClient) -> list[bytes]:
    frames: list[bytes] = []
    while client._outputs.poll(200):
        frames.append(client._outputs.recv())
    return frames


def patient_client(run_directory: Path, later: list[Callable[[], None]]) -> LaneClient:
    return LaneClient(
        lane=4,
        incarnation=1,
        run_directory=run_directory,
        engine_incarnation=0,
        key=KEY,
        in_flight_frames_max=FRAMES_MAX,
        defer=later.append,
    )


def frames_waiting(server: LaneServer) -> list[bytes]:
    frames: list[bytes] = []
    while server._ingress.poll(200):
        frames.append(server._ingress.recv())
    return frames


def test_a_lane_that_is_not_attached_takes_nothing(server: LaneServer) -> None:
    server.send(5, Heartbeat(ready=True, num_running=0, num_waiting=0, steps=0))
    assert server.flush() == []
    assert server.incarnation(5) == -1
    assert server.take_drops()["not_attached"] == 1


def test_a_closed_end_takes_and_gives_nothing(client: LaneClient) -> None:
    client.close()
    with pytest.raises(Overloaded, match="ending"):
        client.send(Abort([RequestId(1)]))
    assert list(client.receive(frames_max=1)) == []
