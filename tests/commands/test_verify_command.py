"""`knotctl verify`: exit status, a line a finding, the documents that scripts rely on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from knotctl.cli import main

KNOTS = Path(__file__).parents[2] / "fixtures" / "knots"


def test_a_good_knot_exits_0_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(KNOTS / "small.knot")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{KNOTS / 'small.knot'}: ok, 13 tensors, 7.1 KiB, knot_id ")
    assert out.count("\n") == 1


def test_an_error_exits_1_with_place_tensor_and_repair(capsys: pytest.CaptureFixture[str]) -> None:
    path = KNOTS / "bad-length.knot"
    assert main(["verify", str(path)]) == 1
    finding, summary = capsys.readouterr().out.splitlines()
    assert finding == (
        f"{path}:5809: error: bad-length: blk_0_ffn_up_weight: length: expected 576 bytes for Q4_0 [32, 32], found 575 "
        f"(fix: knotctl encode MODEL.gguf {path} --force)"
    )
    assert summary == f"{path}: FAILED, 1 error"


def test_a_gguf_in_a_knot_s_place_is_told_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(KNOTS.parent / "tiny-llama.gguf")]) == 1
    assert "found a GGUF, of which knotctl encode makes one" in capsys.readouterr().out


@pytest.mark.parametrize("code", ["legacy-type-field", "padded-vocabulary", "missing-digest"])
def test_warnings_and_notes_exit_0(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(KNOTS / f"{code}.knot")]) == 0
    assert code in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--json", "--format=json"])
def test_the_json_is_a_list_with_an_object_a_knot(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(KNOTS / "small.knot"), str(KNOTS / "stale-layout.knot")]
    assert main(["verify", option, *paths]) == 1
    good, bad = json.loads(capsys.readouterr().out)
    assert set(good) >= {"path", "ok", "knot_id", "payload_offset", "payload_bytes", "file_bytes", "findings"}
    assert (good["path"], good["ok"], good["findings"]) == (paths[0], True, [])
    assert good["payload_offset"] + good["payload_bytes"] == good["file_bytes"]
    assert bad["ok"] is False
    assert bad["knot_id"] is None
    assert bad["payload_offset"] + bad["payload_bytes"] == bad["file_bytes"] + 1
    (finding,) = bad["findings"]
    assert set(finding) == {"code", "severity", "offset", "tensor", "message", "repair"}
    assert (finding["code"], finding["severity"]) == ("stale-layout", "error")
    assert finding["repair"] == f"knotctl repair {paths[1]} OUT.knot"


def test_patterns_are_expanded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(KNOTS / "bad-*.knot")]) == 1
    out = capsys.readouterr().out
    # bad-tokenizer and bad-template are told by the payload
    assert out.count("FAILED") == len(list(KNOTS.glob("bad-[!t]*.knot")))
    assert main(["verify", str(KNOTS / "*.gguf")]) == 2


def test_a_knot_that_is_not_there_exits_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--json", "no-such.knot"]) == 4
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["code"] == "not-found"
    assert "no-such.knot" in captured.err


def test_structure_is_verified_without_heavy_imports() -> None:
    script = (
        "import sys; from knotctl.cli import main; "
        f"status = main(['verify', {str(KNOTS / 'small.knot')!r}]); "
        "heavy = {'numba', 'numpy', 'boto3', 'tokenizers', 'rich', 'zstandard'} & set(sys.modules); "
        "assert not heavy, heavy; sys.exit(status)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_a_name_that_is_no_text_is_shown_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / os.fsdecode(b"a\xff\n.knot")
    path.write_bytes((KNOTS / "gap.knot").read_bytes())
    for form in ("text", "json", "github", "sarif", "junit"):
        assert main(["verify", "--format", form, str(path)]) == 1
        out = capsys.readouterr().out
        assert out.encode()
        assert "\n.knot" not in out


def test_of_several_knots_one_that_cannot_be_read_does_not_keep_the_others_from_being_verified(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refs = ["no-such.knot", str(KNOTS / "gap.knot"), str(KNOTS / "small.knot")]
    assert main(["verify", "--json", *refs]) == 4
    first, second, third = json.loads(capsys.readouterr().out)
    assert [f["code"] for f in first["findings"]] == ["unreadable"]
    assert "not-found" in first["findings"][0]["message"]
    assert (first["ok"], second["ok"], third["ok"]) == (False, False, True)
    assert main(["verify", *refs]) == 4
    assert "no-such.knot: error: unreadable: not-found: no-such.knot: no such file" in capsys.readouterr().out
