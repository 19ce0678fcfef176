"""A file source pins the file it opened, and says so when the bytes are changed under it."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from knotctl.core.errors import ObjectChanged, SourceError
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.file import FileSource


@pytest.fixture
def path(tmp_path: Path) -> Path:
    p = tmp_path / "f"
    p.write_bytes(b"old bytes")
    return p


def test_a_file_that_is_replaced_by_name_stays_the_one_that_was_opened(path: Path) -> None:
    source = FileSource(path)
    (path.parent / "g").write_bytes(b"new bytes")
    (path.parent / "g").replace(path)
    assert source.read(0, 3) == b"old"
    assert FileSource(path).identity != source.identity


@pytest.mark.parametrize("data", [b"new bytes", b"old", b"old bytes and more", b""])
def test_a_file_that_is_rewritten_in_place_is_an_error(path: Path, data: bytes) -> None:
    source = FileSource(path)
    path.write_bytes(data)
    os.utime(path, ns=(1, source_time(source) + 1))
    with pytest.raises(ObjectChanged) as e:
        source.read(0, 9)
    assert e.value.code == "object-changed"
    assert e.value.exit_code == 4


def source_time(source: FileSource) -> int:
    return int(source.identity.rpartition(":")[2])


def test_the_identity_is_that_of_the_file_not_of_the_name(path: Path) -> None:
    os.link(path, path.parent / "other")
    assert FileSource(path).identity == FileSource(path.parent / "other").identity


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "."):
        with pytest.raises(SourceError) as e:
            FileSource(tmp_path / name)
        assert e.value.code == "not-a-file"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as e:
        FileSource(tmp_path / "no\nsuch")
    assert e.value.code == "not-found"
    assert "no\\nsuch" in e.value.message
    with pytest.raises(SourceError):
        FileSource("nul\0byte")


def test_counts_what_reached_the_source_beneath(path: Path) -> None:
    source = CountedSource(FileSource(path))
    source.read(0, 3)
    source.read_into(3, memoryview(bytearray(4)))
    with pytest.raises(SourceError):
        source.read(0, 10)
    assert (source.reads, source.bytes) == (2, 7)


def test_a_read_holds_its_bytes_once(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(32 << 20))
    source = FileSource(tmp_path / "big")
    tracemalloc.start()
    data = source.read(0, source.size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(data) == source.size
    assert peak < source.size + (1 << 20)
    source.close()


def test_a_read_shared_by_threads_fills_every_byte_in_its_place(tmp_path: Path) -> None:
    data = bytes(range(256)) * (9 << 12)
    (tmp_path / "large").write_bytes(data)
    source = FileSource(tmp_path / "large")
    for offset, length in ((0, len(data)), (3, 5_000_001), (len(data) - 2_097_153, 2_097_153), (7, 1)):
        out = bytearray(length)
        source.read_into(offset, memoryview(out))
        assert out == data[offset : offset + length]


def test_a_mapped_range_has_the_bytes_and_a_changed_file_is_an_error_not_a_signal(tmp_path: Path) -> None:
    data = bytes(range(256)) * (9 << 12)
    path = tmp_path / "large"
    path.write_bytes(data)
    source = FileSource(path)
    for offset, length in ((0, len(data)), (3, 5_000_001), (len(data) - 7, 7), (5_000_000, 1)):
        view = source.map_in(offset, length)
        assert view == data[offset : offset + length]
        source.map_out(offset, length)
    view = source.map_in(8 << 20, 1 << 20)
    os.utime(path, ns=(1, source_time(source) + 1))
    with pytest.raises(ObjectChanged):
        source.map_out(8 << 20, 1 << 20)
    os.truncate(path, 1 << 20)
    with pytest.raises(ObjectChanged):
        source.map_in(8 << 20, 1 << 20)
    source.close()
    with pytest.raises(SourceError):
        source.map_in(0, 1)


def test_a_large_read_of_a_file_cut_short_is_no_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(8 << 20))
    source = FileSource(path)
    os.truncate(path, 7 << 20)
    with pytest.raises(ObjectChanged):
        source.read_into(0, memoryview(bytearray(8 << 20)))
