"""From what nodes hold to their places: in rounds, no layer without its last copy on the way."""

from __future__ import annotations

from cluster_samples import PLAIN, a_model, a_node

from knotctl.core.cluster.capacity import Capacity, capacities_of
from knotctl.core.cluster.placement import Place
from knotctl.core.cluster.reconcile import Holdings, Kind, Order, schedule
from knotctl.core.spans import LayerSpan

MODEL = a_model(10)


def able(**gigabytes: float) -> dict[str, Capacity]:
    return capacities_of([a_node(i, size) for i, size in gigabytes.items()], MODEL, PLAIN)[0]


def places(capacities: dict[str, Capacity], **spans: str) -> dict[str, Place]:
    return {i: Place(capacities[i], LayerSpan.parse(text), "why") for i, text in spans.items()}


def held(**spans: str) -> dict[str, list[LayerSpan]]:
    return {i: [LayerSpan.parse(t) for t in text.split()] for i, text in spans.items()}


def told(rounds: list[list[Order]]) -> list[list[str]]:
    return [[f"{o.kind.name} {o.node_id} {o.span}" for o in step] for step in rounds]


def test_a_boundary_moves_by_a_load_and_then_a_drop() -> None:
    c = able(a=9, b=9)
    rounds, done = schedule(held(a="0:5", b="5:10"), places(c, a="0:7", b="7:10"), c, 10)
    assert done and told(rounds) == [["LOAD a 5:7"], ["DROP b 5:7"]]


def test_two_copies_never_let_go_of_the_same_layers_together() -> None:
    c = able(a=5, b=5)
    rounds, done = schedule(held(a="0:5", b="0:5"), places(c, a="5:10", b="5:10"), c, 10)
    assert not done, "the layers that both leave stay with one of them"
    assert [o.kind for step in rounds for o in step].count(Kind.DROP) == 1


def test_a_hole_travels_along_full_nodes() -> None:
    c = able(a=2, b=2, c=2)
    target = places(c, a="0:2", b="2:4", c="4:6")
    model = a_model(6)
    full = capacities_of([a_node(i, 2) for i in "abc"], model, PLAIN)[0]
    rounds, done = schedule(held(a="1:3", b="3:5"), {i: Place(full[i], p.span, "") for i, p in target.items()}, full, 6)
    assert done
    assert told(rounds) == [
        ["LOAD c 5:6", "LOAD c 4:5"], ["DROP b 4:5"], ["LOAD b 2:3"], ["DROP a 2:3"], ["LOAD a 0:1"],
    ]  # fmt: skip


def test_a_swap_between_full_nodes_waits_unless_nothing_can_be_served_anyway() -> None:
    c = able(a=5, b=5)
    swap = places(c, a="5:10", b="0:5")
    rounds, done = schedule(held(a="0:5", b="5:10"), swap, c, 10, force=True)
    assert not done and not rounds, "a covered model is never uncovered"
    model = a_model(11)
    big = capacities_of([a_node("a", 5), a_node("b", 5), a_node("c", 1)], model, PLAIN)[0]
    target = {i: Place(big[i], LayerSpan.parse(t), "") for i, t in {"a": "5:10", "b": "0:5", "c": "10:11"}.items()}
    now = held(a="0:5", b="5:10")
    assert schedule(now, target, big, 11)[1] is False
    # Without c there is a gap, whatever anybody does.
    del big["c"], target["c"]
    rounds, done = schedule(now, target, big, 11, force=True)
    assert done and sum(o.forced for step in rounds for o in step) == 1


def test_gaps_are_loaded_before_the_rest() -> None:
    c = able(a=9, b=5)
    rounds, done = schedule(held(b="0:3"), places(c, a="0:8", b="0:3"), c, 10)
    assert done and told(rounds) == [["LOAD a 3:8", "LOAD a 0:3"]]
    assert [o.closes_gap for o in rounds[0]] == [True, False]


def test_memory_counts_what_is_still_held() -> None:
    c = able(a=5, b=9)
    rounds, done = schedule(held(a="0:4", b="0:9"), places(c, a="5:10", b="0:9"), c, 10)
    assert done
    assert told(rounds) == [["LOAD a 9:10", "DROP a 0:4"], ["LOAD a 5:9"]]


def test_a_drop_that_is_withdrawn_is_served_again() -> None:
    books = Holdings(10)
    books.join("a", [LayerSpan(0, 5)])
    books.join("b", [LayerSpan(0, 5)])
    drop = Order(Kind.DROP, "a", LayerSpan(0, 5), "nf4", "")
    books.begin(drop)
    assert books.coverage.counts[0] == 1, "it stops counting when it is given"
    books.withdraw(drop)
    assert books.coverage.counts[0] == 2 and books.held["a"] == [LayerSpan(0, 5)]


def test_a_load_counts_when_it_is_done_and_not_when_it_fails() -> None:
    books = Holdings(10)
    books.join("a")
    load = Order(Kind.LOAD, "a", LayerSpan(2, 5), "nf4", "")
    for done in (False, True):
        books.begin(load)
        assert books.coverage.counts[2] == 0 and books.expected.counts[2] == 1
        books.finish(load, done=done)
        assert books.coverage.counts[2] == books.expected.counts[2] == int(done)
    books.leave("a")
    assert not any(books.coverage.counts) and not any(books.expected.counts)
