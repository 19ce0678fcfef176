"""Memory that is handed to other processes: never to change, never to shrink, gone when nobody maps it."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from knotctl.core.errors import SourceError
from knotctl.core.spans import ByteRange
from knotctl.core.tensor import segments
from knotctl.core.tensor.segments import Segment, map_segment

DATA = bytes(range(256)) * 100
SPAN = ByteRange(1000, 1000 + len(DATA))


def filled(data: bytes = DATA) -> Segment:
    def fill(out: memoryview) -> None:
        out[:] = data

    return Segment(SPAN, fill)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_another_process_maps_it_by_name() -> None:
    segment = filled()
    script = (
        f"from knotctl.core.tensor.segments import map_segment; m = map_segment({segment.name!r}, {len(DATA)});"
        "import sys; sys.stdout.buffer.write(m)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == DATA
    segment.close()


def test_a_part_is_counted_from_the_knot_s_start() -> None:
    segment = filled()
    assert segment.part(ByteRange(1010, 1300)) == DATA[10:300]
    segment.close()


def test_what_is_mapped_outlives_the_segment() -> None:
    segment = filled()
    assert segment.name is not None
    mapped = map_segment(segment.name, len(DATA))
    name = segment.name
    segment.close()
    segment.close()
    del segment
    gc.collect()
    assert mapped == DATA
    assert map_segment(name, len(DATA)) is None


def test_nobody_can_write_to_it_or_cut_it() -> None:
    segment = filled()
    assert segment.name is not None
    fd = os.open(segment.name, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, len(DATA))
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)
    os.close(fd)
    with pytest.raises(TypeError):
        segment.data[0] = 1
    segment.close()


def test_only_sealed_memory_is_mapped(tmp_path: Path) -> None:
    """A file that can be cut would kill its reader with SIGBUS."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    pipe = os.pipe()
    with path.open("rb") as file:
        unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, len(DATA))
        for fd in (file.fileno(), unsealed, pipe[0]):
            assert map_segment(f"/proc/{os.getpid()}/fd/{fd}", len(DATA)) is None
        os.close(unsealed)
    for fd in pipe:
        os.close(fd)
    segment = filled()
    assert segment.name is not None
    for name in (str(path), "/dev/zero", segment.name + "/../3", "/proc/self/fd/0", "", "/proc/1/fd/99999\n"):
        assert map_segment(name, len(DATA)) is None
    assert map_segment(segment.name, len(DATA) + 1) is None
    segment.close()


def test_a_fill_that_fails_leaves_nothing_open() -> None:
    before = open_files()

    def fail(_: memoryview) -> None:
        raise OSError("as told")

    for _ in range(5):
        with pytest.raises(OSError, match="as told"):
            Segment(SPAN, fail)
    segment = filled()
    segment.close()
    del segment
    gc.collect()
    assert open_files() == before


def test_the_error_of_a_fill_that_holds_on_to_what_it_was_given_comes_through() -> None:
    """As of a store that breaks off: the frames of its traceback have views of the rest that it was to fill."""
    before = open_files()

    def broken(out: memoryview) -> None:
        rest = out[7:]
        raise SourceError("unreachable", f"{len(rest)} bytes are missing")

    with pytest.raises(SourceError, match="bytes are missing"):
        Segment(SPAN, broken)
    gc.collect()
    assert open_files() == before


def test_a_segment_that_nobody_closes_leaves_nothing_open() -> None:
    before = open_files()
    segment = filled()
    assert open_files() > before
    del segment
    gc.collect()
    assert open_files() == before


def test_where_memory_cannot_be_sealed_it_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "CAN_SEAL", False)
    segment = filled()
    assert segment.name is None
    assert segment.data == DATA
    assert segment.data.readonly
    assert map_segment("/proc/1/fd/3", 1) is None
    segment.close()
