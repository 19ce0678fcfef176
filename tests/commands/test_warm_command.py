from __future__ import annotations

import json
import os
import subprocess
import sys
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


@pytest.mark.parametrize("command", [["generate", "hi"], ["bench"]], ids=lambda c: c[0])
def test_a_model_that_is_missing_is_said_before_the_kernels_are_compiled(command: list[str], tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "knotctl", command[0], str(tmp_path / "no.knot"), *command[1:]]
    env = os.environ | {"KNOTCTL_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode not in (0, 1)
    assert "no such file" in done.stderr
    assert "compiling" not in done.stderr


def test_the_compilers_memory_stays_in_a_process_of_its_own(tmp_path: Path) -> None:
    script = (
        "import sys; from knotctl.commands.warming import warm_kernels; warm_kernels()\n"
        "from knotctl.core.kernels import jit, warm\n"
        "sys.exit(not warm.is_warm() or any(vars(k).get('_compiled') for k in jit.KERNELS))"
    )
    env = os.environ | {"KNOTCTL_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kernels compiled in") == 1
