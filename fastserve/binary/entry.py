"""What the collected interpreter runs: the command, or a child of its supervisor."""

import multiprocessing
import sys

if __name__ == "__main__":
    # Spawned children start this same program, with arguments of multiprocessing's own.
    multiprocessing.freeze_support()

    from fastserve.cli import main

    sys.exit(main())
