"""How the command that a launcher starts finds the launcher's first rank."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Client, Connection

ADDRESS = "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"
KEY = "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"
_DEADLINE_S = 30.0


def attached() -> Connection | None:
    """Attach, if a launcher has started us. Whoever reads the key first takes it away."""
    if "TLLM_SPAWN_PROXY_PROCESS" not in os.environ:
        return None
    connection = connect(os.environ.pop(KEY))
    connection.send(("attach", os.getpid()))
    return connection


def connect(key: str) -> Connection:
    give_up_s = time.monotonic() + _DEADLINE_S
    while True:
        try:
            return Client(address(), authkey=bytes.fromhex(key))
        except ConnectionRefusedError:  # it is about to listen
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.02)


def address() -> tuple[str, int]:
    host, port = os.environ[ADDRESS].removeprefix("tcp://").split(":")
    return host, int(port)
