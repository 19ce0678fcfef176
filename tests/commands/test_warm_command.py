from __future__ import annotations

import json
from pathlib import Path

import pytest

from knotctl.cli import main


def test_warm_says_what_was_compiled_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm"]) == 0
    capsys.readouterr()
    assert main(["warm", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["compiled"] is False
    assert got["kernels"] > 10
    assert any(Path(got["folder"]).rglob("*.nbc")), "no compiled kernel lies there"
    assert main(["warm"]) == 0
    assert "compiled before" in capsys.readouterr().err
