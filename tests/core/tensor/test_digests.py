"""Bytes that come from a store are compared with the knot's digests before anything is computed with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from knotctl.core.errors import SourceError
from knotctl.core.knot.layout import DIGEST_CHUNK
from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.source.base import ByteSource
from knotctl.core.source.opening import open_source
from knotctl.core.tensor.digests import CheckedSource


class Spoiled:
    """A source that flips one bit of one byte, in so many reads of it."""

    def __init__(self, inner: ByteSource) -> None:
        self.inner = inner
        self.name, self.size, self.identity = inner.name, inner.size, inner.identity
        self.at: int | None = None
        self.times, self.reads = 10**9, 0

    def read(self, offset: int, length: int) -> bytes:
        out = bytearray(length)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> None:
        self.reads += 1
        self.inner.read_into(offset, out)
        if self.at is not None and offset <= self.at < offset + len(out) and self.times > 0:
            self.times -= 1
            out[self.at - offset] ^= 1

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def spoiled(tiny: Callable[[str], Path]) -> Spoiled:
    return Spoiled(open_source(str(tiny("tiny"))))


@pytest.fixture
def knot(spoiled: Spoiled) -> Iterator[Knot]:
    with open_knot(spoiled) as opened:
        opened.source = CheckedSource(opened)
        yield opened


def neighbours(knot: Knot) -> tuple[int, int]:
    """Where the tensors of layer 1 begin and end: as one read has them."""
    spans = [knot.range_of(t.name) for t in knot.header.tensors if t.name.startswith("blk_1_")]
    return min(s.start for s in spans), max(s.end for s in spans)


def test_a_bit_of_a_tensor_that_is_wrong_is_found_and_its_tensor_named(knot: Knot, spoiled: Spoiled) -> None:
    start, end = neighbours(knot)
    good = knot.source.read(start, end - start)
    for name in ("blk_1_attn_norm_weight", "blk_1_ffn_down_weight"):
        span = knot.range_of(name)
        for at in (span.start, span.end - 1):
            spoiled.at = at
            with pytest.raises(SourceError, match=name) as e:
                knot.source.read(start, end - start)
            assert e.value.code == "digest-mismatch"
    spoiled.at = None
    assert knot.source.read(start, end - start) == good


def test_what_was_spoiled_once_is_read_once_more(knot: Knot, spoiled: Spoiled) -> None:
    start, end = neighbours(knot)
    good = knot.source.read(start, end - start)
    spoiled.at, spoiled.times, reads = start + 5, 1, spoiled.reads
    assert knot.source.read(start, end - start) == good
    assert spoiled.reads == reads + 2


def test_a_few_rows_cost_one_read(knot: Knot, spoiled: Spoiled) -> None:
    span, reads = knot.range_of("token_embd_weight"), spoiled.reads
    knot.source.read(span.start + 64, 64)
    assert spoiled.reads == reads + 1


@pytest.mark.model
def test_of_a_part_of_a_tensor_whole_chunks_are_looked_at(knot_of: Callable[[str], Path]) -> None:
    spoiled = Spoiled(open_source(str(knot_of("smollm2"))))
    with open_knot(spoiled) as knot:
        knot.source = CheckedSource(knot)
        span = knot.range_of("token_embd_weight")
        part = 3 * DIGEST_CHUNK
        knot.source.read(span.start + 1000, part)
        spoiled.at = span.start + 1000 + part // 2
        with pytest.raises(SourceError, match="chunk"):
            knot.source.read(span.start + 1000, part)
