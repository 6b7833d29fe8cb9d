"""What the engine process costs per token, with the sim engine and no pauses between steps.

    python -m bench.engine_tokens [--running 1024] [--lanes 1] [--seconds 5]

The lanes' reader throws away what it gets, and is another process's CPU. Prints tokens per second,
and the engine process's CPU time per token: its Python, JSON, HMAC and ZeroMQ's thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import select
import tempfile
import time
from itertools import chain
from pathlib import Path

import psutil

from fastserve.config import Config, ServerConfig
from fastserve.config_engine import SimConfig
from fastserve.control import ControlSocket, Stop
from fastserve.engine.arguments import EngineArguments, EngineSettings
from fastserve.engine.process import main as engine_main
from fastserve.generation import RequestId, SamplingParams
from fastserve.lane.client import LaneClient
from fastserve.lane.ids import request_ids
from fastserve.lane.messages import Heartbeat, Outputs, Submit
from fastserve.metrics.board import Board


def _engine(control: object, arguments: EngineArguments) -> None:
    engine_main(ControlSocket(control), arguments)  # type: ignore[arg-type]  # a socket, pickled


def measure(*, running: int, seconds: float, lanes: int = 1) -> dict[str, float]:
    """Run the engine with that many endless requests, spread over lanes; return its figures."""
    config = Config(
        server=ServerConfig(engine="sim"), sim=SimConfig(step_ms=0.0, max_batch_size=running)
    )
    with tempfile.TemporaryDirectory() as directory:
        arguments = EngineArguments(
            run_directory=directory,
            incarnation=0,
            key=secrets.token_bytes(32),
            board=Board.make(1),
            settings=EngineSettings(
                server=config.server,
                engine=config.engine,
                llamacpp=config.llamacpp,
                trtllm=config.trtllm,
                sim=config.sim,
            ),
            lane_config=config.lane,
            log=config.log,
        )
        control, theirs = ControlSocket.pair()
        process = multiprocessing.get_context("spawn").Process(
            target=_engine, args=(theirs, arguments)
        )
        process.start()
        assert process.pid is not None
        clients = [
            LaneClient(
                lane=lane,
                incarnation=0,
                engine_incarnation=0,
                run_directory=Path(directory),
                key=arguments.key,
                in_flight_frames_max=10_000,
            )
            for lane in range(lanes)
        ]
        for lane, client in enumerate(clients):
            _wait_ready(client)
            _submit(client, running // lanes + (lane < running % lanes), lane=lane)
        figures = _count(clients, psutil.Process(process.pid), seconds=seconds)
        control.send(Stop())
        for client in clients:
            client.close()
        process.join(10)
        process.kill()
    return figures | {"running": running, "lanes": lanes}


def _wait_ready(client: LaneClient) -> None:
    while True:
        select.select([client.fd], [], [], 0.1)
        for message in chain.from_iterable(client.receive(frames_max=1000)):
            if isinstance(message, Heartbeat) and message.ready:
                return


def _submit(client: LaneClient, number: int, *, lane: int) -> None:
    ids = request_ids(lane=lane, incarnation=0)
    sampling = SamplingParams(max_tokens=1 << 40)
    for _ in range(number):
        request_id: RequestId = next(ids)
        client.send(Submit(request_id=request_id, prompt_token_ids=[1] * 50, sampling=sampling))


def _count(
    clients: list[LaneClient], engine: psutil.Process, *, seconds: float
) -> dict[str, float]:
    tokens = messages = 0
    began_s, cpu_began_s = time.monotonic(), sum(engine.cpu_times()[:2])
    while time.monotonic() - began_s < seconds:
        select.select([client.fd for client in clients], [], [], 0.05)
        frames = chain.from_iterable(one.receive(frames_max=1000) for one in clients)
        for message in chain.from_iterable(frames):
            if isinstance(message, Outputs):
                messages += 1
                tokens += len(message.token_ids)
    elapsed_s = time.monotonic() - began_s
    cpu_s = sum(engine.cpu_times()[:2]) - cpu_began_s
    return {
        "tokens_per_s": round(tokens / elapsed_s),
        "messages_per_s": round(messages / elapsed_s),
        "engine_cpu_us_per_message": round(cpu_s / max(messages, 1) * 1e6, 1),
        "engine_cpu_us_per_token": round(cpu_s / max(tokens, 1) * 1e6, 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=1024, help="requests in the batch")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to count")
    parser.add_argument("--lanes", type=int, default=1, help="acceptors that they are of")
    options = parser.parse_args()
    print(measure(running=options.running, seconds=options.seconds, lanes=options.lanes))
