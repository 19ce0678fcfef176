"""The coverage map: counts, gaps and runs, and what is left when a node goes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.cluster.coverage import CoverageMap, subtract, union
from knotctl.core.spans import LayerSpan

N = 12
spans = st.tuples(st.integers(0, N), st.integers(0, N)).map(lambda ab: LayerSpan(min(ab), max(ab)))


def layers(found: list[LayerSpan]) -> set[int]:
    return {k for s in found for k in range(s.start, s.end)}


@given(st.lists(st.tuples(spans, st.integers(0, 10**30))))
def test_counts_and_rates_are_those_of_the_nodes_and_leave_no_trace(nodes: list[tuple[LayerSpan, int]]) -> None:
    coverage = CoverageMap(N)
    for span, rate in nodes:
        coverage.add(span, rate)
    for k in range(N):
        assert coverage.counts[k] == sum(k in s for s, _ in nodes)
        assert coverage.rates[k] == sum(r for s, r in nodes if k in s)
    assert layers(coverage.gaps()) == {k for k in range(N) if not coverage.counts[k]}
    assert coverage.gap_layers == len(layers(coverage.gaps())) and coverage.covered is (coverage.gap_layers == 0)
    rows = coverage.to_json()
    assert [r["start_layer"] for r in rows[1:]] == [r["end_layer"] for r in rows[:-1]]
    assert (rows[0]["start_layer"], rows[-1]["end_layer"]) == (0, N)
    assert all(a["node_count"] != b["node_count"] for a, b in pairwise(rows)), "runs are maximal"
    other = coverage.copy()
    for span, rate in nodes:
        coverage.remove(span, rate)
    assert coverage.counts == coverage.rates == [0] * N and coverage.gap_layers == N
    assert sum(other.counts) == sum(len(s) for s, _ in nodes), "a copy has its own numbers"


@given(st.lists(spans, max_size=5), spans)
def test_what_a_node_takes_with_it_and_what_stays(others: list[LayerSpan], own: LayerSpan) -> None:
    coverage = CoverageMap(N)
    for span in [*others, own]:
        coverage.add(span)
    lost, kept = layers(coverage.lost_without(own)), layers(coverage.kept_without(own))
    assert lost | kept == layers([own]) and not lost & kept
    coverage.remove(own)
    assert lost == {k for k in layers([own]) if not coverage.counts[k]}


@given(st.lists(spans, max_size=5), st.lists(spans, max_size=5))
def test_spans_are_added_and_taken_away_as_sets_of_layers(some: list[LayerSpan], taken: list[LayerSpan]) -> None:
    joined = union(some)
    assert layers(joined) == layers(some)
    assert all(a.end < b.start for a, b in pairwise(joined))
    assert layers(subtract(joined, taken)) == layers(some) - layers(taken)
