"""What the first rank runs in the foreground: it lets the command attach, and ends the others.

Whoever attaches is written to TRTLLM_STANDIN_ATTACHED.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Listener
from pathlib import Path

from tensorrt_llm.nodes.session import KEY, address, connect


def main() -> None:
    key = os.environ[KEY]
    if sys.argv[1:] == ["--action", "stop"]:
        connect(key).send(("stop", os.getpid()))
        return
    from mpi4py import MPI

    attached = Path(os.environ["TRTLLM_STANDIN_ATTACHED"])
    connections = []
    with Listener(address(), authkey=bytes.fromhex(key)) as listener:
        while True:
            connections.append(listener.accept())
            action, pid = connections[-1].recv()
            if action == "stop":
                break
            with attached.open("a") as file:
                file.write(f"{pid}\n")
    for rank in range(1, MPI.COMM_WORLD.size):
        MPI.COMM_WORLD.send("stop", dest=rank)


if __name__ == "__main__":
    main()
