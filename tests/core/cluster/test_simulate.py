"""The simulator: the same for the same seed, and what the control loop does to a cluster over hours."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from cluster_samples import FIXTURES, GB

from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.reconcile import Kind
from knotctl.core.cluster.report import Report
from knotctl.core.cluster.scenario import Scenario, parse_scenario
from knotctl.core.cluster.simulate import DETECT_S, Simulation, document_of, simulate
from knotctl.core.errors import FormatError

SCENARIO: dict[str, Any] = {
    "name": "s", "seed": 1, "hours": 2,
    "model": {"model": "m", "n_layers": 20, "bytes_per_layer": {"nf4": GB}, "activation_bytes": 0},
    "nodes": [{"name": "n", "count": 4, "vram_bytes": 16 * GB, "quantizations": ["nf4"], "tokens_per_s": [5, 20]}],
}  # fmt: skip


def scenario(**changes: Any) -> Scenario:
    return parse_scenario(json.dumps(SCENARIO | changes).encode(), Policy())


@cache
def fixture(name: str) -> dict[str, Report]:
    found = parse_scenario((FIXTURES / name).read_bytes(), Policy())
    return dict(zip((n for n, _ in found.policies), simulate(found), strict=True))


def test_the_same_seed_gives_the_same_report_and_another_one_another() -> None:
    flapping = [SCENARIO["nodes"][0] | {"count": 12, "up_s": 900, "down_s": 300}]
    first, second = (simulate(scenario(nodes=flapping)) for _ in range(2))
    assert first == second
    assert first != simulate(scenario(nodes=flapping, seed=2))


def test_what_happens_to_nodes_does_not_depend_on_the_policy() -> None:
    flapping = [SCENARIO["nodes"][0] | {"count": 8, "up_s": 600, "down_s": 300}]
    policies = [{"name": "a"}, {"name": "b", "rebalance": "static"}]
    a, b = simulate(scenario(nodes=flapping, policies=policies))
    assert [h["nodes"] for h in a.hours] == [h["nodes"] for h in b.hours]
    assert a.uncovered_s != b.uncovered_s


def test_time_uncovered_is_split_into_its_four_causes() -> None:
    for report in fixture("scarce.json").values():
        parts = report.impossible_s + report.unnoticed_s + report.loading_s + report.neglected_s
        assert report.uncovered_s == pytest.approx(parts, abs=0.1)
        assert report.longest_outage_s <= report.uncovered_s + 0.1


def test_continuous_rebalancing_beats_assigning_once() -> None:
    reports = fixture("scarce.json")
    assert reports["default"].uncovered_s < 0.1 * reports["static"].uncovered_s
    assert reports["default"].drops_that_opened_a_gap == 0


def test_five_of_ten_leave_at_once_and_the_gaps_close_within_a_minute() -> None:
    (report,) = fixture("five-leave.json").values()
    assert report.outages == 1
    assert report.unnoticed_s == DETECT_S
    assert report.longest_outage_s < 60
    assert report.hours[-1]["least_copies"] >= 1
    assert report.hours[-1]["loads"] == 0, "an hour after they are back, nothing moves any more"


def test_hold_down_saves_most_loads_of_nodes_that_flap_and_opens_no_gap() -> None:
    reports = fixture("flapping.json")
    assert reports["default"].loads < 0.02 * reports["no hold-down"].loads
    assert all(r.uncovered_s == 0 for r in reports.values())
    # Intervals double up to an hour, so that the second hour sees none.
    assert reports["default"].hours[1]["loads"] == 0


def test_every_liar_is_found_and_nobody_who_is_only_slow_for_a_while_is_called_one_for_good() -> None:
    (report,) = fixture("liars.json").values()
    assert report.liars_found == report.liars > 0
    assert report.found_after_s is not None and report.found_after_s < 600
    assert report.uncovered_s == 0


def test_loads_a_minute_stay_within_the_policy() -> None:
    nodes = [SCENARIO["nodes"][0] | {"count": 60, "up_s": 900, "down_s": 100}]
    (report,) = simulate(scenario(nodes=nodes, policies=[{"name": "few", "moves_per_minute": 10}]))
    assert 5 <= report.most_loads_in_a_minute <= 10


def test_a_node_that_never_answers_does_not_keep_a_gap_open() -> None:
    nodes = [
        SCENARIO["nodes"][0] | {"name": "mute", "count": 1, "mute": 1, "tokens_per_s": 100, "vram_bytes": 32 * GB},
        SCENARIO["nodes"][0] | {"count": 2, "join_s": 1},
    ]
    (report,) = simulate(scenario(nodes=nodes))
    assert report.first_covered_s is not None and report.timeouts > 0


def test_a_node_that_is_back_soon_keeps_its_layers() -> None:
    nodes = [SCENARIO["nodes"][0] | {"count": 2, "keeps_s": 60, "vram_bytes": 26 * GB}]
    events = [{"at_s": 3600, "kind": "leave", "count": 2, "for_s": 5}]
    (report,) = simulate(scenario(nodes=nodes, events=events))
    assert report.uncovered_s == pytest.approx(5) and report.hours[1]["loads"] == 0


def test_the_controller_never_hands_out_a_drop_that_it_knows_to_open_a_gap() -> None:
    nodes = [SCENARIO["nodes"][0] | {"count": 9, "up_s": 1200, "down_s": 300, "vram_bytes": [8 * GB, 16 * GB]}]
    simulation = Simulation(scenario(nodes=nodes, hours=12), replace(Policy(), improve_s=60))
    books, started, drops = simulation.controller.books, simulation._start, 0

    def watched(body: Any, d: Any) -> None:
        nonlocal drops
        if d.order.kind is Kind.DROP and not d.order.forced:
            drops += 1
            assert books.coverage.least(d.order.span) >= 1
        started(body, d)

    simulation._start = watched  # type: ignore[method-assign]
    simulation.run()
    assert drops > 0


def test_a_week_of_a_thousand_nodes_that_come_and_go_by_its_first_hours() -> None:
    document = json.loads((FIXTURES / "week.json").read_text()) | {"hours": 3}
    (report,) = simulate(parse_scenario(json.dumps(document).encode(), Policy()))
    assert report.uncovered_s == 0
    assert report.most_loads_in_a_minute <= Policy().moves_per_minute
    assert report.copies[0] > 10
    assert report.balance > 0.5


def test_the_document_names_the_scenario_and_every_policy_with_its_numbers() -> None:
    found = scenario(policies=[{"name": "a", "hop_ms": 1}])
    document = document_of(found, simulate(found))
    json.dumps(document, allow_nan=False)
    assert document["nodes"] == 4 and document["policies"][0]["policy"]["hop_ms"] == 1
    assert len(document["policies"][0]["hours"]) == 2


GROUP = SCENARIO["nodes"][0]
REFUSED: dict[str, dict[str, Any]] = {
    "no hours": {"hours": 0},
    "a year": {"hours": 9000},
    "a seed that is no number": {"seed": "one"},
    "no model": {"model": None},
    "a broken model": {"model": {"model": "m"}},
    "too many nodes": {"nodes": [GROUP | {"count": 10_001}]},
    "too many nodes together": {"nodes": [GROUP | {"count": 6000}, GROUP | {"name": "o", "count": 6000}]},
    "the same group twice": {"nodes": [GROUP, GROUP]},
    "a group with a slash": {"nodes": [GROUP | {"name": "a/b"}]},
    "an unknown quantisation": {"nodes": [GROUP | {"quantizations": ["q7"]}]},
    "speeds reversed": {"nodes": [GROUP | {"tokens_per_s": [9, 1]}]},
    "no memory": {"nodes": [GROUP | {"vram_bytes": []}]},
    "a field misspelt": {"nodes": [GROUP | {"up": 5}]},
    "an unknown event": {"events": [{"at_s": 1, "kind": "explode", "count": 1}]},
    "an event for nobody": {"events": [{"at_s": 1, "kind": "leave", "count": 1, "group": "x"}]},
    "an event for too many": {"events": [{"at_s": 1, "kind": "leave", "count": 5}]},
    "policies of one name": {"policies": [{"name": "a"}, {"name": "a"}]},
    "a policy without a name": {"policies": [{}]},
    "a policy misspelt": {"policies": [{"name": "a", "hop": 1}]},
    "a policy that is a list": {"policies": [[]]},
    "something else": {"more": 1},
}


@pytest.mark.parametrize("name", REFUSED)
def test_broken_scenarios_are_refused(name: str) -> None:
    with pytest.raises(FormatError) as e:
        scenario(**REFUSED[name])
    assert e.value.code in ("bad-scenario", "bad-preset", "bad-policy")
