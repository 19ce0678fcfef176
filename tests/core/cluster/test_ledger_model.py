"""Any sequence of operations, with crashes and retries, does to the books what a few lines of plain Python say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_books import MODEL, crashing_at, halves, open_books

from knotctl.core.cluster.accounts import Accounts
from knotctl.core.cluster.credits import Usage
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import Database, open_database
from knotctl.core.cluster.tables import LEDGER
from knotctl.core.errors import KnotctlError

CREDITS = 200
NOTHING = Usage(0, 0)
REQUESTS = st.sampled_from(["r0", "r1", "r2", "r3"])
USAGES = st.builds(Usage, st.integers(0, 30), st.integers(0, 40))
STEP = st.one_of(
    st.tuples(st.just("reserve"), REQUESTS, USAGES),
    st.tuples(st.just("record"), REQUESTS, USAGES),
    st.tuples(st.just("settle"), REQUESTS, USAGES),
    st.tuples(st.just("release"), REQUESTS, st.just(NOTHING)),
    st.tuples(st.just("sweep"), REQUESTS, st.just(NOTHING)),
)
# each step with the statement that it crashes at, if it has so many, and how often it is repeated after
STEPS = st.lists(st.tuples(STEP, st.integers(0, 25), st.integers(0, 1)), min_size=1, max_size=25)


def bill(usage: Usage) -> int:
    return usage.prompt + 2 * usage.generated


@dataclass
class Request:
    amount: int
    state: str = "held"
    usage: Usage = NOTHING
    charged: int = 0

    def close(self, usage: Usage) -> None:
        self.usage, self.charged = usage, min(bill(usage), self.amount)
        self.state = "settled"


@dataclass
class Model:
    """The ledger in as few lines as it can be said: what the database must agree with after every step."""

    balance: int
    requests: dict[str, Request] = field(default_factory=dict)

    @property
    def held(self) -> int:
        return sum(r.amount for r in self.requests.values() if r.state == "held")

    def step(self, name: str, request: str, usage: Usage) -> str:
        """Do it, and return the code of the refusal, or the state of the request."""
        found = self.requests.get(request)
        if name == "reserve":
            if found is None:
                if bill(usage) > self.balance - self.held:
                    return "insufficient-credit"
                self.requests[request] = found = Request(bill(usage))
            return found.state
        if found is None:
            return "none" if name == "sweep" else "unknown-hold"
        if name == "record":
            if found.state != "held":
                return "hold-closed"
            if usage.prompt >= found.usage.prompt and usage.generated >= found.usage.generated:
                found.usage = usage
        elif name == "settle":
            if found.state == "released":
                return "hold-closed"
            if found.state == "held":
                less = usage.prompt < found.usage.prompt or usage.generated < found.usage.generated
                found.close(found.usage if less else usage)
                self.balance -= found.charged
        elif found.state == "held":
            if found.usage == NOTHING:
                found.state = "released"
            else:
                found.close(found.usage)
                self.balance -= found.charged
        return found.state


def do(ledger: Ledger, name: str, account: str, request: str, usage: Usage) -> str:
    work = halves(usage.prompt + usage.generated)
    try:
        if name == "reserve":
            return ledger.reserve(account, request, MODEL, usage)[0].state
        if name == "record":
            return ledger.record(account, request, usage, work).state
        if name == "settle":
            return ledger.settle(account, request, usage, work).state
        if name == "release":
            return ledger.release(account, request).state
        if (seen := ledger.find(account, request)) is None:
            return "none"
        closed = ledger.close_idle(seen)
        return closed.state if closed else seen.state
    except KnotctlError as e:
        return e.code


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def one_database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """One database for all examples, each of which has an account of its own in it."""
    if request.param == "postgres":
        url = request.getfixturevalue("postgres").new_database()
    else:
        url = str(tmp_path_factory.mktemp("model") / "ledger.db")
    with open_database(url, LEDGER) as database:
        yield database


NUMBERS = itertools.count()


@settings(max_examples=60)
@given(steps=STEPS)
def test_the_database_agrees_with_the_model_after_every_step_crash_and_retry(
    one_database: Database, steps: list[tuple[tuple[str, str, Usage], int, int]]
) -> None:
    account = f"alice{next(NUMBERS)}"
    ledger, model = open_books(one_database, account, CREDITS), Model(CREDITS)
    for (name, request, usage), crash, repeats in steps:
        call: Callable[[], str] = lambda n=name, r=request, u=usage: do(ledger, n, account, r, u)  # noqa: E731
        with crashing_at(one_database, crash) as crashed:
            call()
        expected = model.step(name, request, usage)
        # What crashed is asked for again, and so is some of what did not: nothing more happens.
        for _ in range(repeats + crashed[0]):
            assert call() == expected
        found = Accounts(one_database).get(account)
        assert (found.balance, found.held) == (model.balance, model.held)
        hold = ledger.find(account, request)
        state = model.requests.get(request)
        assert (hold and (hold.state, hold.amount, hold.usage, hold.charged)) == (
            state and (state.state, state.amount, state.usage, state.charged)
        )


def test_the_books_of_all_those_examples_balance(one_database: Database) -> None:
    from knotctl.core.cluster.audit import audit

    assert audit(one_database).ok
    assert {f.code for f in audit(one_database).findings} <= {"short-charge"}
