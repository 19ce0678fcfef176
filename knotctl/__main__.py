"""`python -m knotctl` and the console script: run the command line and leave with its exit status."""

import sys

from knotctl.cli import main


def run() -> None:
    """Leave the process with the exit status of the command line."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
