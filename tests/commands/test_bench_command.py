from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from knotctl.cli import main
from knotctl.core.engine.bench import BenchTest, bench_prompt
from knotctl.core.errors import UsageError


@pytest.mark.parametrize("name", ["pp512", "tg128", "tg128@d4096", "tg16x8", "pp32@d64x2"])
def test_a_test_has_the_name_it_is_asked_for_by(name: str) -> None:
    assert BenchTest.parse(name).name == name


@pytest.mark.parametrize("name", ["", "pp", "pp0", "tg-1", "xx5", "tg5x0", "tg5@4"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="expected pp512"):
        BenchTest.parse(name)


def test_bench_prompts_are_ids_of_the_vocabulary_that_hardly_repeat() -> None:
    ids = bench_prompt(5000, 151_936)
    assert all(0 <= i < 151_936 for i in ids)
    assert len(set(ids)) == 5000
    assert bench_prompt(9, 151_936, 1) != bench_prompt(9, 151_936)
    assert all(0 <= i < 400 for i in bench_prompt(1000, 400))


def test_bench_reports_rates_and_memory(tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    knot = str(tiny("tiny"))
    capsys.readouterr()
    tests = ("--test", "pp24", "--test", "tg8@d4", "--test", "tg6x3")
    assert main(["bench", knot, *tests, "-r", "2", "--json", "--threads", "2"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["model"] == "tiny"
    assert got["threads"] == 2
    assert [r["test"] for r in got["results"]] == ["pp24", "tg8@d4", "tg6x3"]
    assert all(r["tokens_per_s"] > 0 and len(r["runs"]) == 2 for r in got["results"])
    assert got["peak_private_bytes"] > got["peak_weight_bytes"] > 0


def test_a_rate_below_its_floor_fails_the_check(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", str(tiny("tiny")), "-p", "8", "-n", "0", "-r", "1"]
    assert main([*argv, "--floor", "pp8=0.001"]) == 0
    assert main([*argv, "--floor", "pp8=1e12"]) == 1
    assert "pp8" in capsys.readouterr().err.splitlines()[-1]
    assert main([*argv, "--floor", "pp8=1e12", "--json"]) == 1
    assert "1e+12" in json.loads(capsys.readouterr().out)["below_floor"][0]
    assert main([*argv, "--floor", "tg8=1"]) == 2
    assert main([*argv, "--floor", "pp8=fast"]) == 2


def test_a_peer_that_does_not_start_is_said(tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", str(tiny("tiny")), "-p", "8", "-n", "0", "--peer-model", "x.gguf", "--peer"]
    assert main([*argv, "/bin/false"]) == 4
    assert "did not come up" in capsys.readouterr().err
    assert main([*argv, "/nowhere/llama-server"]) == 4
    assert main(argv[:-3]) == 0
    assert main(["bench", str(tiny("tiny")), "--peer", "/bin/false"]) == 2


@pytest.mark.parametrize("against", ["one-process", "unpipelined"])
def test_a_cluster_is_measured_against_another_way(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str], against: str
) -> None:
    argv = ["bench", str(tiny("tiny")), "--processes", "--shards", "2", "--test", "pp200", "--test", "tg4", "-r", "1"]
    capsys.readouterr()
    assert main([*argv, "--threads", "1", "--against", against, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["threads"], [r["test"] for r in got["results"]]) == (1, ["pp200", "tg4"])
    assert all(r["tokens_per_s"] > 0 and r["peer_tokens_per_s"] > 0 and r["ratio"] > 0 for r in got["results"])
    assert main([*argv, "--against", against, "--peer-floor", "1e9"]) == 1


@pytest.mark.parametrize(
    "options",
    [
        ["--against", "one-process"],
        ["--processes", "--against", "elsewhere"],
        ["--processes", "--station-at", "http://127.0.0.1:1", "--shard-at", "http://127.0.0.1:2"],
        ["--station-at", "http://127.0.0.1:1"],
        ["--shards", "2"],
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused(tiny: Callable[[str], Path], options: list[str]) -> None:
    assert main(["bench", str(tiny("tiny")), "-p", "8", "-n", "0", *options]) == 2
