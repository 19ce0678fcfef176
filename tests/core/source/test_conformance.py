"""Every byte source, plain or wrapped, keeps the same promises."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from store_doubles import FaultyStore, point_s3_at, put_s3

from knotctl.core.errors import SourceError
from knotctl.core.source.base import ByteSource
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.file import FileSource
from knotctl.core.source.opening import open_source

# More than a ranged source keeps of its first answer.
DATA = random.Random(1).randbytes(600_003)


Open = Callable[[], ByteSource]


@pytest.fixture(scope="module", params=["file", "counted", "http", "s3-ours", "s3-moto", "s3-rclone"])
def open_it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    kind = request.param
    path = tmp_path_factory.mktemp("sources") / "object.bin"
    path.write_bytes(DATA)
    if kind in ("file", "counted"):
        yield (lambda: FileSource(path)) if kind == "file" else (lambda: CountedSource(FileSource(path)))
        return
    with pytest.MonkeyPatch.context() as patch:
        if kind in ("http", "s3-ours"):
            store = FaultyStore()
            point_s3_at(patch, store.url)
            url = store.put("object.bin", DATA)
            yield lambda: open_source(url if kind == "http" else "s3://models/object.bin")
            store.close()
        else:
            point_s3_at(patch, request.getfixturevalue(kind.removeprefix("s3-") + "_url"))
            ref = put_s3("object.bin", DATA)
            yield lambda: open_source(ref)


@pytest.fixture(scope="module")
def source(open_it: Open) -> Iterator[ByteSource]:
    opened = open_it()
    yield opened
    opened.close()


def test_it_has_the_shape(source: ByteSource) -> None:
    assert isinstance(source, ByteSource)
    assert source.size == len(DATA)
    assert source.identity
    assert "object.bin" in source.name


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 0), (0, 1), (0, len(DATA)), (len(DATA) - 1, 1), (len(DATA), 0), (17, 4099), (262_143, 2), (262_144, 300_000)],
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
    starts = range(0, len(DATA) - 1000, 9_973)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda at: source.read(at, 1000), starts)) == [DATA[at : at + 1000] for at in starts]


def test_reading_after_close_is_an_error_and_closing_twice_is_none(open_it: Open) -> None:
    source = open_it()
    source.close()
    source.close()
    with pytest.raises(SourceError):
        source.read(0, 1)
