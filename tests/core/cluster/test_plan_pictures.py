"""The plan for people: the picture in the terminal, the picture for the wall, and the words beside them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from cluster_samples import FIXTURES, GB, PLAIN, a_model, a_node

from knotctl.core.cluster.document import document_of
from knotctl.core.cluster.explain import warnings_of
from knotctl.core.cluster.nodes import parse_nodes
from knotctl.core.cluster.picture import PLAIN as ASCII
from knotctl.core.cluster.picture import picture, ticks
from knotctl.core.cluster.planner import Plan, make_plan
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.presets import parse_preset
from knotctl.core.cluster.svg import svg_of

SVG = "{http://www.w3.org/2000/svg}"


def of_the_fixtures(nodes: str, policy: Policy) -> Plan:
    model = parse_preset((FIXTURES / "llama-700b.json").read_bytes())
    return make_plan(model, parse_nodes((FIXTURES / nodes).read_bytes(), model), policy)


def texts(plan: Plan) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(svg_of(plan)).iter(f"{SVG}text")]


def test_the_terminal_shows_who_has_which_layers() -> None:
    plan = make_plan(a_model(8), [a_node("ab", 6, 20), a_node("c", 3, 10)], PLAIN)
    assert picture(plan, blocks=ASCII, width=16) == [
        "        0 1 2 3 4 5 6 7 8",
        "ab      ############....  0:6",
        "c       ............####  6:8",
        "copies  1111111111111111",
    ]


def test_a_gap_and_copies_are_seen() -> None:
    lines = picture(make_plan(a_model(8), [a_node("a", 5)], PLAIN), blocks=ASCII, width=8)
    assert lines[-1] == "copies  11111!!!"
    lines = picture(make_plan(a_model(8), [a_node("a", 8, 20), a_node("b", 8)], PLAIN), blocks=ASCII, width=8)
    assert lines[1:] == ["a       ########  0:8", "b       ========  0:8", "copies  22222222"]


def test_a_hundred_layers_share_columns_and_no_gap_hides() -> None:
    nodes = [a_node("a", 50, held="0:50"), a_node("b", 49, held="51:100")]
    lines = picture(make_plan(a_model(100), nodes, PLAIN), width=20)
    assert lines[-1].count("✗") == 1


@pytest.mark.parametrize("n", [1, 2, 7, 28, 80, 126, 1000, 9999])
def test_an_axis_names_its_ends_and_few_between(n: int) -> None:
    marks = list(ticks(n))
    assert marks[0] == 0 and marks[-1] == n and len(marks) <= 10
    assert marks == sorted(set(marks))


def test_the_wall_picture_is_one_file_that_needs_nothing_else() -> None:
    svg = svg_of(of_the_fixtures("six-nodes.json", Policy()))
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert "prefers-color-scheme: dark" in svg
    assert not re.search(r"(href|src|@import|url\((?!#))", svg)
    assert "<script" not in svg
    width, height = (float(root.attrib[k]) for k in ("width", "height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib.get(k, 0)) for k in ("x", "y", "width", "height"))
        assert w > 0 and h > 0 and x + w <= width and y + h <= height
    for t in root.iter(f"{SVG}text"):
        assert 0 <= float(t.attrib["x"]) <= width and 0 <= float(t.attrib["y"]) <= height


def test_the_wall_picture_names_nodes_spans_gaps_and_warnings() -> None:
    plan = of_the_fixtures("six-nodes.json", Policy())
    shown = texts(plan)
    for node_id, place in plan.placement.places.items():
        assert node_id in shown
        assert any(t.startswith(str(place.span)) for t in shown)
    short = of_the_fixtures("three-nodes.json", Policy(kv_bytes=8 * GB))
    shown = texts(short)
    assert any(t.startswith("gap 7") for t in shown) and any(t.startswith("gaps: ") for t in shown)


def test_names_from_outside_are_escaped_in_the_picture() -> None:
    model = a_model(4, model="<b>&m")
    plan = make_plan(model, [a_node("a", 9)], PLAIN)
    assert texts(plan)[0] == "<b>&m"


@pytest.mark.parametrize("count", [0, 1, 36, 37, 500])
def test_any_number_of_nodes_gives_a_picture(count: int) -> None:
    plan = make_plan(a_model(20), [a_node(f"n{i:03}", 7, 1 + i) for i in range(count)], PLAIN)
    shown = texts(plan)
    assert any("copies" in t and t[0].isdigit() for t in shown) is (count > 36)
    assert svg_of(plan) == svg_of(plan)


def codes(plan: Plan) -> set[str]:
    return {w.code for w in warnings_of(plan)}


def test_one_node_is_faster_than_all_and_the_plan_says_so() -> None:
    nodes = [a_node("big", 20, 20), *(a_node(f"n{i}", 5, 10) for i in range(4))]
    plan = make_plan(a_model(20), nodes, Policy(kv_headroom=0, hop_ms=20))
    assert plan.route is not None and [c.node_id for c, _ in plan.route] == ["big"]
    message = next(w.message for w in warnings_of(plan) if w.code == "one-node-is-faster")
    # 50 ms alone; a fifth of the layers each: 10 + 4 x 20 ms, and five hops of 20 ms.
    assert "big alone takes 50 ms a token" in message and "190 ms" in message


def test_one_node_would_be_faster_with_less_headroom() -> None:
    plan = make_plan(a_model(20), [a_node("big", 22, 20), a_node("b", 20, 10)], Policy(hop_ms=20))
    message = next(w.message for w in warnings_of(plan) if w.code == "one-node-is-faster")
    assert "--kv-headroom is at most 0.09" in message
    assert make_plan(a_model(20), [a_node("big", 22, 20)], Policy(kv_headroom=0.09)).covered


def test_hops_that_take_more_than_the_work_are_named() -> None:
    nodes = [a_node(f"n{i}", 5, 100) for i in range(4)]
    assert "hops-dominate" in codes(make_plan(a_model(20), nodes, Policy(kv_headroom=0, hop_ms=50)))
    assert "hops-dominate" not in codes(make_plan(a_model(20), nodes, Policy(kv_headroom=0, hop_ms=1)))


def test_what_is_lost_if_a_node_leaves() -> None:
    model = a_model(10)
    rows = document_of(make_plan(model, [a_node("a", 10, 20), a_node("b", 10)], PLAIN))["assignments"]
    assert {r["if_it_leaves"] for r in rows} == {"no layer is lost: each has 1 more copy"}
    rows = document_of(make_plan(model, [a_node("a", 7, 20), a_node("b", 7)], PLAIN))["assignments"]
    lost = {r["node_id"]: r["if_it_leaves"] for r in rows}
    assert lost["a"].startswith("layers 0:7 are served by nobody, and the others have no room for 3 layers")
    three = make_plan(
        model, [a_node("a", 7, 20), a_node("b", 7), a_node("c", 3, 1)], Policy(kv_headroom=0, link_mbit=8000)
    )
    lost = {r["node_id"]: r["if_it_leaves"] for r in document_of(three)["assignments"]}
    assert re.search(
        r"layers .* are served by nobody for about \d+ s, until the others have loaded them; then", lost["b"]
    )


def test_quantisations_that_mix_on_a_layer_are_named() -> None:
    model = a_model(4, bytes_per_layer={"nf4": GB, "int8": 2 * GB})
    nodes = [a_node("a", 4, 20), a_node("b", 8, quantizations=("int8",))]
    assert "mixed-quantization" in codes(make_plan(model, nodes, PLAIN))
    assert "mixed-quantization" not in codes(make_plan(model, nodes[:1], PLAIN))


def test_a_benchmark_that_states_no_size_and_a_short_context_are_named() -> None:
    model = a_model(4, kv_bytes_per_token=10**6)
    plan = make_plan(model, [a_node("a", 5.1, benchmark_model="mystery")], Policy(kv_bytes=GB))
    assert {"unknown-benchmark", "short-context"} <= codes(plan)
    assert document_of(plan)["predicted"]["context_tokens"] == 250


def test_predicted_times_are_those_of_the_route() -> None:
    nodes = [a_node("a", 5, 10), a_node("b", 5, 10)]
    policy = Policy(kv_headroom=0, hop_ms=10, link_mbit=1e6, prompt_tokens=1024, prefill_speedup=10)
    p = document_of(make_plan(a_model(10), nodes, policy))["predicted"]
    assert p["token_ms"] == pytest.approx(100 + 2 * 10, rel=1e-4)
    # Two chunks of 512 through two stages of 5 ms a token, less a tenth each; the second chunk a stage behind.
    stage = 512 * 50 / 10
    assert p["ttft_ms"] == pytest.approx(2 * (stage + 10) + (stage + 10), rel=1e-4)
    assert p["pipeline_tokens_per_s"] == pytest.approx(20, rel=1e-4)
    assert p["best_is_exact"] and p["distance"] == 0
