"""What a copy can mend is mended to the bytes of a fresh encode; what it cannot is said, and nothing is written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from knotctl.cli import main
from knotctl.core.findings import Severity
from knotctl.core.knot import layout
from knotctl.core.knot.codes import CODES
from knotctl.core.knot.header import ENCODER, parse_header
from knotctl.core.knot.reader import open_knot

KNOTS = Path(__file__).parents[3] / "fixtures" / "knots"
REPAIRABLE = [code for code, c in CODES.items() if c.mend == "repair"]


def repair(knot: Path, out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    status = main(["repair", "--json", *options, str(knot), str(out)])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def canonical(make_knots: ModuleType) -> bytes:
    """The small knot as our own writer would have written it."""
    draft = make_knots.small()
    draft.encoder = ENCODER
    return draft.build()  # type: ignore[no-any-return]


@pytest.mark.parametrize("code", REPAIRABLE)
def test_what_is_marked_repairable_is_mended_to_the_canonical_bytes(
    code: str, canonical: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = KNOTS / f"{code}.knot"
    before = broken.read_bytes()
    status, document = repair(broken, tmp_path / "out.knot", capsys)
    assert (status, document["mended"]) == (0, [code])
    assert (tmp_path / "out.knot").read_bytes() == canonical
    assert document["knot_id"] == parse_header(canonical, len(canonical)).knot_id
    assert broken.read_bytes() == before
    assert main(["verify", "--read-data", str(tmp_path / "out.knot")]) == 0


@pytest.mark.parametrize("first", [0x40, 0x00])
@pytest.mark.parametrize("residue", [0, 1, 2, 3])
def test_stale_knots_of_every_length_become_the_canonical_one(
    residue: int, first: int, make_knots: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = make_knots.small()
    draft.replace("token_embd_weight", bytes([first]) + draft.data("token_embd_weight")[1:]).pad(residue)
    (tmp_path / "old.knot").write_bytes(make_knots.stale(*draft.parts()))
    assert repair(tmp_path / "old.knot", tmp_path / "new.knot", capsys)[0] == 0
    draft.encoder = ENCODER
    assert (tmp_path / "new.knot").read_bytes() == draft.build()


def test_several_defects_are_mended_at_once(
    make_knots: ModuleType, canonical: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = make_knots.small().edit(
        make_knots.tensor("blk_0_ffn_up_weight", type=None, tensor_type="Q4_0", sha256=None)
    )
    draft.table = False
    document, payload = draft.parts()
    (tmp_path / "old.knot").write_bytes(make_knots.stale(document, payload))
    status, done = repair(tmp_path / "old.knot", tmp_path / "new.knot", capsys)
    assert (status, set(done["mended"])) == (0, {"stale-layout", "legacy-type-field", "missing-digest"})
    assert (tmp_path / "new.knot").read_bytes() == canonical


@pytest.mark.parametrize(
    "code", [c for c in CODES if (CODES[c].mend == "encode" and CODES[c].told_by == "structure") or c == "not-a-knot"]
)
def test_what_is_not_repairable_says_why_and_writes_nothing(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert CODES[code].severity is Severity.ERROR
    status, document = repair(KNOTS / f"{code}.knot", tmp_path / "out.knot", capsys)
    assert (status, document["error"]["code"]) == (3, "not-repairable")
    assert f" {code}:" in document["error"]["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", ["stale-layout", "gap", "trailing-bytes"])
def test_damage_gets_no_digest_of_its_own(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], make_knots: ModuleType
) -> None:
    data = bytearray((KNOTS / f"{code}.knot").read_bytes())
    data[-1500] ^= 1
    (tmp_path / "old.knot").write_bytes(data)
    status, document = repair(tmp_path / "old.knot", tmp_path / "new.knot", capsys)
    assert (status, document["error"]["code"]) == (3, "not-repairable")
    assert "digest-mismatch" in document["error"]["message"]
    assert not (tmp_path / "new.knot").exists()


def test_a_shifted_payload_without_digests_is_not_taken_for_sound(
    make_knots: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = make_knots.small()
    bad = struct.pack("<e", 60000.0) + draft.data("blk_0_ffn_up_weight")[2:]
    draft.replace("blk_0_ffn_up_weight", bad).edit(make_knots.tensor("blk_0_ffn_up_weight", sha256=None))
    (tmp_path / "old.knot").write_bytes(draft.build())
    status, document = repair(tmp_path / "old.knot", tmp_path / "new.knot", capsys)
    assert (status, document["error"]["code"]) == (3, "not-repairable")
    assert "insane-scale" in document["error"]["message"]


@pytest.mark.parametrize("name", ["small", "padded-vocabulary"])
def test_a_sound_knot_needs_no_repair(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = repair(KNOTS / f"{name}.knot", tmp_path / "out.knot", capsys)
    assert (status, document["error"]["code"]) == (2, "nothing-to-repair")


def test_the_original_is_never_the_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.knot"
    path.write_bytes((KNOTS / "stale-layout.knot").read_bytes())
    before = path.read_bytes()
    assert repair(path, path, capsys, "--force")[0] == 2
    assert path.read_bytes() == before
    (tmp_path / "there").write_text("mine")
    assert repair(path, tmp_path / "there", capsys)[0] == 2
    assert (tmp_path / "there").read_text() == "mine"
    assert repair(path, tmp_path / "there", capsys, "--force")[0] == 0


@pytest.mark.model
@pytest.mark.parametrize("residue", [0, 1, 2, 3])
def test_a_real_stale_knot_becomes_a_fresh_encode(
    residue: int,
    knot_of: Callable[[str], Path],
    make_knots: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fresh = knot_of("smollm2")
    capsys.readouterr()
    with open_knot(str(fresh)) as knot:
        head = knot.source.read(layout.JSON_OFFSET, knot.header.payload_offset - layout.JSON_OFFSET)
        payload = knot.source.read(knot.header.payload_offset, knot.header.payload_bytes)
    document = json.loads(head.rstrip(b"\0\x40"))
    del document["digest"]
    document["encoder"] = "an encoder before 2026-04-25"
    while len(make_knots.dump(document)) % 4 != residue:
        document["encoder"] += "."
    old, new = tmp_path / "old.knot", tmp_path / "new.knot"
    old.write_bytes(make_knots.stale(document, payload))
    assert main(["verify", "--json", str(old)]) == 1
    assert [f["code"] for f in json.loads(capsys.readouterr().out)[0]["findings"]] == ["stale-layout"]
    assert repair(old, new, capsys)[0] == 0
    assert new.read_bytes() == fresh.read_bytes()
