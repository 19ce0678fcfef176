"""Routes pass every layer once, as quickly as they can, and never where they must not."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.cluster.coverage import CoverageMap
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.presets import preset_of
from knotctl.core.cluster.routes import Route, Server, choose_route, edges_of
from knotctl.core.spans import LayerSpan


def model(n: int) -> ModelLayers:
    document = {
        "model": "m", "n_layers": n, "bytes_per_layer": {"int8": 100}, "embedding_bytes": 0, "head_bytes": 0,
    }  # fmt: skip
    return preset_of(document, "m")


def server(name: str, start: int, end: int, step: int = 10, load: int = 0) -> Server:
    return Server(name, f"http://{name}:1", "boot", (LayerSpan(start, end),), step, load)


def shown(route: Route | None) -> list[tuple[str, int, int]]:
    assert route is not None
    return [(s.node_id, s.span.start, s.span.end) for s in route]


def test_overlapping_runs_are_cut_where_it_is_quickest() -> None:
    servers = [server("a", 0, 4, step=10), server("b", 2, 6, step=20)]
    assert shown(choose_route(servers, model(6), hop=1)) == [("a", 0, 4), ("b", 4, 6)]
    servers = [server("a", 0, 4, step=20), server("b", 2, 6, step=10)]
    assert shown(choose_route(servers, model(6), hop=1)) == [("a", 0, 2), ("b", 2, 6)]


def test_a_hop_is_made_where_it_saves_more_than_it_costs() -> None:
    servers = [server("slow", 0, 4, step=20), server("quick", 2, 4, step=10)]
    assert shown(choose_route(servers, model(4), hop=1)) == [("slow", 0, 2), ("quick", 2, 4)]
    assert shown(choose_route(servers, model(4), hop=10**6)) == [("slow", 0, 4)]


def test_streams_that_a_node_has_send_the_next_one_elsewhere() -> None:
    servers = [server("a", 0, 4, load=3), server("b", 0, 4)]
    assert shown(choose_route(servers, model(4), hop=1)) == [("b", 0, 4)]


def test_what_is_avoided_or_broken_is_not_passed() -> None:
    servers = [server("a", 0, 2), server("b", 2, 4), server("c", 2, 4, step=30)]
    assert shown(choose_route(servers, model(4), 1, avoid={"b"})) == [("a", 0, 2), ("c", 2, 4)]
    assert shown(choose_route(servers, model(4), 10**4, broken={("a", "b")})) == [("a", 0, 2), ("c", 2, 4)]
    assert choose_route(servers, model(4), 1, avoid={"a"}) is None
    assert choose_route(servers, model(4), 1, head="b") is None


def test_a_route_begins_at_the_head_that_is_asked_for() -> None:
    servers = [server("a", 0, 4), server("b", 0, 1, step=50)]
    assert shown(choose_route(servers, model(4), 1, head="b")) == [("b", 0, 1), ("a", 1, 4)]


SERVERS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=6
)


@given(SERVERS, st.integers(0, 2000), st.data())
def test_routes_are_whole_and_no_chain_of_nodes_is_quicker(
    given_servers: list[tuple[int, int, int, int]], hop: int, data: st.DataObject
) -> None:
    n = 6
    servers = [
        server(f"n{i}", a, min(n, a + length), step, load) for i, (a, length, step, load) in enumerate(given_servers)
    ]
    ids = [s.node_id for s in servers]
    broken = set(data.draw(st.lists(st.sampled_from(list(itertools.product(ids, ids))), max_size=4)))
    route = choose_route(servers, model(n), hop, broken=broken)
    best = min(every_cost(servers, hop, broken, n), default=None)
    if route is None:
        # A greedy choice of whom to come from may miss a way around broken edges, never where there are none.
        covered = CoverageMap(n)
        for s in servers:
            covered.add(s.spans[0])
        assert broken or not covered.covered
        return
    assert best is not None
    edges = [0, *(s.span.end for s in route)]
    assert [s.span.start for s in route] == edges[:-1]
    assert edges[-1] == n
    assert len({s.node_id for s in route}) == len(route)
    assert not broken & set(edges_of(route))
    by_id = {s.node_id: s for s in servers}
    mine = sum(cost(by_id[s.node_id], len(s.span)) for s in route) + hop * (len(route) - 1)
    assert broken or mine <= best * (1 + 1e-9)


def cost(s: Server, layers: int) -> float:
    return s.step * (1 + 0.25 * s.load) * 100 * layers


def every_cost(servers: list[Server], hop: int, broken: set[tuple[str, str]], n: int) -> list[float]:
    """What every possible route costs, found by trying all of them."""
    found: list[float] = []

    def go(at: int, used: tuple[str, ...], total: float) -> None:
        if at == n:
            found.append(total)
            return
        for s in servers:
            (span,) = s.spans
            if s.node_id in used or not span.start <= at < span.end or (used and (used[-1], s.node_id) in broken):
                continue
            for end in range(at + 1, span.end + 1):
                go(end, (*used, s.node_id), total + cost(s, end - at) + (hop if used else 0))

    go(0, (), 0.0)
    return found
