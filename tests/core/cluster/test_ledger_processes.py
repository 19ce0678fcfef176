"""Trackers as processes that share a database and are killed at any moment: the books say what happened.

KNOTCTL_KILLED_REQUESTS and KNOTCTL_KILLS make it longer.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ledger_books import check_books, open_books

from knotctl.core.cluster.accounts import Accounts
from knotctl.core.cluster.store import open_database
from knotctl.core.cluster.sweeper import Sweeper
from knotctl.core.cluster.tables import LEDGER

WORKER = Path(__file__).with_name("ledger_worker.py")
REQUESTS = int(os.environ.get("KNOTCTL_KILLED_REQUESTS", "120"))
KILLS = int(os.environ.get("KNOTCTL_KILLS", "3"))


class Worker:
    """One process; what it said is kept, line by line, also after its death."""

    def __init__(self, url: str, seed: int) -> None:
        command = [sys.executable, str(WORKER), url, str(seed), "0", str(REQUESTS)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lines: list[list[str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.endswith("\n"):
                self.lines.append(line.split())
        self.popen.stdout.close()

    def wait(self) -> list[list[str]]:
        self.popen.wait(120)
        self._reader.join(10)
        return self.lines


def test_no_kill_charges_twice_delivers_for_free_or_leaves_a_hold(database_url: Callable[[], str]) -> None:
    url, draw = database_url(), random.Random(7)
    with open_database(url, LEDGER) as database:
        ledger = open_books(database, credits=REQUESTS * 90)
        said: list[list[str]] = []
        workers = [Worker(url, seed) for seed in range(2)]
        for kill in range(KILLS):
            victim = workers.pop(draw.randrange(len(workers)))
            # Let it get somewhere, then to wherever it happens to be.
            while victim.popen.poll() is None and len(victim.lines) < 30:
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.02))
            victim.popen.kill()
            said += victim.wait()
            workers.append(Worker(url, 100 + kill))
        for worker in workers:
            said += worker.wait()
            assert worker.popen.returncode == 0
            assert ["done"] in worker.lines
        now = [0.0]
        sweeper = Sweeper(ledger, lambda: now[0])
        sweeper.sweep()
        now[0] = 1000.0
        swept = sweeper.sweep()
        assert ledger.open_holds() == []
        check_books(database)
        assert not [line for line in said if line[0] == "refused"]
        owners = [line[1] for line in said if line[0] == "owns"]
        assert len(owners) == len(set(owners)), "two served one request"
        total = 0
        for i in range(REQUESTS):
            hold = ledger.find("alice", f"r{i}")
            assert hold is not None
            total += hold.charged
            delivered = [int(x[2]) for x in said if x[:2] == ["delivered", hold.request_id]]
            assert hold.usage.generated >= max(delivered, default=0), "delivered for free"
            charged = [int(x[2]) for x in said if x[:2] == ["charged", hold.request_id]]
            assert charged in ([], [hold.charged]), "charged otherwise than was said"
        assert Accounts(database).get("alice").balance == REQUESTS * 90 - total
        # At most what each was killed over.
        assert len(swept) <= KILLS
