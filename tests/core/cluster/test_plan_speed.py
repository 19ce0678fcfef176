"""How quick planning and simulating are, for pytest-benchmark: `pytest --benchmark-only tests/core/cluster`."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from cluster_samples import FIXTURES, GB, a_model, a_node

from knotctl.core.cluster.planner import make_plan
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.scenario import parse_scenario
from knotctl.core.cluster.simulate import simulate


@pytest.mark.parametrize("count", [10, 1000, 10_000])
def test_plan(count: int, benchmark: Any) -> None:
    draw = random.Random(5)
    model = a_model(160, 2 * GB, embedding_bytes=2 * GB, head_bytes=2 * GB, hidden_size=16384)
    nodes = [a_node(f"n{i}", draw.choice([8, 24, 48, 80, 128]), draw.uniform(1, 60)) for i in range(count)]
    plan = benchmark.pedantic(make_plan, args=(model, nodes, Policy()), rounds=3)
    assert plan.covered


@pytest.mark.parametrize(("name", "hours"), [("week.json", 24), ("ten-thousand.json", 1)])
def test_simulate(name: str, hours: int, benchmark: Any) -> None:
    document = json.loads((FIXTURES / name).read_text()) | {"hours": hours, "policies": []}
    scenario = parse_scenario(json.dumps(document).encode(), Policy())
    (report,) = benchmark.pedantic(simulate, args=(scenario,), rounds=1)
    assert report.uncovered_s == 0
