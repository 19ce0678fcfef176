"""A process that serves requests of a ledger and says on stdout what it was acknowledged, until it is killed.

python ledger_worker.py URL SEED FIRST COUNT
"""

from __future__ import annotations

import random
import sys

from knotctl.core.cluster.credits import Usage, Work
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import open_database
from knotctl.core.cluster.tables import LEDGER
from knotctl.core.errors import KnotctlError


def main(url: str, seed: int, first: int, count: int) -> None:
    draw = random.Random(seed)
    with open_database(url, LEDGER) as database:
        ledger = Ledger(database)
        print("ready", flush=True)
        for i in range(first, first + count):
            request = f"r{i}"
            try:
                _, fresh = ledger.reserve("alice", request, "coder-1.5b", Usage(10, 40), fingerprint="body")
                if not fresh:
                    continue  # another serves it, or served it, or died over it
                print("owns", request, flush=True)
                for generated in range(0, draw.randint(1, 40), 10):
                    work = [Work("n1", 14, 10 + generated), Work("n2", 14, 10 + generated)]
                    ledger.record("alice", request, Usage(10, generated), work)
                    print("delivered", request, generated, flush=True)
                hold = ledger.settle("alice", request, Usage(10, generated), work)
                print("charged", request, hold.charged, flush=True)
            except KnotctlError as e:
                print("refused", request, e.code, flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
