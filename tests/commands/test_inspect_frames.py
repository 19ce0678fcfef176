"""`inspect` of frames: from a file, a pipe or stdin, in words and JSON, and named where something is wrong."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from knotctl.cli import main
from knotctl.core.wire.frame import Frame, Segment, encode_frame
from knotctl.core.wire.layout import Flags, Kind

LOGITS = np.array([[1, 5, 3, np.nan], [np.nan, np.nan, np.nan, np.inf]], np.float32)
FRAME = Frame(Kind.LOGITS, b"\xab" * 16, (Segment(b"\x01" * 16, 7, 2),), LOGITS, {"a": "\x1b[31m"}, Flags.LAST)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "logits.frame"
    path.write_bytes(encode_frame(FRAME))
    return path


def test_in_words(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "logits" in out
    assert "ab" * 16 in out
    assert "1 (5.000)" in out
    assert "\x1b" not in out


def test_in_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--top", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["top"] == [[[1, 5.0], [2, 3.0]], []]
    assert document["statistics"]["not_finite"] == 5
    assert document["segments"][0]["position"] == 7


def test_from_stdin(path: Path) -> None:
    command = [sys.executable, "-m", "knotctl", "inspect", "-", "--json"]
    done = subprocess.run(command, input=path.read_bytes(), capture_output=True, check=True)
    assert json.loads(done.stdout)["kind"] == "logits"


@pytest.mark.parametrize(("damage", "words"), [(-1, "ends early"), (1, "1 bytes after its end")])
def test_what_is_wrong_is_said_with_the_name(
    path: Path, capsys: pytest.CaptureFixture[str], damage: int, words: str
) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:damage] if damage < 0 else data + b"\0")
    assert main(["inspect", str(path)]) == 3
    err = capsys.readouterr().err
    assert f"{path}: frame: byte" in err
    assert words in err


def test_stdin_that_is_no_frame(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"GGUF")))
    assert main(["inspect", "-"]) == 3
    assert "stdin: frame: byte 0" in capsys.readouterr().err
