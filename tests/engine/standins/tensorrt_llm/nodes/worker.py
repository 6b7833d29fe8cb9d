"""What every other rank runs: it waits to be sent home."""

from __future__ import annotations

import time


def main() -> None:
    from mpi4py import MPI

    # A blocking receive would spin.
    while not MPI.COMM_WORLD.Iprobe(source=0):
        time.sleep(0.02)
    MPI.COMM_WORLD.recv(source=0)


if __name__ == "__main__":
    main()
