"""A stream of frames: the same frames at any split, and an error as early as it can be known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.errors import FrameError
from knotctl.core.wire.decoder import FrameDecoder
from knotctl.core.wire.frame import Frame, Segment, encode_frame
from knotctl.core.wire.layout import Kind

ONE = encode_frame(Frame(Kind.TOKENS, bytes(16), (Segment(bytes(16), 0, 1),), np.array([[5]], np.int32)))
TWO = encode_frame(
    Frame(Kind.HIDDEN, bytes(16), (Segment(bytes(16), 1, 2),), np.ones((2, 3), np.float32), {"a": [1]}), compress=True
)


@given(st.lists(st.integers(0, len(ONE) * 2 + len(TWO)), max_size=8))
def test_any_split_gives_the_same_frames(cuts: list[int]) -> None:
    stream = ONE + TWO + ONE
    edges = [0, *sorted(cuts), len(stream)]
    decoder = FrameDecoder()
    found = [f for a, b in itertools.pairwise(edges) for f in decoder.feed(stream[a:b])]
    decoder.finish()
    assert [encode_frame(f, compress=f.kind is Kind.HIDDEN) for f in found] == [ONE, TWO, ONE]


def test_every_frame_before_the_bad_one_is_delivered() -> None:
    decoder = FrameDecoder()
    found = []
    with pytest.raises(FrameError) as e:
        for frame in decoder.feed(ONE + TWO + b"HTTP/1.1"):
            found.append(frame)  # noqa: PERF402
    assert len(found) == 2
    assert e.value.code == "bad-magic"
    with pytest.raises(FrameError):
        decoder.feed(ONE)
    with pytest.raises(FrameError):
        decoder.finish()


def test_garbage_is_refused_at_its_first_byte() -> None:
    decoder = FrameDecoder()
    assert list(decoder.feed(b"AW")) == []
    with pytest.raises(FrameError) as e:
        list(decoder.feed(b"X"))
    assert e.value.code == "bad-magic"


def test_a_bad_header_is_refused_before_its_body_is_waited_for() -> None:
    decoder = FrameDecoder()
    with pytest.raises(FrameError) as e:
        list(decoder.feed(ONE[:60] + b"\0\0\0\0"))
    assert e.value.code == "bad-header-crc"


@pytest.mark.parametrize("end", [1, 63, 64, len(ONE) - 1])
def test_a_stream_that_ends_within_a_frame_is_truncated(end: int) -> None:
    decoder = FrameDecoder()
    assert list(decoder.feed(ONE[:end])) == []
    with pytest.raises(FrameError) as e:
        decoder.finish()
    assert e.value.code == "truncated"
