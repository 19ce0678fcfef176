"""`knotctl plan-coverage`: files in, a plan out, exit 1 where it has gaps."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from knotctl.cli import main

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "fixtures" / "cluster"
MODEL, SIX, THREE = (str(CLUSTER / name) for name in ("llama-700b.json", "six-nodes.json", "three-nodes.json"))


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    status = main(["plan-coverage", *argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_document_has_the_contracts_shape(capsys: pytest.CaptureFixture[str]) -> None:
    status, plan = document(capsys, "--model", MODEL, "--nodes", SIX)
    assert status == 0
    assert plan["model"] == "llama-700b" and plan["n_layers"] == 100 and plan["covered"] is True and plan["gaps"] == []
    assert sum(r["end_layer"] - r["start_layer"] for r in plan["coverage_map"]) == 100
    assert all(r["node_count"] >= 1 for r in plan["coverage_map"])
    assert set(plan["assignments"][0]) >= {
        "node_id", "start_layer", "end_layer", "quantization", "is_head", "is_tail", "weight_bytes", "kv_bytes",
    }  # fmt: skip
    assert [a["is_head"] for a in plan["assignments"]] == [a["start_layer"] == 0 for a in plan["assignments"]]
    assert [a["is_tail"] for a in plan["assignments"]] == [a["end_layer"] == 100 for a in plan["assignments"]]
    assert all(a["weight_bytes"] + a["kv_bytes"] <= 128 * 10**9 for a in plan["assignments"])
    assert {d["kind"] for d in plan["directives"]} == {"LOAD_SHARD"}
    assert all(d["reason"] for d in plan["directives"])
    assert plan["predicted"]["token_ms"] > 0 and plan["predicted"]["ttft_ms"] > 0
    assert all(set(w) == {"code", "message"} for w in plan["warnings"])


def test_a_plan_with_gaps_exits_1_and_is_printed_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    status, plan = document(capsys, "--model", MODEL, "--nodes", THREE, "--kv-headroom", "8GB")
    assert (status, plan["covered"], plan["gaps"]) == (1, False, [[74, 100]])
    assert plan["predicted"]["token_ms"] is None
    assert main(["plan-coverage", "--model", MODEL, "--nodes", THREE]) == 1
    assert "NOT covered" in capsys.readouterr().out


def test_assignments_fed_back_as_current_change_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, plan = document(capsys, "--model", MODEL, "--nodes", SIX)
    nodes = json.loads(Path(SIX).read_text())
    for node in nodes:
        node["current"] = [a for a in plan["assignments"] if a["node_id"] == node["node_id"]]
    (tmp_path / "nodes.json").write_text(json.dumps(nodes))
    status, again = document(capsys, "--model", MODEL, "--nodes", str(tmp_path / "nodes.json"))
    assert status == 0 and again["directives"] == []
    assert [a["start_layer"] for a in again["assignments"]] == [a["start_layer"] for a in plan["assignments"]]


def test_nodes_from_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(SIX).read_bytes())))
    status, _ = document(capsys, "--model", MODEL, "--nodes", "-")
    assert status == 0


def test_people_see_the_map_the_reasons_and_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-coverage", "--model", MODEL, "--nodes", SIX]) == 0
    out = capsys.readouterr().out
    for word in ("a token takes", "copies  ", "if it leaves: ", "filled: ", "round 0: LOAD_SHARD", "single-copy: "):
        assert word in out


def test_the_svg_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-coverage", "--model", MODEL, "--nodes", SIX, "--format", "svg"]) == 0
    assert capsys.readouterr().out.startswith("<svg ")


@pytest.mark.parametrize("text", ["0.2", ".2", "20%", "0", "8GB", "1GiB", "8000000000"])
def test_headroom_is_a_share_or_a_size(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, plan = document(capsys, "--model", MODEL, "--nodes", SIX, "--kv-headroom", text)
    kept = {a["kv_bytes"] for a in plan["assignments"]}
    expected = {"8GB": 8 * 10**9, "1GiB": 1 << 30, "8000000000": 8 * 10**9, "0": 0}
    assert kept == {expected[text]} if text in expected else 128 * 10**9 // 5 in kept
    assert status == 0


@pytest.mark.parametrize("text", ["-0.2", "1", "0.96", "96%", "NaN", "inf", "much", "", "1e-1"])
def test_other_headrooms_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, error = document(capsys, "--model", MODEL, "--nodes", SIX, f"--kv-headroom={text}")
    assert status == 2 and error["error"]["code"] == "bad-headroom"


@pytest.mark.parametrize(
    "argv",
    [
        ["--nodes", SIX], ["--model", MODEL], ["--model", MODEL, "--nodes", SIX, "--hop-ms", "nan"],
        ["--model", MODEL, "--nodes", SIX, "--hop-ms=-1"], ["--model", MODEL, "--nodes", SIX, "--link-mbit", "0"],
        ["--model", MODEL, "--nodes", SIX, "--hysteresis", "nan"], ["--simulate", "x", "--nodes", SIX],
        ["--simulate", "x", "--format", "svg"],
    ],
)  # fmt: skip
def test_usage_that_makes_no_sense_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, error = document(capsys, *argv)
    assert status == 2 and error["error"]["message"]


def test_broken_files_exit_3_and_absent_ones_4(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('[{"node_id": "a", "vram_bytes": -1}]')
    status, error = document(capsys, "--model", MODEL, "--nodes", str(broken))
    assert status == 3 and "node 0 (a)" in error["error"]["message"]
    assert document(capsys, "--model", str(broken), "--nodes", SIX)[0] == 3
    assert document(capsys, "--model", MODEL, "--nodes", str(tmp_path / "absent"))[0] == 4
    assert document(capsys, "--model", str(tmp_path / "absent"), "--nodes", SIX)[0] == 4
    status, error = document(capsys, "--model", str(ROOT / "fixtures" / "tiny-llama.gguf"), "--nodes", SIX)
    assert status == 3 and "encode" in error["error"]["hint"]


def test_a_simulation_is_reported_as_text_and_as_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    scenario = str(CLUSTER / "five-leave.json")
    assert main(["plan-coverage", "--simulate", scenario]) == 0
    out = capsys.readouterr().out
    assert "longest outage" in out and "default, hours from left to right" in out
    status, found = document(capsys, "--simulate", scenario)
    assert status == 0 and found["policies"][0]["outages"] == 1
    assert document(capsys, "--simulate", SIX)[0] == 3


def test_a_simulation_takes_another_model_and_the_options_as_its_policy(capsys: pytest.CaptureFixture[str]) -> None:
    scenario = str(CLUSTER / "five-leave.json")
    status, found = document(capsys, "--simulate", scenario, "--model", MODEL, "--hop-ms", "1")
    assert status == 0 and found["model"] == "llama-700b" and found["policies"][0]["policy"]["hop_ms"] == 1


def test_a_knot_is_planned_by_its_own_tensors(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    knot = tiny("tiny-llama")
    capsys.readouterr()  # what encoding it said
    assert main(["inspect", "--json", str(knot)]) == 0
    inspected = json.loads(capsys.readouterr().out)
    node = {"node_id": "a", "vram_bytes": 10**9, "quantizations": ["native"], "benchmark_tokens_per_sec": 9}
    (tmp_path / "nodes.json").write_text(json.dumps([node]))
    status, plan = document(capsys, "--model", str(knot), "--nodes", str(tmp_path / "nodes.json"))
    assert status == 0 and plan["model"] == "tiny-llama" and plan["n_layers"] == inspected["config"]["numLayers"]
    (whole,) = plan["assignments"]
    # Every tensor but the table of digests, once: an output matrix that is the embedding is not held twice.
    assert whole["weight_bytes"] == sum(
        t["bytes"] for t in inspected["tensors"] if t["name"] not in ("knot_digests", "rope_freqs_weight")
    )
