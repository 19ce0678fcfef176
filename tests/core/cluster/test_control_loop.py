"""The control loop: gaps before everything, hold-down that grows, loads bounded, answers that come too late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_samples import PLAIN, a_deadlock, a_model, a_node

from knotctl.core.cluster.controller import Controller
from knotctl.core.cluster.directives import Directive, DirectiveBook, MoveBudget
from knotctl.core.cluster.holddown import HoldDown
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.reconcile import Kind, Order
from knotctl.core.errors import FormatError
from knotctl.core.spans import LayerSpan

MODEL = a_model(10)


def carry_out(controller: Controller, directives: list[Directive], now: float) -> None:
    """Every node does at once what it is told."""
    todo = list(directives)
    while todo:
        d = todo.pop(0)
        todo += controller.answer(d.order.node_id, d.epoch, now)


def told(directives: list[Directive]) -> list[str]:
    return [f"{d.order.kind.name} {d.order.node_id} {d.order.span}" for d in directives]


def a_cluster(policy: Policy = PLAIN, **gigabytes: float) -> Controller:
    controller = Controller(MODEL, policy)
    for node_id, size in gigabytes.items():
        carry_out(controller, controller.join(a_node(node_id, size), 0), 0)
    return controller


def test_a_node_that_joins_is_given_a_gap_and_covers_it_when_it_has_loaded() -> None:
    controller = Controller(MODEL, PLAIN)
    directives = controller.join(a_node("a", 6), 0)
    assert told(directives) == ["LOAD a 0:6"] and directives[0].order.closes_gap
    assert controller.books.coverage.gap_layers == 10
    carry_out(controller, directives, 1)
    assert controller.books.coverage.gap_layers == 4


def test_a_gap_is_closed_when_a_node_leaves_and_its_layers_are_wanted() -> None:
    controller = a_cluster(a=10, spare=10)
    assert controller.books.coverage.least(LayerSpan(0, 10)) == 2
    assert controller.leave("a", 100) == []
    assert controller.books.coverage.covered
    controller.leave("spare", 200)
    assert told(controller.join(a_node("new", 10), 300)) == ["LOAD new 0:10"]


def test_a_needless_copy_lets_go_and_then_closes_the_gap() -> None:
    controller = a_cluster(a=5, b=5, copy=5)
    span = controller.placement.places["copy"].span
    other = next(i for i in "ab" if controller.placement.places[i].span != span)
    drops = controller.leave(other, 100)
    assert [d.order.kind for d in drops] == [Kind.DROP]
    loads = controller.answer(drops[0].order.node_id, drops[0].epoch, 101)
    assert [d.order.kind for d in loads] == [Kind.LOAD]
    carry_out(controller, loads, 102)
    assert controller.books.coverage.covered


def test_an_order_that_is_not_done_in_time_makes_its_gap_critical_until_another_closes_it() -> None:
    controller = Controller(MODEL, replace(PLAIN, directive_timeout_s=60))
    (late,) = controller.join(a_node("mute", 10), 0)
    assert controller.tick(30) == [] and not controller.critical
    assert told(controller.tick(late.deadline)) == ["LOAD mute 0:10"], "nobody else is here"
    assert controller.critical == {LayerSpan(0, 10)}
    assert controller.answer("mute", late.epoch, 99) == [], "this answer comes too late"
    assert controller.books.coverage.gap_layers == 10
    carry_out(controller, controller.join(a_node("good", 10), 100), 100)
    assert controller.books.coverage.covered and not controller.critical


def test_a_node_that_failed_comes_after_those_that_never_did() -> None:
    controller = Controller(MODEL, replace(PLAIN, moves_per_minute=1))
    controller.holds.failed("mute", -1000)
    carry_out(controller, controller.join(a_node("firm", 10), 0), 0)
    # Both wait for the minute to pass; the one that never failed is first, although it fits less.
    assert controller.join(a_node("mute", 9), 1) == controller.join(a_node("good", 8), 1) == []
    assert [d.order.node_id for d in controller.tick(61)] == ["good"]


def test_what_a_node_that_failed_is_loading_is_not_relied_upon() -> None:
    controller = a_cluster(a=5, b=5, c=5)
    lone = next(i for i in "abc" if sum(p.span == controller.placement.places[i].span for p in
                                        controller.placement.places.values()) == 1)  # fmt: skip
    controller.holds.failed("mute", -1000)
    controller.join(a_node("mute", 10, 50), 100)
    assert len(controller.directives.open_for("mute")) == 1, "a copy of everything, which never comes"
    drops = controller.leave(lone, 110)
    assert [d.order.kind for d in drops] == [Kind.DROP], "a needless node makes room for the gap"
    carry_out(controller, drops, 111)
    assert controller.books.coverage.covered


def test_a_drop_is_checked_again_when_it_is_handed_out() -> None:
    controller = a_cluster(a=5, b=5, copy=5)
    span = controller.placement.places["copy"].span
    twin, other = (
        next(i for i in "ab" if (controller.placement.places[i].span == span) is same) for same in (True, False)
    )
    (drop,) = controller.leave(other, 100)
    holders = {twin, "copy"} - {drop.order.node_id}
    controller.leave(holders.pop(), 101)
    assert [d for d in controller.deliver(drop.order.node_id) if d.order.kind is Kind.DROP] == []
    assert controller.books.coverage.least(span) == 1, "it goes on serving the last copy"


def test_a_drop_that_was_handed_out_is_not_taken_back() -> None:
    controller = a_cluster(a=5, b=5, copy=5)
    span = controller.placement.places["copy"].span
    other = next(i for i in "ab" if controller.placement.places[i].span != span)
    (drop,) = controller.leave(other, 100)
    assert controller.deliver(drop.order.node_id) == [drop]
    controller.leave(next(i for i in ("a", "b", "copy") if i not in (other, drop.order.node_id)), 101)
    assert drop in controller.deliver(drop.order.node_id)


def test_a_flapping_node_waits_twice_as_long_each_time() -> None:
    holds = HoldDown(Policy(hold_down_s=30, hold_down_most_s=200, stable_s=600))
    waits = []
    for n in range(5):
        holds.left("a", 1000.0 * n, 5, served=True)
        waits.append(holds.until("a") - 1000.0 * n)
    assert waits == [30, 60, 120, 200, 200]
    holds.left("a", 9000, 700, served=False)
    assert holds.level("a") == 5, "it was here long, and did nothing"
    holds.left("a", 9000, 700, served=True)
    assert holds.until("a") == holds.level("a") == 0


def test_a_node_in_hold_down_gets_no_copies_until_it_is_let_go() -> None:
    controller = a_cluster(a=10)
    controller.join(a_node("flap", 10), 10)
    controller.leave("flap", 15)
    assert controller.join(a_node("flap", 10), 20) == []
    assert controller.tick(44) == []
    assert told(controller.tick(46)) == ["LOAD flap 0:10"]


def test_a_node_in_hold_down_closes_a_gap_where_nobody_else_can() -> None:
    controller = Controller(MODEL, PLAIN)
    controller.join(a_node("flap", 10), 0)
    controller.leave("flap", 5)
    assert told(controller.join(a_node("flap", 10), 10)) == ["LOAD flap 0:10"]


def test_a_restart_while_loading_counts_as_leaving_though_nothing_was_held_yet() -> None:
    controller = a_cluster(a=10)
    for now in (10, 20, 30):
        controller.join(a_node("flap", 10), now)
    assert controller.holds.level("flap") == 1, "and in hold-down it is not told to load again"


def test_a_restart_that_nobody_missed_counts_as_leaving() -> None:
    controller = a_cluster(a=10)
    carry_out(controller, controller.join(a_node("a", 10), 3), 3)
    assert controller.holds.level("a") == 1
    controller.join(a_node("a", 10), 5, [LayerSpan(0, 10)])
    assert controller.holds.level("a") == 1, "it came back with what it had: only the connection was lost"
    assert controller.books.coverage.covered


def test_nodes_that_wait_for_each_other_are_unlocked_where_nothing_is_served_anyway() -> None:
    model, nodes = a_deadlock()
    controller = Controller(model, PLAIN)
    for node in nodes:
        held = [h.span for h in node.current]
        carry_out(controller, controller.join(replace(node, current=()), 0, held), 0)
    assert not controller.books.coverage.covered
    (forced,) = controller.tick(30)
    assert forced.order.forced and forced.order.kind is Kind.DROP
    assert controller.deliver(forced.order.node_id) == [forced], "it is not withdrawn"
    carry_out(controller, [forced], 31)
    for now in (60, 90):
        carry_out(controller, controller.tick(now), now)
    assert controller.books.coverage.covered


def test_loads_are_bounded_and_gaps_go_first() -> None:
    policy = replace(PLAIN, moves_per_minute=4)
    controller = a_cluster(policy, a=10)
    given = [d for i in range(9) for d in controller.join(a_node(f"n{i}", 10), 61)]
    assert len(given) == 2, "half of the loads of a minute, as every layer is covered"
    gap = [d for node_id in ("a", "n0", "n1") for d in controller.leave(node_id, 62)]
    assert [d.order.closes_gap for d in gap] == [True], "the other half is kept for gaps"
    assert controller.tick(63) == []
    assert len(controller.tick(121)) == 1, "one of the first two is older than a minute"


def test_the_budget_counts_the_last_minute() -> None:
    budget = MoveBudget(Policy(moves_per_minute=4))
    load = Order(Kind.LOAD, "a", LayerSpan(0, 1), "nf4", "")
    assert [budget.take(load, t) for t in (0, 1, 2, 59, 60, 61)] == [True, True, False, False, True, True]
    assert budget.take(replace(load, closes_gap=True), 61)
    assert budget.take(replace(load, kind=Kind.DROP), 61), "letting go costs nobody anything"


def test_a_measured_speed_replaces_a_claim_and_flags_a_lie() -> None:
    controller = a_cluster(a=10, b=10)
    before = controller.placement.coverage.rates[0]
    controller.measured("a", 0.2, 100)
    assert controller.members["a"].flagged and not controller.members["b"].flagged
    assert controller.placement.coverage.rates[0] < 0.6 * before
    controller.measured("a", 9.5, 200)
    assert not controller.members["a"].flagged


def test_a_faster_node_takes_over_without_a_gap() -> None:
    controller = a_cluster(slow=10)
    fast = a_node("fast", 10, 100)
    carry_out(controller, controller.join(fast, 100), 100)
    carry_out(controller, controller.tick(700), 700)
    assert controller.books.coverage.covered


def test_epochs_rise_and_an_answer_to_another_epoch_is_none() -> None:
    book = DirectiveBook()
    order = Order(Kind.LOAD, "a", LayerSpan(0, 1), "nf4", "")
    first, second = book.issue(order, 10), book.issue(order, 5)
    assert first.epoch < second.epoch
    assert book.open_for("a") == [first, second]
    assert book.answer("b", first.epoch) is None and book.answer("a", 99) is None
    assert book.expired(5) == [second] and book.expired(5) == []
    assert book.answer("a", second.epoch) is None
    assert book.answer("a", first.epoch) == first
    book.issue(order, 10)
    book.forget("a")
    assert book.expired(99) == [] and book.open_for("a") == []


@pytest.mark.parametrize(
    "document", [{"hop_ms": -1}, {"hop_ms": "5"}, {"spare": "none"}, {"moves_per_minute": 1.5}, {"hopms": 5}, 7]
)
def test_a_broken_policy_is_refused(document: object) -> None:
    with pytest.raises(FormatError) as e:
        Policy().changed(document, "p")
    assert e.value.code == "bad-policy"
