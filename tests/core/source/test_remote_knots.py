"""Knots in a store are read where they lie: by few requests, of one object, with every defect found there too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from store_doubles import FaultyStore

from knotctl.cli import main

FIXTURES = Path(__file__).parents[3] / "fixtures"
KNOTS = FIXTURES / "knots"


def test_structure_takes_one_request(faulty: FaultyStore, capsys: pytest.CaptureFixture[str]) -> None:
    url = faulty.put("small.knot", (KNOTS / "small.knot").read_bytes())
    for ref in (url, "s3://models/small.knot"):
        faulty.requests.clear()
        assert main(["verify", ref]) == 0
        assert len(faulty.requests) == 1
        assert f"{ref}: ok, 13 tensors" in capsys.readouterr().out


@pytest.mark.model
def test_structure_of_a_real_model_takes_two_requests_at_most_and_two_megabytes(
    faulty: FaultyStore, knot_of: Callable[[str], Path]
) -> None:
    faulty.put("smollm2.knot", knot_of("smollm2").read_bytes())
    assert main(["verify", "s3://models/smollm2.knot"]) == 0
    assert len(faulty.requests) <= 2
    assert faulty.sent < 2 << 20


def test_stores_of_others_serve_knots(s3: Callable[[str, bytes], str], capsys: pytest.CaptureFixture[str]) -> None:
    good = s3("small.knot", (KNOTS / "small.knot").read_bytes())
    bad = s3("digest-mismatch.knot", (KNOTS / "digest-mismatch.knot").read_bytes())
    capsys.readouterr()
    assert main(["verify", "--read-data", "--json", good, bad]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert (first["ok"], first["data_bytes"]) == (True, first["payload_bytes"])
    assert [f["code"] for f in second["findings"]] == ["digest-mismatch"]
    assert main(["inspect", "--json", good]) == 0
    assert json.loads(capsys.readouterr().out)["knot_id"] == first["knot_id"]


def test_a_knot_that_is_replaced_while_it_is_verified_is_an_error_that_says_so(
    faulty: FaultyStore, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # larger than what is kept of the first answer, so that its payload is fetched
    assert main(["encode", str(FIXTURES / "tiny.gguf"), str(tmp_path / "x.knot")]) == 0
    data = (tmp_path / "x.knot").read_bytes()
    monkeypatch.setattr("knotctl.core.source.ranged.HEAD_BYTES", 16 << 10)
    faulty.put("x.knot", data)
    faulty.faults = [""]
    answered = faulty.objects

    class Replaced(dict[str, bytes]):
        def get(self, key: str, default: object = None) -> bytes:  # type: ignore[override]
            return data if len(faulty.requests) <= 1 else data[:-1] + b"!"

    faulty.objects = Replaced(answered)
    capsys.readouterr()
    assert main(["verify", "--read-data", "--json", "s3://models/x.knot"]) == 4
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "object-changed"


def test_a_store_that_is_named_by_option(faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty.put("small.knot", (KNOTS / "small.knot").read_bytes())
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    assert main(["verify", "--endpoint-url", faulty.url, "s3://models/small.knot"]) == 0
    assert os.environ["AWS_ENDPOINT_URL_S3"] == faulty.url


def test_a_proof_of_an_object_holds_while_its_etag_does(
    faulty: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty.put("small.knot", (KNOTS / "small.knot").read_bytes())
    command = ["verify", "--read-data", "--json", "--proof", str(tmp_path / "p"), "s3://models/small.knot"]
    for before in (False, True):
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)[0]["proved_before"] is before
    faulty.put("small.knot", (KNOTS / "padded-vocabulary.knot").read_bytes())
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)[0]["proved_before"] is False


def test_a_local_knot_is_compared_with_a_remote_gguf(faulty: FaultyStore, tmp_path: Path) -> None:
    gguf = FIXTURES / "tiny-llama.gguf"
    assert main(["encode", str(gguf), str(tmp_path / "x.knot")]) == 0
    url = faulty.put("tiny-llama.gguf", gguf.read_bytes())
    assert main(["verify", str(tmp_path / "x.knot"), "--against", url]) == 0
