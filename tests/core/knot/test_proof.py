"""A proof spares the reading while the object is the same, and no longer."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from knotctl.cli import main
from knotctl.core.knot.header import parse_header
from knotctl.core.knot.proof import ProofFile
from knotctl.core.source.file import FileSource

KNOTS = Path(__file__).parents[3] / "fixtures" / "knots"


@pytest.fixture
def knot(tmp_path: Path) -> Path:
    shutil.copy(KNOTS / "small.knot", tmp_path / "x.knot")
    return tmp_path / "x.knot"


def verify(knot: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    main(["verify", "--json", "--read-data", "--proof", str(knot.parent / "proof.json"), *options, str(knot)])
    (document,) = json.loads(capsys.readouterr().out)
    return document  # type: ignore[no-any-return]


def test_what_was_verified_is_not_read_again(knot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = verify(knot, capsys), verify(knot, capsys)
    assert (first["ok"], first["proved_before"], first["data_bytes"]) == (True, False, first["payload_bytes"])
    assert (second["ok"], second["proved_before"], second["data_bytes"]) == (True, True, None)
    assert main(["verify", "--read-data", "--proof", str(knot.parent / "proof.json"), str(knot)]) == 0
    assert "verified before" in capsys.readouterr().out


def test_a_changed_file_voids_its_proof(knot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify(knot, capsys)
    data = bytearray(knot.read_bytes())
    data[-100] ^= 1
    knot.write_bytes(data)
    assert verify(knot, capsys)["ok"] is False
    # and the same bytes under another identity are read again: a copy is another object
    shutil.copy(KNOTS / "small.knot", knot)
    os.utime(knot, ns=(1, 1))
    again = verify(knot, capsys)
    assert (again["ok"], again["proved_before"]) == (True, False)
    assert len(json.loads((knot.parent / "proof.json").read_text())["verified"]) == 1


@pytest.mark.parametrize("code", ["digest-mismatch", "missing-digest", "stale-layout"])
def test_what_was_not_found_right_gets_no_proof(code: str, knot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = (KNOTS / f"{code}.knot").read_bytes()
    knot.write_bytes(data)
    verify(knot, capsys)
    source = FileSource(knot)
    proof = ProofFile(knot.parent / "proof.json")
    if code != "stale-layout":
        # missing-digest: the tensor without a sha256 is covered by the digest table, so all was compared
        assert proof.holds(source, parse_header(data, len(data))) == (code == "missing-digest")
    assert (knot.parent / "proof.json").exists() == (code == "missing-digest")


def test_a_part_is_no_proof_of_the_whole(knot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify(knot, capsys, "--subset", "1/1")
    assert not (knot.parent / "proof.json").exists()


@pytest.mark.parametrize(
    "text",
    ["", "GGUF", "[]", "{}", '{"format":"knot-proof","schema":2,"verified":[]}', '{"format":"knot-proof","schema":1}',
     '{"format":"knot-proof","schema":1,"verified":[{"identity":1}]}', '{"a":1,"a":2}'],
)  # fmt: skip
def test_a_file_that_is_no_proof_is_refused_and_not_replaced(
    text: str, knot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = knot.parent / "proof.json"
    path.write_text(text)
    assert main(["verify", "--json", "--read-data", "--proof", str(path), str(knot)]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "bad-proof"
    assert path.read_text() == text


def test_a_proof_needs_the_data_to_be_read(knot: Path) -> None:
    assert main(["verify", "--proof", "x", str(knot)]) == 2
    assert main(["verify", "--subset", "1/2", str(knot)]) == 2


def test_a_proof_is_of_a_knot_as_well_as_of_an_object(knot: Path) -> None:
    """A store may give two objects one ETag; the header is read anyway and tells them apart."""
    data = knot.read_bytes()
    source, proof = FileSource(knot), ProofFile(knot.parent / "proof.json")
    header = parse_header(data, len(data))
    proof.add(source, header)
    assert ProofFile(knot.parent / "proof.json").holds(source, header)
    assert not proof.holds(source, replace(header, knot_id="0" * 32))
