"""`python -m fastserve.binary`: see build.py."""

import sys

from fastserve.binary.build import main
from fastserve.errors import StartError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except StartError as error:
        sys.exit(f"fastserve.binary: {error}")
