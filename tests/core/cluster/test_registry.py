"""The registry of nodes: one writer by lease and fence, whatever is paused, killed or late, on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from knotctl.core.cluster.registry import REGISTRY, Lease, NodeRow, Registry
from knotctl.core.cluster.store import Database, open_database
from knotctl.core.errors import Conflict
from knotctl.core.spans import LayerSpan

MODEL = "0123456789abcdef" * 2


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def db(database_url: Callable[[], str]) -> Iterator[Database]:
    with open_database(database_url(), REGISTRY) as opened:
        yield opened


def two(db: Database) -> tuple[Clock, Lease, Lease]:
    clock = Clock()
    return clock, *(Lease(db, MODEL, f"http://tracker{i}:1", ttl_s=10, clock=clock) for i in range(2))


def test_one_leads_and_the_other_knows_where_it_is(db: Database) -> None:
    _, a, b = two(db)
    assert a.tick()
    assert not b.tick()
    assert (a.leading, b.leading) == (True, False)
    assert b.leader_url == "http://tracker0:1"


def test_a_leader_that_renews_is_never_deposed(db: Database) -> None:
    clock, a, b = two(db)
    for _ in range(20):
        assert a.tick()
        assert not b.tick()
        clock.now += 9


def test_a_leader_that_is_gone_is_followed_under_a_higher_fence(db: Database) -> None:
    clock, a, b = two(db)
    a.tick()
    b.tick()
    clock.now += 9.9
    assert not b.tick()
    clock.now += 0.2
    assert b.tick()
    assert b.fence == a.fence + 1
    # and does not act any more itself, before it has asked
    assert not a.leading
    assert not a.tick()


def test_a_leader_stops_before_another_may_begin(db: Database) -> None:
    clock, a, b = two(db)
    a.tick()
    b.tick()
    clock.now += 5
    assert not a.leading
    assert not b.tick()


def test_one_that_ends_is_followed_at_once(db: Database) -> None:
    _, a, b = two(db)
    a.tick()
    assert not b.tick()
    a.release()
    assert b.tick()
    assert b.fence == 2


def test_a_tracker_that_was_paused_writes_nothing(db: Database) -> None:
    clock, a, b = two(db)
    registry = Registry(db, MODEL)
    a.tick()
    b.tick()
    row = NodeRow("n", "http://n:1", "boot", {"node_id": "n"}, (LayerSpan(0, 2),), None, 1.5)
    registry.save(a, [row])
    clock.now += 11
    assert b.tick()
    with pytest.raises(Conflict) as e:
        registry.save(a, [], ["n"])
    assert e.value.code == "lease-lost"
    assert registry.nodes() == [row]
    registry.save(b, [], ["n"])
    assert registry.nodes() == []


def test_models_have_registries_of_their_own(db: Database) -> None:
    lease = Lease(db, MODEL, "http://t:1")
    lease.tick()
    Registry(db, MODEL).save(lease, [NodeRow("n", "http://n:1", "boot", {})])
    assert Registry(db, "other").nodes() == []
    assert Lease(db, "other", "http://u:1").tick()


def test_the_first_answer_is_the_known_one(db: Database) -> None:
    assert Registry(db, MODEL).known_answer("[1, 2]") == "[1, 2]"
    assert Registry(db, MODEL).known_answer("[9]") == "[1, 2]"
