"""Every byte source, plain or wrapped, keeps the same promises."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from knotctl.core.errors import SourceError
from knotctl.core.source.base import ByteSource
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.file import FileSource

DATA = random.Random(1).randbytes(100_003)

SOURCES: dict[str, Callable[[Path], ByteSource]] = {
    "file": FileSource,
    "counted": lambda path: CountedSource(FileSource(path)),
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ByteSource]:
    path = tmp_path / "object.bin"
    path.write_bytes(DATA)
    opened = SOURCES[request.param](path)
    yield opened
    opened.close()


def test_it_has_the_shape(source: ByteSource) -> None:
    assert isinstance(source, ByteSource)
    assert source.size == len(DATA)
    assert source.identity
    assert "object.bin" in source.name


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 0), (0, 1), (0, len(DATA)), (len(DATA) - 1, 1), (len(DATA), 0), (17, 4099), (65_535, 2)]
)
def test_read_and_read_into_return_exactly_the_range(source: ByteSource, offset: int, length: int) -> None:
    assert source.read(offset, length) == DATA[offset : offset + length]
    out = bytearray(b"\xaa" * (length + 2))
    source.read_into(offset, memoryview(out)[1 : length + 1])
    assert out == b"\xaa" + DATA[offset : offset + length] + b"\xaa"


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (0, -1), (0, len(DATA) + 1), (len(DATA), 1), (1 << 62, 1), (0, 1 << 62)]
)
def test_a_range_outside_is_refused_before_anything_is_allocated(source: ByteSource, offset: int, length: int) -> None:
    with pytest.raises(SourceError) as e:
        source.read(offset, length)
    assert e.value.code == "out-of-range"


def test_read_into_refuses_a_range_outside(source: ByteSource) -> None:
    with pytest.raises(SourceError) as e:
        source.read_into(len(DATA) - 1, memoryview(bytearray(2)))
    assert e.value.code == "out-of-range"


def test_threads_read_at_once(source: ByteSource) -> None:
    starts = range(0, len(DATA) - 1000, 997)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda at: source.read(at, 1000), starts)) == [DATA[at : at + 1000] for at in starts]


def test_reading_after_close_is_an_error_and_closing_twice_is_none(source: ByteSource) -> None:
    source.close()
    source.close()
    with pytest.raises(SourceError):
        source.read(0, 1)
