"""Benchmarks: operations of the ledger a second, on SQLite with a synchronous disk and on PostgreSQL by its socket."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from ledger_books import MODEL, halves, open_books
from pytest_benchmark.fixture import BenchmarkFixture

from knotctl.core.cluster.apikeys import KeyStore, Scope
from knotctl.core.cluster.audit import audit
from knotctl.core.cluster.credits import Usage
from knotctl.core.cluster.store import Database

ROUNDS = 100


@pytest.mark.parametrize("step", ["reserve", "record", "settle", "whole request"])
def test_a_step(database: Database, benchmark: BenchmarkFixture, step: str) -> None:
    ledger, numbers = open_books(database, credits=10**12), itertools.count()

    def prepare() -> tuple[tuple[str], dict[str, object]]:
        request = f"r{next(numbers)}"
        if step in ("record", "settle"):
            ledger.reserve("alice", request, MODEL, Usage(10, 40))
        return (request,), {}

    def run(request: str) -> None:
        if step in ("reserve", "whole request"):
            ledger.reserve("alice", request, MODEL, Usage(10, 40))
        if step in ("record", "whole request"):
            ledger.record("alice", request, Usage(10, 20), halves(30))
        if step in ("settle", "whole request"):
            ledger.settle("alice", request, Usage(10, 40), halves(50))

    benchmark.pedantic(run, setup=prepare, rounds=ROUNDS, warmup_rounds=5)


def test_a_hundred_requests_by_eight_threads(database: Database, benchmark: BenchmarkFixture) -> None:
    ledger, numbers = open_books(database, credits=10**12), itertools.count()

    def serve(_: int) -> None:
        request = f"r{next(numbers)}"
        ledger.reserve("alice", request, MODEL, Usage(10, 40))
        ledger.settle("alice", request, Usage(10, 40), halves(50))

    with ThreadPoolExecutor(8) as pool:
        benchmark.pedantic(lambda: list(pool.map(serve, range(100))), rounds=3, warmup_rounds=1)


def test_a_key_is_authenticated(database: Database, benchmark: BenchmarkFixture) -> None:
    store = KeyStore(database)
    text, _ = store.create("alice", [Scope.INFER])
    benchmark.pedantic(lambda: store.authenticate(text, Scope.INFER), rounds=ROUNDS, warmup_rounds=5)


def test_an_audit_of_a_thousand_requests(database: Database, benchmark: BenchmarkFixture) -> None:
    ledger = open_books(database, credits=10**12)
    for i in range(1000):
        ledger.reserve("alice", f"r{i}", MODEL, Usage(10, 40))
        ledger.settle("alice", f"r{i}", Usage(10, 40), halves(50))
    assert benchmark.pedantic(lambda: audit(database), rounds=3).ok
