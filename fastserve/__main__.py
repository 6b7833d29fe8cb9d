"""`python -m fastserve`: the same as the command."""

import sys

from fastserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
