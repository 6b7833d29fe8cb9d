"""`python -m bench`: compare servers (`run`, the default), measure rooms (`micro`), or more.

python -m bench                          fastserve and its peers, the whole table of works
python -m bench micro                    each room by itself, against its budget
python -m bench large                    a stream beside prompts of megabytes
python -m bench aims                     starts, spread of connections, latency, beside their aims
python -m bench flat                     costs and memory from 1,000 requests to 100,000, and from
                                         1 stream to 4,096
"""

from __future__ import annotations

import signal
import sys

from bench import aims, flat, large_requests, micro, run_command
from fastserve.load.build import LoadError

_COMMANDS = {
    "run": run_command.main,
    "micro": micro.main,
    "large": large_requests.main,
    "flat": flat.main,
    "aims": aims.main,
}


def main(argv: list[str]) -> int:
    """Carry out a command. Returns the exit code: 2 if it could not even begin."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in _COMMANDS else ("run", argv)
    try:
        return _COMMANDS[name](rest)
    except LoadError as error:
        print(f"bench {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    # As an exception it ends servers and load on its way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
