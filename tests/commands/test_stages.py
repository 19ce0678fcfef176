"""Every stage alone, file in and file out, gives the bits that the pipeline in one process gives."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knotctl.cli import main
from knotctl.core.wire.frame import Frame, parse_frame
from knotctl.core.wire.layout import FILE_LIMITS, Flags, Kind

IDS = [5, 17, 200, 3, 44, 91, 120, 7, 63, 301, 12]


@pytest.fixture
def knot(tiny: Callable[[str], Path]) -> str:
    return str(tiny("tiny"))


def run(*argv: object) -> None:
    assert main([str(a) for a in argv]) == 0


def report(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    capsys.readouterr()
    run(*argv)
    return json.loads(capsys.readouterr().out)


def frame_of(path: Path) -> Frame:
    return parse_frame(path.read_bytes(), limits=FILE_LIMITS)


def ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def embedded(knot: str, folder: Path, tokens: list[int], shards: int = 8, position: int = 0) -> Path:
    parts = [folder / f"part{i}.frame" for i in range(shards)]
    for i, part in enumerate(parts):
        shard = f"{i}/{shards}"
        run("shard-embed", knot, "--shard", shard, "--tokens", ids(tokens), "--position", position, "-o", part)
    run("merge", *parts, "-o", folder / "embed.frame")
    return folder / "embed.frame"


def stationed(knot: str, frame: Path, edges: list[int], *options: object) -> Path:
    for a, b in itertools.pairwise(edges):
        out = frame.with_name(f"after{b}.frame")
        run("run-station", knot, "--layers", f"{a}:{b}", "-i", frame, "-o", out, *options)
        frame = out
    return frame


def test_the_pipeline_of_files_gives_the_logits_of_generate(
    knot: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = frame_of(stationed(knot, embedded(knot, tmp_path, IDS), [0, 2, 3]))
    assert out.kind is Kind.LOGITS
    assert out.payload.shape == (1, 400)
    assert out.segments[0].position == len(IDS) - 1
    got = report(capsys, "generate", knot, "--tokens", ids(IDS), "-n", 1, "--logprobs", 400, "--json", "--ignore-eos")
    assert got["prompt_tokens"] == IDS
    assert got["tokens"] == [int(out.payload[0].argmax())]
    logits = out.payload[0].astype(np.float64)
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    top = dict(got["logprobs"][0])
    assert len(top) == 400
    assert [top[i] for i in range(400)] == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("edges", [[0, 3], [0, 2, 3], [0, 1, 2, 3]])
def test_the_last_frame_is_the_same_bytes_for_any_split(knot: str, tmp_path: Path, edges: list[int]) -> None:
    frame = embedded(knot, tmp_path, IDS)
    whole = stationed(knot, frame, [0, 3], "--logits", "all").read_bytes()
    assert stationed(knot, frame, edges, "--logits", "all").read_bytes() == whole


@pytest.mark.parametrize("step", [1, 4, 7])
def test_a_prompt_fed_in_chunks_through_kv_files_gives_the_same_rows(knot: str, tmp_path: Path, step: int) -> None:
    whole = frame_of(stationed(knot, embedded(knot, tmp_path, IDS), [0, 3], "--logits", "all")).payload
    rows = []
    for at in range(0, len(IDS), step):
        frame = embedded(knot, tmp_path, IDS[at : at + step], position=at)
        for a, b in ((0, 2), (2, 3)):
            out = tmp_path / f"after{b}.frame"
            options = ("-i", frame, "-o", out, "--logits", "all", "--kv", tmp_path / f"{a}.kv")
            run("run-station", knot, "--layers", f"{a}:{b}", *options)
            frame = out
        rows.append(frame_of(frame).payload)
    assert np.concatenate(rows).tobytes() == whole.tobytes()


def test_run_station_reports_what_it_held(knot: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = embedded(knot, tmp_path, IDS)
    got = report(capsys, "run-station", knot, "--layers", "0:2", "-i", frame, "-o", tmp_path / "h.frame", "--json")
    assert got["layers"] == [0, 2]
    assert got["role"] == "entry"
    assert got["tokens"] == len(IDS)
    assert got["residency"] == "fluid"
    assert [(p["layer"], p["phase"]) for p in got["phases"]] == [
        (layer, phase) for layer in (0, 1) for phase in ("attn", "ffn_gate", "ffn_up", "ffn_down")
    ]
    assert got["peak_weight_bytes"] <= max(p["bytes"] for p in got["phases"])
    options = ("-i", tmp_path / "h.frame", "-o", tmp_path / "l.frame", "--memory-budget", "40MiB", "--json")
    budget = report(capsys, "run-station", knot, "--layers", "2:3", *options)
    assert budget["role"] == "exit"
    assert budget["budget_bytes"] == 40 << 20
    assert budget["planned_bytes"] <= 40 << 20


def test_weights_mapped_or_read_give_the_same_frame_and_a_tail_without_a_head_hidden_states(
    knot: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = embedded(knot, tmp_path, IDS)
    for io in ("mmap", "pread"):
        run("run-station", knot, "--layers", ":", "-i", frame, "-o", tmp_path / io, "--io", io)
    assert (tmp_path / "mmap").read_bytes() == (tmp_path / "pread").read_bytes()
    options = ("--layers", ":", "-i", frame, "-o", tmp_path / "h.frame", "--head-on-shards")
    bare = report(capsys, "run-station", knot, *options, "--logits", "none", "--json")
    assert not [p for p in bare["phases"] if p["layer"] is None]


def test_text_given_to_a_shard_is_tokenised_as_tokenize_does(
    knot: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = report(capsys, "tokenize", knot, "hello world", "--json")["tokens"]
    got = report(capsys, "shard-embed", knot, "--text", "hello world", "-o", tmp_path / "f.frame", "--json")
    assert got["tokens"] == expected
    assert got["owned"] == len(expected)
    (tmp_path / "ids.txt").write_text(" ".join(map(str, expected)))
    run("shard-embed", knot, "--tokens-file", tmp_path / "ids.txt", "-o", tmp_path / "g.frame")
    assert (tmp_path / "g.frame").read_bytes() == (tmp_path / "f.frame").read_bytes()


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["shard-embed", "KNOT", "--tokens", "5,400", "-o", "OUT"], 2, "token 1: id 400: expected 0 <= id < 400"),
        (["shard-embed", "KNOT", "--tokens", "5", "--shard", "8/8", "-o", "OUT"], 2, "expected 0 <= I < N"),
        (["shard-embed", "KNOT", "--tokens", "5", "--shard", "x", "-o", "OUT"], 2, "expected I/N"),
        (["shard-embed", "KNOT", "--tokens", "-3", "-o", "OUT"], 2, "expected ids"),
        (["shard-embed", "KNOT", "-o", "OUT"], 2, "give one of"),
        (["run-station", "KNOT", "--layers", "0:9", "-i", "FRAME", "-o", "OUT"], 2, "0:9"),
        (["run-station", "KNOT", "--layers", "2:2", "-i", "FRAME", "-o", "OUT"], 2, "2:2"),
        (["run-station", "KNOT", "--layers", "0:2", "-i", "PART", "-o", "OUT"], 2, "knotctl merge"),
        (["run-station", "KNOT", "--layers", "0:2", "-i", "KNOT", "-o", "OUT"], 3, "AWFR"),
        (
            ["run-station", "KNOT", "--layers", ":2", "-i", "FRAME", "--memory-budget", "1KiB", "-o", "OUT"],
            6,
            "the least",
        ),
        (["run-station", "KNOT", "--layers", ":", "-i", "FRAME", "-o", "OUT", "--io", "dma"], 2, "auto, mmap, pread"),
        (["run-station", "KNOT", "--layers", ":", "-i", "FRAME", "-o", "OUT", "--head-on-shards"], 2, "--logits none"),
        (["run-station", "OTHER", "--layers", "0:2", "-i", "FRAME", "-o", "OUT"], 5, "another model"),
        (["generate", "KNOT", "--tokens", "1", "--stations", "0:1,2:3"], 2, "meet end to end"),
        (["generate", "KNOT"], 2, "give a PROMPT"),
        (["generate", "KNOT", "--tokens", "999"], 2, "999"),
        (["generate", "nowhere.knot", "hello"], 4, "nowhere.knot"),
    ],
)
def test_what_cannot_work_is_said_in_words_and_leaves_no_file(
    knot: str,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    status: int,
    words: str,
) -> None:
    frame, part, out = embedded(knot, tmp_path, IDS), tmp_path / "part0.frame", tmp_path / "out.frame"
    names = {"KNOT": knot, "OTHER": str(tiny("tiny-qwen3")), "FRAME": str(frame), "PART": str(part), "OUT": str(out)}
    capsys.readouterr()
    assert main([names.get(a, a) for a in argv]) == status
    err = capsys.readouterr().err
    assert err.startswith("knotctl: ")
    assert words in err
    assert not out.exists()


def test_a_degraded_embedding_stays_flagged_to_the_logits(knot: str, tmp_path: Path) -> None:
    embedded(knot, tmp_path, IDS)
    parts = [tmp_path / f"part{i}.frame" for i in range(8) if i != 1]
    assert main(["merge", *map(str, parts), "-o", str(tmp_path / "no.frame")]) == 1
    run("merge", *parts, "-o", tmp_path / "degraded.frame", "--degrade")
    out = frame_of(stationed(knot, tmp_path / "degraded.frame", [0, 2, 3]))
    assert Flags.DEGRADED in out.flags
