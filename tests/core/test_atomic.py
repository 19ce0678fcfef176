"""A file is replaced whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from knotctl.core.atomic import write_whole
from knotctl.core.errors import SourceError


def test_the_new_bytes_take_the_place_of_the_old(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    write_whole(path, b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SourceError) as e:
        write_whole(path, b"new")
    assert e.value.code == "disk-full"
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="none: no such folder"):
        write_whole(tmp_path / "none" / "a", b"")


def test_what_a_killed_writer_left_is_swept_by_the_next_one_and_nothing_else_is(tmp_path: Path) -> None:
    dest = tmp_path / "m.knot"
    script = (
        "import sys, time; from pathlib import Path; from knotctl.core.atomic import replacing\n"
        "with replacing(Path(sys.argv[1])) as f:\n    f.write(b'half'); f.flush(); print(flush=True); time.sleep(600)"
    )

    def writer() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", script, str(dest)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    killed, alive = writer(), writer()
    killed.kill()
    killed.communicate()
    other = tmp_path / ".other.knot.01234567.part"
    other.write_bytes(b"another file's")
    old = time.time() - 3600
    for part in tmp_path.glob(".*.part"):
        os.utime(part, (old, old))
    assert len(list(tmp_path.glob(".m.knot.*.part"))) == 2
    write_whole(dest, b"whole")
    assert len(list(tmp_path.glob(".m.knot.*.part"))) == 1
    assert other.exists()
    alive.kill()
    alive.communicate()


def test_a_name_as_long_as_the_file_system_allows_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 125)
    write_whole(path, b"x")
    assert path.read_bytes() == b"x"
