"""SIMD levels: chosen by the CPU or by name, refused where the CPU lacks them, equal in every bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from knotctl.core.kernels.levels import LEVELS, host_features, supported

ABLE = [level for level in LEVELS if supported(level, host_features())]


def start_at(level: str, script: Path) -> subprocess.Popen[str]:
    env = os.environ | {"KNOTCTL_SIMD": level}
    return subprocess.Popen(
        [sys.executable, str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_every_level_gives_the_same_bits() -> None:
    assert ABLE[-1] == "generic"
    started = [start_at(level, Path(__file__).parent / "kernel_digest.py") for level in ABLE]
    digests = [p.communicate() for p in started]
    assert len(digests[0][0]) == 65
    assert digests == [(digests[0][0], "")] * len(ABLE), dict(zip(ABLE, digests, strict=True))


@pytest.mark.parametrize("level", ["sse9", *(level for level in LEVELS if level not in ABLE)])
def test_a_level_that_is_unknown_or_lacking_is_refused_by_name(level: str, tmp_path: Path) -> None:
    script = tmp_path / "load.py"
    script.write_text("import knotctl.core.kernels.levels")
    refused = start_at(level, script)
    errors = refused.communicate()[1]
    assert refused.returncode != 0 and f"KNOTCTL_SIMD={level}" in errors and "generic" in errors


def test_the_best_level_that_the_cpu_has_is_the_default() -> None:
    script = "from knotctl.core.kernels.levels import LEVEL; print(LEVEL)"
    env = {k: v for k, v in os.environ.items() if k != "KNOTCTL_SIMD"}
    out = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == ABLE[0]
