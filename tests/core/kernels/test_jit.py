"""Compiled kernels: kept in the user's cache folder, found again, safe when several processes start at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from knotctl.core.kernels.jit import ENTRIES, KERNELS, kernel_folder
from knotctl.core.kernels.warm import is_warm, steps, warm

ONE_KERNEL = """
from knotctl.core.kernels.elementwise import add_bias
import numpy as np
x = np.zeros((200, 40), np.float32)
add_bias(x, np.ones(40, np.float32))
assert (x == 1).all()
"""


def start(cache: Path) -> subprocess.Popen[str]:
    env = os.environ | {"KNOTCTL_CACHE_DIR": str(cache)}
    return subprocess.Popen([sys.executable, "-c", ONE_KERNEL], env=env, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate()
    return process.returncode, errors


def compiled(cache: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in cache.rglob("*.nb?")}


def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    assert end(start(tmp_path)) == (0, "")
    first = compiled(tmp_path)
    assert any("add_rows" in name for name in first)
    assert end(start(tmp_path)) == (0, "")
    assert compiled(tmp_path) == first


def test_processes_that_start_together_do_not_disturb_each_other(tmp_path: Path) -> None:
    together = [start(tmp_path) for _ in range(3)]
    assert [end(p) for p in together] == [(0, "")] * 3
    assert not [p for p in tmp_path.rglob("*") if "tmp" in p.name]


def test_nothing_is_written_beside_the_sources() -> None:
    warm()
    import knotctl

    assert not list(Path(knotctl.__file__).parent.rglob("*.nb?"))


def test_a_new_folder_makes_room_of_those_that_nobody_used_for_a_month(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNOTCTL_CACHE_DIR", str(tmp_path))
    now = time.time()

    def old(name: str, days: int) -> Path:
        folder = tmp_path / "kernels" / name
        (folder / "knotctl").mkdir(parents=True, exist_ok=True)
        (folder / "knotctl" / "row.nbc").touch()
        os.utime(folder, (now - 86400 * days,) * 2)
        return folder

    forgotten, recent = old("a" * 16, 31), old("b" * 16, 29)
    ours = kernel_folder.__wrapped__()
    assert not forgotten.exists() and (recent / "knotctl" / "row.nbc").exists() and ours.is_dir()
    os.utime(ours, (now - 86400 * 40,) * 2)
    kernel_folder.__wrapped__()
    assert ours.stat().st_mtime > now - 86400, "a start is what counts as use"


def test_warming_reports_each_kernel_and_is_remembered() -> None:
    done: list[int] = []
    warm(done.append)
    assert sum(done) == steps() == len(KERNELS) + len(ENTRIES)
    assert is_warm() and (kernel_folder() / "complete").exists()


def test_an_unknown_attribute_of_a_kernel_is_an_error() -> None:
    with pytest.raises(AttributeError):
        _ = KERNELS[0].adress  # type: ignore[attr-defined]


def test_after_warming_nothing_is_compiled_any_more() -> None:
    warm()
    folder = kernel_folder()
    before = {p.name for p in folder.rglob("*.nbc")}
    assert {"_launch", "_serve"} <= {name.split(".")[1].split("-")[0] for name in before}, (
        "threads share out every kernel"
    )
    env = os.environ | {"KNOTCTL_CACHE_DIR": str(folder.parent.parent)}
    subprocess.run([sys.executable, "-c", ONE_KERNEL], env=env, check=True)
    assert {p.name for p in folder.rglob("*.nbc")} == before
