"""`knotctl inspect` shows what a file holds, by its first bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from knotctl.cli import main

KNOTS = Path(__file__).parents[2] / "fixtures" / "knots"


def test_the_document_of_a_knot(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(KNOTS / "small.knot")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "knot"
    assert document["config"]["hiddenDim"] == 32
    assert document["payload_offset"] + document["payload_bytes"] == document["file_bytes"]
    parts = {p["part"]: p for p in document["parts"]}
    assert list(parts) == [
        "token_embd", "attn", "ffn_gate", "ffn_up", "ffn_down", "output", "tokenizer", "digests",
    ]  # fmt: skip
    assert sum(p["bytes"] for p in parts.values()) == document["payload_bytes"]
    assert sum(p["tensors"] for p in parts.values()) == len(document["tensors"])
    assert parts["attn"] == {"part": "attn", "tensors": 5, "bytes": 2432, "largest": 2432, "types": ["Q4_0", "F32"]}
    first = document["tensors"][0]
    assert (first["name"], first["type"], first["shape"]) == ("token_embd_weight", "Q4_0", [8, 32])
    assert first["offset"] == document["payload_offset"]


def test_people_see_header_parts_and_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(KNOTS / "small.knot")]) == 0
    out = capsys.readouterr().out
    for word in ("knot_id", "config.numLayers", "ffn_gate", "blk_0_attn_output_weight", "32×32"):
        assert word in out


def test_a_broken_knot_is_refused_with_the_code_of_its_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(KNOTS / "stale-layout.knot")]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "stale-layout"


@pytest.mark.parametrize("head", [b"", b"K", b"PK\x03\x04 and more", b"\x1b[31m"])
def test_what_is_none_of_ours_is_refused(head: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(head)
    assert main(["inspect", str(tmp_path / "x")]) == 3
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.model
def test_a_gguf_and_its_sizes_by_part(gguf_of, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    path = gguf_of("coder-0.5b")
    assert main(["inspect", "--json", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["version"]) == ("gguf", 3)
    assert document["metadata"]["general.architecture"] == "qwen2"
    assert document["metadata"]["tokenizer.ggml.tokens"] == {"array_of": "string", "length": 151936}
    assert sum(p["bytes"] for p in document["parts"]) == sum(t["bytes"] for t in document["tensors"])
    last = max(document["tensors"], key=lambda t: t["offset"])
    assert last["offset"] + last["bytes"] <= path.stat().st_size
    assert main(["inspect", str(path)]) == 0
    assert "151936 × string" in capsys.readouterr().out
