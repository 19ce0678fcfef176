"""The bill of one request: signs of life while it lasts, and a word to whoever sends it again."""

from __future__ import annotations

import asyncio

import pytest

from knotctl.core.cluster.accounts import ISSUE, Accounts
from knotctl.core.cluster.credits import MICRO, Price, Usage
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import Database
from knotctl.core.errors import Conflict
from knotctl.services import billing
from knotctl.services.billing import Bill


@pytest.fixture
def ledger(database: Database) -> Ledger:
    Accounts(database).open("alice")
    Accounts(database).transfer("first", ISSUE, "alice", 1000)
    found = Ledger(database)
    found.set_price("m", Price(MICRO, 2 * MICRO))
    return found


def test_a_request_that_takes_long_lives_and_records_nothing_by_that(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(billing, "_BEAT_SECONDS", 0.01)

    async def serve() -> None:
        bill = Bill(ledger, "alice", "r")
        await bill.reserve("m", 5, 20, "")
        living = asyncio.create_task(bill.live())
        bill.passes([("n", 4)])
        bill.generated(3)
        while (hold := ledger.find("alice", "r")) is None or hold.beat < 3:
            await asyncio.sleep(0.01)
        # What was generated is not yet what was delivered.
        assert hold.usage == Usage(0, 0)
        await bill.record()
        before = ledger.find("alice", "r")
        assert before is not None and before.usage == Usage(5, 3)
        while (hold := ledger.find("alice", "r")) is None or hold.beat < before.beat + 2:
            await asyncio.sleep(0.01)
        assert hold.usage == Usage(5, 3)
        living.cancel()
        await bill.close()

    asyncio.run(serve())
    hold = ledger.find("alice", "r")
    assert hold is not None
    assert (hold.state, hold.charged) == ("settled", 11)


@pytest.mark.parametrize(
    ("became", "code"), [("held", "in-progress"), ("settled", "already-served"), ("released", "not-served")]
)
def test_who_sends_a_request_again_hears_what_became_of_it(ledger: Ledger, became: str, code: str) -> None:
    async def serve() -> None:
        first = Bill(ledger, "alice", "r")
        await first.reserve("m", 5, 20, "same")
        if became == "settled":
            first.passes([("n", 4)])
            first.generated(3)
        if became != "held":
            await first.close()
        with pytest.raises(Conflict) as e:
            await Bill(ledger, "alice", "r").reserve("m", 5, 20, "same")
        assert e.value.code == code

    asyncio.run(serve())
