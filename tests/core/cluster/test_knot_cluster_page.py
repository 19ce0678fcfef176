"""man knot-cluster(7) and the code say the same: fields, codes, numbers."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from cluster_samples import FIXTURES, GB, PLAIN, a_model, a_node

from knotctl.core.cluster import explain, nodes, presets, scenario
from knotctl.core.cluster.document import document_of
from knotctl.core.cluster.nodes import MAX_NODES
from knotctl.core.cluster.planner import make_plan
from knotctl.core.cluster.policy import CHOICES, RANGES, Policy
from knotctl.core.cluster.scenario import MAX_HOURS, MAX_SIMULATED, parse_scenario
from knotctl.core.cluster.simulate import DETECT_S, simulate
from knotctl.core.cluster.simulate import document_of as simulation_of

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "man" / "knot-cluster.7").read_text().replace("\\-", "-")
WORDS = set(re.findall(r"[a-z][a-z0-9_-]+[a-z0-9]", PAGE))


def section(name: str) -> str:
    return re.split(r"^\.SH ", PAGE, flags=re.MULTILINE)[
        [*re.findall(r"^\.SH (.*)$", PAGE, re.MULTILINE)].index(name) + 1
    ]


def test_every_number_of_the_policy_is_in_the_table_with_its_default() -> None:
    table = dict(re.findall(r"^(\w+)\t(\S+)\t", section("SCENARIOS"), re.MULTILINE))
    defaults = {f.name: f.default for f in fields(Policy)}
    assert table == {
        k: "none" if v is None else f"{v:g}" if isinstance(v, float) else str(v) for k, v in defaults.items()
    }
    assert set(RANGES) | set(CHOICES) == set(defaults)


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("NODES", nodes.FIELDS), ("PRESETS", presets.FIELDS),
        ("SCENARIOS", (*scenario._GROUP, *scenario._EVENT, "name", "seed", "hours", "model", "nodes", "policies")),
    ],
)  # fmt: skip
def test_every_field_of_a_file_is_on_the_page(where: str, names: tuple[str, ...]) -> None:
    said = set(re.findall(r"\w+", section(where)))
    assert set(names) <= said, f"{where}: {set(names) - said}"


def test_every_field_of_the_documents_is_on_the_page() -> None:
    plan = make_plan(a_model(4), [a_node("a", 3), a_node("b", 3), a_node("c", 0.1)], PLAIN)
    document = document_of(plan)
    assert all(document[name] for name in ("assignments", "idle", "directives", "warnings", "coverage_map"))
    rows = [document, document["predicted"], *(document[n][0] for n in ("assignments", "idle", "directives"))]
    assert {name for row in rows for name in row} <= set(re.findall(r"\w+", section("THE PLAN")))
    found = parse_scenario((FIXTURES / "five-leave.json").read_bytes(), Policy())
    report = simulation_of(found, simulate(found))
    (policy,) = report["policies"]
    names = {*report, *policy, *policy["hours"][0]}
    assert names <= set(re.findall(r"\w+", section("SCENARIOS")))


def test_every_warning_has_its_line_and_every_line_its_warning() -> None:
    source = Path(explain.__file__).read_text()
    given = set(re.findall(r'yield \(?\s*"([a-z-]+)"', source)) | set(
        re.findall(r'code, who = \(\s*"([a-z-]+)"', source)
    )
    given |= set(re.findall(r'\(\s*"(fewer-[a-z-]+)"', source))
    listed = set(re.findall(r"^\.B ([a-z-]+)$", section("THE PLAN").partition(".RS")[2], re.MULTILINE))
    assert given == listed


def test_every_code_of_a_refusal_is_on_the_page() -> None:
    raised = set()
    for module in ("fields", "nodes", "presets", "policy", "scenario"):
        source = (ROOT / "knotctl" / "core" / "cluster" / f"{module}.py").read_text()
        raised |= set(re.findall(r'"((?:bad|duplicate|unknown)-[a-z]+)"', source))
    assert raised <= WORDS


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"{MAX_NODES:,}" in section("NODES") and f"{MAX_SIMULATED:,}" in section("SCENARIOS")
    assert f"{DETECT_S:.0f} seconds" in section("SCENARIOS") and MAX_HOURS == 4 * 7 * 24
    assert f"{explain._FAIR_CONTEXT:,}" in section("THE PLAN")


def test_the_examples_are_accepted() -> None:
    listed, preset = re.search(r"(\[.*?\])\n\n(\{.*?\}\})\n", section("EXAMPLES"), re.DOTALL).groups()  # type: ignore[union-attr]
    model = presets.parse_preset(preset.encode())
    assert nodes.parse_nodes(listed.encode(), model)[0].vram_bytes == json.loads(listed)[0]["vram_bytes"] > 24 * GB
