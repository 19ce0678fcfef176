"""`merge` on files: the bits of the owners' rows, the exit status of each refusal, and no file where it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from knotctl.cli import main
from knotctl.core.spans import VocabSpan
from knotctl.core.wire.frame import Frame, Segment, encode_frame, parse_frame
from knotctl.core.wire.layout import Flags, Kind
from knotctl.core.wire.merge import partial_meta

TOKENS = [3, 9, 0, 7]
ROWS = np.random.default_rng(1).standard_normal((4, 6), np.float32)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Files of the partial embeddings of TOKENS by two shards of a vocabulary of ten."""
    paths = []
    for i in range(2):
        span = VocabSpan.shard(i, 2, 10)
        rows = np.where(np.array([t in span for t in TOKENS])[:, None], ROWS, np.float32(0))
        frame = Frame(Kind.PARTIAL, bytes(16), (Segment(bytes(16), 5, 4),), rows, partial_meta(TOKENS, span))
        path = tmp_path / f"part{i}.frame"
        path.write_bytes(encode_frame(frame))
        paths.append(str(path))
    return paths


def test_the_merged_file_has_the_rows_bits(
    shards: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "embed.frame"
    assert main(["merge", *shards, "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["rows"], document["width"], document["degraded"], document["frames"]) == (4, 6, False, 2)
    merged = parse_frame(out.read_bytes())
    assert document["bytes"] == out.stat().st_size
    assert (merged.kind, merged.payload.tobytes()) == (Kind.HIDDEN, ROWS.tobytes())


def test_a_missing_shard_is_refused_with_its_positions_and_nothing_is_written(
    shards: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "embed.frame"
    assert main(["merge", shards[0], "-o", str(out)]) == 1
    assert "2 of 4 tokens (positions 6 8)" in capsys.readouterr().err
    assert not out.exists()


def test_degrade_writes_it_flagged_and_says_so(
    shards: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "embed.frame"
    assert main(["merge", shards[0], "--degrade", "-o", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["zeroed"] == [["00" * 16, 6, 7], ["00" * 16, 8, 9]]
    assert "positions 6:7" in printed.err
    assert parse_frame(out.read_bytes()).flags == Flags.DEGRADED


def test_a_damaged_file_is_named(shards: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = Path(shards[1])
    bad.write_bytes(bad.read_bytes()[:-1])
    assert main(["merge", *shards, "-o", str(tmp_path / "x")]) == 3
    assert "part1.frame: frame: byte" in capsys.readouterr().err


def test_json_and_the_frame_cannot_share_stdout(shards: list[str]) -> None:
    assert main(["merge", *shards, "-o", "-", "--json"]) == 2


def test_absent_files_are_exit_status_4(tmp_path: Path) -> None:
    assert main(["merge", str(tmp_path / "none"), "-o", str(tmp_path / "x")]) == 4
