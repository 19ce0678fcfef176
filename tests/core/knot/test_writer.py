"""A knot is written whole, the same each time, and proved; or there is no trace of it."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from knotctl.core.errors import KnotctlError, SourceError, UsageError
from knotctl.core.knot import writer
from knotctl.core.knot.config import KnotConfig
from knotctl.core.knot.layout import DIGEST_CHUNK
from knotctl.core.knot.reader import open_knot
from knotctl.core.knot.writer import PayloadTensor, write_knot
from knotctl.core.qtypes import QTYPES
from knotctl.core.source.file import HUGE_PAGE

CONFIG = KnotConfig("made-up", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, True, {})
# Bounds of tensors that fall before, on, just behind and far from those of chunks and of pieces.
LENGTHS = [0, 1, DIGEST_CHUNK - 1, DIGEST_CHUNK, 7, 3 * (1 << 20) + 5, 100_000, 0, 1]
Fill = Callable[[int, memoryview], None]


def tensor(name: str, data: bytes) -> PayloadTensor:
    def read_into(offset: int, out: memoryview) -> None:
        out[:] = data[offset : offset + len(out)]

    return PayloadTensor(name, QTYPES["I8"], (len(data),), len(data), read_into)


def payload() -> list[tuple[str, bytes]]:
    return [(f"t{i}", hashlib.shake_128(bytes([i])).digest(n)) for i, n in enumerate(LENGTHS)]


def write(dest: Path, **options: object) -> None:
    write_knot(dest, CONFIG, [tensor(*t) for t in payload()], source={}, **options)  # type: ignore[arg-type]


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "x.knot"


def test_tensors_lie_one_behind_the_other_in_the_order_given(dest: Path) -> None:
    write(dest)
    data = dest.read_bytes()
    with open_knot(str(dest)) as knot:
        header = knot.header
        assert [e.name for e in header.tensors] == [name for name, _ in payload()] + ["knot_digests"]
        for name, raw in payload():
            assert knot.read(name) == raw
            assert knot.entry(name).sha256 == hashlib.sha256(raw).hexdigest()
        table = knot.entry("knot_digests")
        chunks = b"".join(raw for _, raw in payload())
        assert data[header.payload_offset :] == chunks + knot.read("knot_digests")
        assert knot.read("knot_digests") == b"".join(
            hashlib.sha256(chunks[i : i + DIGEST_CHUNK]).digest()[:8] for i in range(0, len(chunks), DIGEST_CHUNK)
        )
        assert len(data) == header.payload_offset + table.end
        assert header.payload_offset % 4 == 1


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_the_bytes_do_not_depend_on_the_number_of_threads(jobs: int, dest: Path) -> None:
    write(dest)
    write(other := dest.with_name("other.knot"), jobs=jobs)
    assert other.read_bytes() == dest.read_bytes()


def test_every_byte_is_advanced_by_once_for_copying_and_once_for_proving(dest: Path) -> None:
    done: list[int] = []
    write(dest, advance=done.append)
    with open_knot(str(dest)) as knot:
        assert sum(done) == 2 * sum(LENGTHS) + knot.entry("knot_digests").length


def test_a_file_that_exists_is_replaced_only_by_force(dest: Path) -> None:
    dest.write_bytes(b"old")
    with pytest.raises(UsageError) as e:
        write(dest)
    assert (e.value.code, e.value.hint) == ("exists", "--force replaces it")
    assert dest.read_bytes() == b"old"
    write(dest, force=True)
    assert dest.read_bytes().startswith(b"KNOT")


def test_a_file_that_appears_meanwhile_is_kept(dest: Path) -> None:
    def appear(_: int) -> None:
        dest.write_bytes(b"somebody else's")

    with pytest.raises(UsageError, match="exists already"):
        write(dest, advance=appear)
    assert dest.read_bytes() == b"somebody else's"
    assert list(dest.parent.iterdir()) == [dest]


def fail_in(where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Have the error raised while writing: options for write()."""

    def fail(*_: object) -> None:
        raise error

    if where == "advance":
        return {"advance": fail}
    if where == "read":
        monkeypatch.setattr(f"{__name__}.tensor", lambda name, data: PayloadTensor(name, QTYPES["I8"], (9,), 9, fail))
    else:
        monkeypatch.setattr(writer.os, where, fail)
    return {}


@pytest.mark.parametrize(
    ("where", "error", "code"),
    [
        ("read", SourceError("object-changed", "the GGUF was replaced"), "object-changed"),
        ("advance", KeyboardInterrupt(), None),
        ("pwrite", OSError(errno.ENOSPC, "No space left on device"), "disk-full"),
        ("pwrite", OSError(errno.EIO, "Input/output error"), "write-failed"),
        ("ftruncate", OSError(errno.EFBIG, "File too large"), "write-failed"),
        ("fsync", OSError(errno.EDQUOT, "Disk quota exceeded"), "disk-full"),
        ("preadv", OSError(errno.EIO, "Input/output error"), "write-failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("old", [None, b"old"])
def test_whatever_fails_leaves_the_old_file_and_nothing_else(
    where: str, error: BaseException, code: str | None, old: bytes | None, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old is not None:
        dest.write_bytes(old)
    options = fail_in(where, error, monkeypatch)
    with pytest.raises(type(error) if code is None else KnotctlError) as e:
        write(dest, force=True, **options)
    assert code is None or (isinstance(e.value, SourceError) and e.value.code == code)
    monkeypatch.undo()
    assert [p.read_bytes() for p in dest.parent.iterdir()] == ([] if old is None else [old])


@pytest.mark.parametrize("at", ["first", "last", "header", "table"])
def test_a_bit_that_the_disk_turns_is_found_before_the_file_has_its_name(
    at: str, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(dest)
    with open_knot(str(dest)) as knot:
        start = knot.header.payload_offset
        places = {"header": 5, "first": start, "last": start + sum(LENGTHS) - 1, "table": knot.source.size - 1}
    dest.unlink()
    real = os.pwrite

    def turn(fd: int, piece: memoryview, offset: int) -> int:
        damaged = bytearray(piece)
        if offset <= places[at] < offset + len(piece):
            damaged[places[at] - offset] ^= 4
        return real(fd, damaged, offset)

    monkeypatch.setattr(writer.os, "pwrite", turn)
    with pytest.raises(SourceError) as e:
        write(dest)
    assert e.value.code == "not-as-written"
    assert not list(dest.parent.iterdir())


def test_short_writes_and_reads_are_gone_on_with(dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(dest)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(writer.os, "pwrite", lambda fd, piece, at: pwrite(fd, piece[: 1 + len(piece) // 2], at))
    monkeypatch.setattr(
        writer.os, "preadv", lambda fd, pieces, at: preadv(fd, [pieces[0][: 1 + len(pieces[0]) // 2]], at)
    )
    write(other := dest.with_name("other.knot"))
    monkeypatch.undo()
    assert other.read_bytes() == dest.read_bytes()


def test_a_folder_that_is_not_there_is_named_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere: no such folder"):
        write(tmp_path / "nowhere" / "x.knot")


def test_a_folder_or_device_is_not_replaced_even_by_force(tmp_path: Path) -> None:
    for dest in (tmp_path, Path("/dev/null")):
        with pytest.raises(UsageError) as e:
            write(dest, force=True)
        assert e.value.code == "not-a-file"


def test_a_new_file_is_readable_as_the_umask_says(dest: Path) -> None:
    before = os.umask(0o027)
    try:
        write(dest)
    finally:
        os.umask(before)
    assert dest.stat().st_mode & 0o777 == 0o640


def test_a_tensor_is_written_in_whole_huge_pages_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # so that the system's page cache can hold it in huge pages, which are mapped a hundred times faster
    data = bytes(range(251)) * 40_000
    calls = []
    real = os.pwrite

    def noting(fd: int, piece: memoryview, at: int) -> int:
        calls.append((at, len(piece)))
        return real(fd, piece, at)

    monkeypatch.setattr(os, "pwrite", noting)
    with (tmp_path / "f").open("wb") as file, writer._Pool(1) as pool:
        writing = writer._Writing(file.fileno(), "f", pool, lambda _: None)
        assert writing.copy(tensor("t", data), 12_345) == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "f").read_bytes()[12_345:] == data
    assert calls[0] == (12_345, HUGE_PAGE - 12_345)
    assert set(calls[1:-1]) == {(i * HUGE_PAGE, HUGE_PAGE) for i in range(1, len(calls) - 1)}
