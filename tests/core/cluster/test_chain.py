"""The chain of nodes: the search by rules against the exact one, the exact one against every order and boundary."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import median

from cluster_samples import GB, PLAIN, a_model, a_node, clusters, least_time
from hypothesis import given, settings

from knotctl.core.cluster.capacity import Capacity, capacities_of
from knotctl.core.cluster.chain import Terms, cheapest
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.nodes import Node
from knotctl.core.cluster.optimum import bound, optimum
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.speed import SECOND
from knotctl.core.spans import LayerSpan


@settings(max_examples=150, deadline=None)
@given(clusters(4))
def test_the_exact_search_finds_what_trying_everything_finds(cluster: tuple[ModelLayers, Policy, list[Node]]) -> None:
    model, policy, nodes = cluster
    able, _ = capacities_of(nodes, model, policy)
    hop = policy.hop(model.hidden_size)
    exact = optimum(list(able.values()), model, Terms(hop, {}))
    assert (exact.cost if exact else None) == least_time(able, model, hop)


@settings(max_examples=150, deadline=None)
@given(clusters())
def test_a_chain_is_whole_fits_and_costs_what_it_says(cluster: tuple[ModelLayers, Policy, list[Node]]) -> None:
    model, policy, nodes = cluster
    able, _ = capacities_of(nodes, model, policy)
    hop = policy.hop(model.hidden_size)
    chain = cheapest(able.values(), model, Terms(hop, {}))
    ids = [c.node_id for c, _ in chain.stages]
    assert len(set(ids)) == len(ids)
    assert all(c.fits(span.start, span.end) for c, span in chain.stages)
    starts = [span for _, span in chain.stages]
    assert starts == sorted(starts)
    assert all(a.end <= b.start for a, b in pairwise(starts))
    assert chain.gap_layers == model.n_layers - sum(map(len, starts))
    if not chain.gap_layers:
        hops = len(ids) if len(ids) > 1 else 0
        assert chain.cost == sum(c.time_of(span) for c, span in chain.stages) + hops * hop


@settings(max_examples=150, deadline=None)
@given(clusters())
def test_no_chain_beats_the_bound(cluster: tuple[ModelLayers, Policy, list[Node]]) -> None:
    model, policy, nodes = cluster
    able, _ = capacities_of(nodes, model, policy)
    hop = policy.hop(model.hidden_size)
    exact = optimum(list(able.values()), model, Terms(hop, {}))
    if exact is not None:
        least = bound(able.values(), model, hop)
        assert least is not None and least <= exact.cost


def random_capacities(draw: random.Random, count: int, model: ModelLayers, share: float) -> list[Capacity]:
    sizes = model.sizes_at("nf4")
    assert sizes is not None
    nodes = [
        a_node(f"n{i}", draw.uniform(0.3, 2) * share * sizes.total / GB, round(draw.uniform(1, 50), 1))
        for i in range(count)
    ]
    return list(capacities_of(nodes, model, PLAIN)[0].values())


def test_the_search_by_rules_is_within_a_tenth_of_the_optimum_at_the_median() -> None:
    draw, distances, missed = random.Random(1), [], 0
    for _ in range(200):
        n = draw.randint(4, 40)
        layers = draw.randint(1, 5) * GB if draw.random() < 0.5 else [draw.randint(5, 20) * GB // 10 for _ in range(n)]
        model = a_model(
            n, layers, embedding_bytes=draw.choice([0, GB, 3 * GB]), head_bytes=draw.choice([0, GB, 3 * GB])
        )
        count = draw.randint(2, 6)
        able = random_capacities(draw, count, model, draw.uniform(0.8, 3) / count)
        terms = Terms(draw.choice([0, 1, 5, 50]) * SECOND // 1000, {})
        exact, found = optimum(able, model, terms), cheapest(able, model, terms)
        if exact is None:
            assert found.gap_layers
        elif found.gap_layers:
            missed += 1
        else:
            distances.append(found.cost / exact.cost - 1)
    assert median(distances) == 0
    assert sorted(distances)[int(0.95 * len(distances))] < 0.1
    assert missed <= 0.05 * len(distances), "the planner searches exactly where rules find no cover"


def test_many_nodes_are_within_a_fifth_of_a_bound_that_nothing_beats() -> None:
    draw = random.Random(2)
    model = a_model(160, 2 * GB, embedding_bytes=GB, head_bytes=GB)
    able = random_capacities(draw, 400, model, 0.1)
    hop = 5 * SECOND // 1000
    least = bound(able, model, hop)
    assert least is not None
    assert cheapest(able, model, Terms(hop, {})).cost < 1.2 * least


def test_moving_costs_what_the_terms_say() -> None:
    model = a_model(10)
    able, _ = capacities_of([a_node("a", 5, 10), a_node("b", 5, 10)], model, PLAIN)
    held = {"a": LayerSpan(5, 10), "b": LayerSpan(0, 5)}
    kept = cheapest(able.values(), model, Terms(0, held, (1, 1)))
    assert {c.node_id: span for c, span in kept.stages} == held
    assert kept.cost == sum(c.time_of(span) for c, span in kept.stages)
    moved = cheapest(able.values(), model, Terms(0, {"a": LayerSpan(4, 8)}, (1, 1)))
    assert moved.cost - sum(c.time_of(span) for c, span in moved.stages) == (10 - 3) * GB or moved.cost > 0
