"""What a plan promises: coverage whenever it is possible, never over memory, few moves, and no gap on the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cluster_samples import FIXTURES, GB, PLAIN, Replay, a_deadlock, a_model, a_node, clusters, least_time, spans
from hypothesis import given, settings

from knotctl.core.cluster.capacity import capacities_of
from knotctl.core.cluster.document import document_of
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.nodes import Held, Node, parse_nodes
from knotctl.core.cluster.planner import Plan, make_plan
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.presets import parse_preset
from knotctl.core.cluster.reconcile import Kind
from knotctl.core.spans import LayerSpan

# The decision record's reserve: 8 GB of every node for keys and values.
RECORD = Policy(kv_bytes=8 * GB)


def of_the_record(layer_gigabytes: float, *, speeds: tuple[float, float, float] = (10, 20, 10)) -> Plan:
    """The record's three nodes of 128, 80 and 80 GB, and a model of 100 layers of so much each."""
    model = a_model(100, round(layer_gigabytes * GB), parameters=700 * GB, hidden_size=16384)
    nodes = [a_node(i, size, speed) for i, size, speed in zip("abc", (128, 80, 80), speeds, strict=True)]
    return make_plan(model, nodes, RECORD)


class TestTheRecordsExample:
    """Seed 001: 700B at nf4 is about 350 GB, on nodes of 128, 80 and 80 GB."""

    def test_350_gb_do_not_fit_288_and_the_plan_says_so(self) -> None:
        plan = of_the_record(3.5)
        # 120 and 72 GB beside the reserve: 34, 20 and 20 layers of 3.5 GB, in the record's order.
        assert spans(plan) == {"a": "0:34", "b": "34:54", "c": "54:74"}
        assert not plan.covered
        document = document_of(plan)
        assert document["gaps"] == [[74, 100]]
        message = next(w["message"] for w in document["warnings"] if w["code"] == "gaps")
        assert "80.1 GiB more are needed" in message  # 350 - 264 GB

    def test_a_fills_then_b_and_c_takes_the_remainder(self) -> None:
        plan = of_the_record(2.4, speeds=(10, 10, 10))
        assert spans(plan) == {"a": "0:50", "b": "50:80", "c": "80:100"}
        assert plan.covered

    def test_b_twice_as_fast_as_c_carries_more_layers_than_c(self) -> None:
        plan = of_the_record(2.4, speeds=(10, 20, 10))
        b, c = (plan.placement.places[i].span for i in "bc")
        assert len(b) > len(c)

    def test_c_twice_as_fast_as_b_turns_the_boundary_round(self) -> None:
        plan = of_the_record(2.4, speeds=(10, 10, 20))
        b, c = (plan.placement.places[i].span for i in "bc")
        assert len(c) > len(b)

    def test_a_node_that_turns_out_fast_gets_layers_of_its_neighbour(self) -> None:
        model = a_model(100, round(2.4 * GB), parameters=700 * GB)
        held = {"a": "0:50", "b": "50:75", "c": "75:100"}
        nodes = [a_node(i, size, 10, held[i]) for i, size in zip("abc", (128, 80, 80), strict=True)]
        assert not make_plan(model, nodes, RECORD).rounds
        nodes[1] = replace(nodes[1], tokens_per_s=40.0)
        plan = make_plan(model, nodes, replace(RECORD, hysteresis=0.02))
        assert spans(plan) == {"a": "0:50", "b": "50:80", "c": "80:100"}
        orders = [(o.kind, o.node_id, str(o.span)) for step in plan.rounds for o in step]
        # First the fast one has them, then the slow one lets go.
        assert orders == [(Kind.LOAD, "b", "75:80"), (Kind.DROP, "c", "75:80")]

    def test_the_fixtures_plan_covers_with_six_nodes_by_the_default_headroom(self) -> None:
        model = parse_preset((FIXTURES / "llama-700b.json").read_bytes())
        nodes = parse_nodes((FIXTURES / "six-nodes.json").read_bytes(), model)
        plan = make_plan(model, nodes, Policy())
        assert plan.covered
        assert plan.times is not None and plan.best_token == plan.times.token and plan.proved


class TestEachRule:
    def test_largest_fit_first_closes_a_gap(self) -> None:
        nodes = [a_node("old", 6, 10, "0:6"), a_node("small", 3, 10), a_node("large", 5, 1)]
        plan = make_plan(a_model(10), nodes, replace(PLAIN, hysteresis=10))
        assert spans(plan)["large"] == "5:10", "its memory is filled"
        first = plan.rounds[0][0]
        assert (first.node_id, str(first.span), first.closes_gap) == ("large", "6:10", True)

    def test_of_idle_nodes_that_fit_a_gap_whole_the_fastest_gets_it(self) -> None:
        nodes = [a_node("old", 6, 10, "0:6"), a_node("large", 9, 1), a_node("fast", 4, 50)]
        plan = make_plan(a_model(10), nodes, PLAIN)
        assert plan.rounds[0][0].node_id == "fast"

    def test_a_neighbour_with_room_closes_a_gap_where_nobody_is_idle(self) -> None:
        plan = make_plan(a_model(10), [a_node("a", 7, 10, "0:5"), a_node("b", 5, 10, "7:10")], PLAIN)
        assert plan.covered
        assert [(o.kind, o.node_id, str(o.span)) for step in plan.rounds for o in step] == [(Kind.LOAD, "a", "5:7")]

    def test_a_needless_copy_closes_a_gap_where_nobody_has_room(self) -> None:
        nodes = [a_node("a", 5, 10, "0:5"), a_node("b", 5, 10, "0:5")]
        plan = make_plan(a_model(10), nodes, PLAIN)
        assert sorted(spans(plan).values()) == ["0:5", "5:10"]
        assert [[o.kind for o in step] for step in plan.rounds] == [[Kind.DROP], [Kind.LOAD]]

    def test_the_fastest_nodes_are_filled_and_the_slowest_takes_the_rest(self) -> None:
        nodes = [a_node("slow", 10, 5), a_node("fast", 4, 40), a_node("middle", 4, 20)]
        plan = make_plan(a_model(10), nodes, PLAIN)
        assert {i: len(p.span) for i, p in plan.placement.places.items()} == {"fast": 4, "middle": 4, "slow": 2}

    def test_a_node_that_costs_more_in_hops_than_it_saves_is_no_stage(self) -> None:
        nodes = [a_node("big", 10, 10), a_node("tiny", 1, 1000)]
        alone = make_plan(a_model(10), nodes, replace(PLAIN, hop_ms=50.0))
        assert alone.route is not None and [c.node_id for c, _ in alone.route] == ["big"]
        both = make_plan(a_model(10), nodes, replace(PLAIN, hop_ms=1.0))
        assert both.route is not None and len(both.route) == 2

    def test_copies_come_only_after_coverage(self) -> None:
        nodes = [a_node("a", 4, 10), a_node("b", 4, 10), a_node("c", 1, 10)]
        short = make_plan(a_model(10), nodes, PLAIN)
        assert not short.covered and max(short.placement.coverage.counts) == 1
        enough = make_plan(a_model(8), nodes, PLAIN)
        assert enough.covered and max(enough.placement.coverage.counts) == 2

    def test_copies_go_where_a_token_takes_longest(self) -> None:
        nodes = [a_node("fast", 5, 50, "0:5"), a_node("slow", 5, 1, "5:10"), a_node("spare", 5, 10)]
        assert spans(make_plan(a_model(10), nodes, replace(PLAIN, hysteresis=10)))["spare"] == "5:10"

    def test_copies_go_where_they_are_fewest_where_the_policy_says_so(self) -> None:
        nodes = [a_node(i, 5, 1, "5:10") for i in ("s1", "s2")] + [a_node("fast", 5, 50, "0:5"), a_node("spare", 5, 10)]
        policy = replace(PLAIN, hysteresis=10)
        assert spans(make_plan(a_model(10), nodes, policy))["spare"] == "5:10"
        assert spans(make_plan(a_model(10), nodes, replace(policy, spare="copies")))["spare"] == "0:5"

    def test_199_copies_of_99_percent_are_levelled_to_the_last_percent(self) -> None:
        nodes = [a_node(f"n{i:03}", 99, 10, "0:99") for i in range(199)]
        plan = make_plan(a_model(100), nodes, PLAIN)
        assert plan.covered, "one of 199 needless copies takes the layer that nobody has"
        after = make_plan(a_model(100), Replay(plan).nodes_after(), PLAIN)
        assert min(after.placement.coverage.counts) > 20, "and others follow, so that no layer hangs on one node"

    def test_headroom_is_a_fifth_unless_said_otherwise(self) -> None:
        model = a_model(10)
        assert not make_plan(model, [a_node("a", 12, 10)], Policy()).covered
        assert make_plan(model, [a_node("a", 12.5, 10)], Policy()).covered
        assert make_plan(model, [a_node("a", 12, 10)], Policy(kv_headroom=0.1)).covered
        assert make_plan(model, [a_node("a", 12, 10)], Policy(kv_bytes=2 * GB)).covered

    def test_activations_embedding_and_head_take_their_room(self) -> None:
        for more in ({"activation_bytes": GB}, {"embedding_bytes": GB}, {"head_bytes": GB}):
            model = a_model(10, **more)
            assert not make_plan(model, [a_node("a", 10, 10)], PLAIN).covered
            assert make_plan(model, [a_node("a", 11, 10)], PLAIN).covered

    def test_the_embedding_counts_on_the_head_and_the_output_on_the_tail_alone(self) -> None:
        model = a_model(10, embedding_bytes=2 * GB, head_bytes=3 * GB)
        plan = make_plan(model, [a_node("a", 5, 10), a_node("b", 4, 10), a_node("c", 6, 10)], PLAIN)
        assert plan.covered
        for row in document_of(plan)["assignments"]:
            tables = 2 * row["is_head"] + 3 * row["is_tail"]
            assert row["weight_bytes"] // GB == row["end_layer"] - row["start_layer"] + tables

    def test_each_node_is_reckoned_at_a_quantisation_it_declares(self) -> None:
        model = a_model(10, bytes_per_layer={"nf4": GB, "int8": 2 * GB})
        nodes = [a_node("four", 5, 10), a_node("eight", 10, 10, quantizations=("int8",))]
        plan = make_plan(model, nodes, PLAIN)
        assert plan.covered
        assert {i: p.capacity.quantization for i, p in plan.placement.places.items()} == {
            "four": "nf4",
            "eight": "int8",
        }

    def test_the_finest_quantisation_that_fits_where_it_is_asked_for(self) -> None:
        model = a_model(10, bytes_per_layer={"nf4": GB, "int8": 2 * GB})
        nodes = [a_node("a", 25, 10, quantizations=("nf4", "int8"))]
        for precision, expected in (("smallest", "nf4"), ("finest", "int8")):
            plan = make_plan(model, nodes, replace(PLAIN, precision=precision))
            assert plan.placement.places["a"].capacity.quantization == expected
        tight = make_plan(
            model, [a_node("a", 15, 10, quantizations=("nf4", "int8"))], replace(PLAIN, precision="finest")
        )
        assert tight.placement.places["a"].capacity.quantization == "nf4"

    def test_a_smaller_quantisation_where_the_model_is_not_covered_at_the_one_that_is_held(self) -> None:
        model = a_model(16, bytes_per_layer={"nf4": GB, "int8": 2 * GB})
        node = a_node("a", 20, 10, quantizations=("nf4", "int8"))
        node = replace(node, current=(Held(LayerSpan(0, 8), "int8"),))
        plan = make_plan(model, [node], PLAIN)
        assert plan.covered and plan.placement.places["a"].capacity.quantization == "nf4"
        orders = [(o.kind, str(o.span), o.quantization, o.forced) for step in plan.rounds for o in step]
        assert orders == [(Kind.DROP, "0:8", "int8", True), (Kind.LOAD, "0:16", "nf4", False)]
        helped = make_plan(model, [node, a_node("b", 8, 10)], PLAIN)
        assert helped.covered and helped.placement.places["a"].capacity.quantization == "int8"

    def test_what_nodes_hold_is_kept_where_moving_saves_little(self) -> None:
        nodes = [a_node("a", 8, 10, "0:5"), a_node("b", 8, 10.5, "5:10")]
        plan = make_plan(a_model(10), nodes, PLAIN)
        assert not plan.rounds
        assert "held-back" in {w["code"] for w in document_of(plan)["warnings"]}

    def test_moves_are_made_where_they_save_more_than_the_hysteresis(self) -> None:
        nodes = [a_node("a", 8, 10, "0:5"), a_node("b", 8, 40, "5:10")]
        assert spans(make_plan(a_model(10), nodes, PLAIN)) == {"a": "0:2", "b": "2:10"}
        assert not make_plan(a_model(10), nodes, replace(PLAIN, hysteresis=10)).rounds

    def test_a_saving_below_the_hysteresis_is_not_worth_a_single_layer(self) -> None:
        # One layer on the faster node would save 4.8 % of a token's time.
        nodes = [a_node("a", 1, 10, "0:1"), a_node("b", 10, 15, "1:10")]
        assert not make_plan(a_model(10), nodes, PLAIN).rounds
        assert make_plan(a_model(10), nodes, replace(PLAIN, hysteresis=0.03)).rounds

    def test_a_faster_route_that_takes_a_gap_to_reach_is_not_taken(self) -> None:
        # The faster node should be the tail, but both are full to the last byte.
        model = a_model(10, embedding_bytes=GB, head_bytes=GB)
        plan = make_plan(model, [a_node("fast", 6, 100, "0:5"), a_node("slow", 6, 1, "5:10")], PLAIN)
        assert not plan.rounds and plan.covered and plan.completes
        assert "held-back" in {w["code"] for w in document_of(plan)["warnings"]}
        free = make_plan(model, [a_node("fast", 6, 100), a_node("slow", 6, 1)], PLAIN)
        assert spans(free) == {"fast": "5:10", "slow": "0:5"}

    def test_a_liar_is_planned_with_what_was_measured(self) -> None:
        honest = a_node("honest", 8, 10)
        liar = a_node("liar", 8, 100, measured_tokens_per_s=2.0)
        plan = make_plan(a_model(10), [honest, liar], PLAIN)
        assert len(plan.placement.places["honest"].span) == 8
        assert "slower-than-claimed" in {w["code"] for w in document_of(plan)["warnings"]}

    def test_speeds_on_different_models_are_compared_by_their_sizes(self) -> None:
        model = a_model(10, parameters=8 * GB)
        nodes = [
            a_node("on-half", 8, 50, benchmark_model="qwen-0.5B"),
            a_node("on-eight", 8, 10, benchmark_model="Llama-3-8B"),
        ]
        assert len(make_plan(model, nodes, PLAIN).placement.places["on-eight"].span) == 8

    def test_a_node_over_its_headroom_goes_on_serving_what_nobody_else_can(self) -> None:
        plan = make_plan(a_model(10), [a_node("a", 11, 10, "0:10")], Policy(kv_headroom=0.2))
        assert plan.covered and not plan.rounds
        assert "over-full" in {w["code"] for w in document_of(plan)["warnings"]}

    def test_memory_that_another_model_takes_is_left_alone(self) -> None:
        other = Held(LayerSpan(0, 4), "nf4", "other", 4 * GB)
        busy = replace(a_node("a", 10, 10), current=(other,))
        plan = make_plan(a_model(10), [busy], PLAIN)
        assert len(plan.placement.places["a"].span) == 6


def test_nodes_that_wait_for_each_other_are_unlocked_by_a_drop_that_says_it_is_forced() -> None:
    plan = make_plan(*a_deadlock(), PLAIN)
    assert plan.covered and plan.completes and spans(plan) == {"a": "1:3", "b": "0:1"}
    assert [o.forced for step in plan.rounds for o in step] == [True, False, False, False]
    assert Replay(plan).covered
    assert "forced-drop" in {w["code"] for w in document_of(plan)["warnings"]}


@settings(max_examples=150, deadline=None)
@given(clusters())
def test_covered_whenever_any_chain_covers(cluster: tuple[ModelLayers, Policy, list[Node]]) -> None:
    model, policy, nodes = cluster
    plan = make_plan(model, [n for n in nodes if not n.current][:4], policy)
    possible = least_time(plan.capacities, model, 0) is not None
    assert plan.covered is possible


@settings(max_examples=150, deadline=None)
@given(clusters())
def test_directives_open_no_gap_exceed_no_memory_and_reach_the_plan(
    cluster: tuple[ModelLayers, Policy, list[Node]],
) -> None:
    model, policy, nodes = cluster
    plan = make_plan(model, nodes, policy)
    done = Replay(plan)
    assert done.covered is plan.covered
    if plan.completes:
        held = {i: layers for i, layers in done.held.items() if layers}
        assert held == {i: set(range(p.span.start, p.span.end)) for i, p in plan.placement.places.items()}


@settings(max_examples=100, deadline=None)
@given(clusters())
def test_plans_come_to_rest_after_the_second(cluster: tuple[ModelLayers, Policy, list[Node]]) -> None:
    model, policy, nodes = cluster
    for _ in range(3):
        plan = make_plan(model, nodes, policy)
        if not plan.rounds:
            return
        nodes = Replay(plan).nodes_after()
    raise AssertionError("the third plan still moves something")


@settings(max_examples=50, deadline=None)
@given(clusters())
def test_the_same_nodes_in_any_order_give_the_same_plan(cluster: tuple[ModelLayers, Policy, list[Node]]) -> None:
    model, policy, nodes = cluster
    document = document_of(make_plan(model, nodes, policy))
    assert document == document_of(make_plan(model, nodes[::-1], policy))


def test_200_random_small_clusters_cover_where_possible_and_are_near_the_optimum() -> None:
    draw, distances = random.Random(7), []
    for _ in range(200):
        n = draw.randint(4, 12)
        layers = [draw.randint(1, 4) * GB for _ in range(n)] if draw.random() < 0.5 else draw.randint(1, 4) * GB
        model = a_model(n, layers, embedding_bytes=draw.choice([0, 2 * GB]), head_bytes=draw.choice([0, 2 * GB]))
        nodes = [a_node(f"n{i}", draw.uniform(1, 14), draw.uniform(1, 50)) for i in range(draw.randint(2, 5))]
        policy = replace(PLAIN, hop_ms=draw.choice([0.0, 2.0, 20.0]))
        plan = make_plan(model, nodes, policy)
        best = least_time(capacities_of(nodes, model, policy)[0], model, policy.hop(model.hidden_size))
        assert plan.covered is (best is not None)
        if best is not None:
            assert plan.times is not None
            distances.append(plan.times.token / best - 1)
    assert len(distances) > 60
    assert max(distances) < 1e-9, "few nodes: the best there is"


@pytest.mark.parametrize("count", [0, 1])
def test_no_node_and_one_node(count: int) -> None:
    plan = make_plan(a_model(4), [a_node("a", 9, 10)][:count], PLAIN)
    assert plan.covered is bool(count)
    assert document_of(plan)["gaps"] == ([] if count else [[0, 4]])
