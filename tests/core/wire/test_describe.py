"""What inspect tells of a frame agrees with the frame's numbers."""

from __future__ import annotations

import json

import numpy as np

from knotctl.core.wire.describe import describe_frame
from knotctl.core.wire.frame import Frame, Segment, encode_frame
from knotctl.core.wire.layout import DType, Flags, Kind, Mode

SEGMENTS = (Segment(b"\xab" * 16, 5, 2, Mode.DECODE),)


def test_logits_statistics_and_best_tokens() -> None:
    x = np.array([[1, 3, 3, -2], [0, 0, 0, 0]], np.float32)
    data = encode_frame(Frame(Kind.LOGITS, b"\x01" * 16, SEGMENTS, x, {"a": 1}, Flags.LAST), compress=True)
    report = describe_frame(data, top=3)
    assert report.top == (((1, 3.0), (2, 3.0), (0, 1.0)), ((0, 0.0), (1, 0.0), (2, 0.0)))
    s = report.statistics
    assert s is not None
    assert (s.minimum, s.maximum, s.mean, s.zero_rows, s.not_finite) == (-2, 3, 5 / 8, 1, 0)
    assert s.rms == np.sqrt(23 / 8)
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert document["flags"] == ["zstd", "last"]
    assert document["segments"] == [{"request_id": "ab" * 16, "position": 5, "n_tokens": 2, "mode": "decode"}]
    assert (document["kind"], document["dtype"], document["knot_id"]) == ("logits", "f32", "01" * 16)


def test_numbers_that_are_none_are_counted_and_kept_out() -> None:
    x = np.array([[np.nan, 2, np.inf, 4]], np.float32)
    data = encode_frame(Frame(Kind.LOGITS, bytes(16), (Segment(bytes(16), 0, 1),), x))
    report = describe_frame(data, top=4)
    assert report.statistics is not None
    assert (report.statistics.not_finite, report.statistics.maximum) == (2, 4)
    assert report.top == (((3, 4.0), (1, 2.0)),)
    json.dumps(report.to_json(), allow_nan=False)


def test_nothing_finite_at_all() -> None:
    x = np.full((1, 2), np.nan, np.float32)
    report = describe_frame(encode_frame(Frame(Kind.HIDDEN, bytes(16), (Segment(bytes(16), 0, 1),), x)))
    assert report.statistics is not None
    assert report.statistics.not_finite == 2


def test_ids_are_listed_and_errors_have_no_numbers() -> None:
    ids = Frame(Kind.TOKENS, bytes(16), SEGMENTS, np.array([[5], [6]], np.int32))
    assert describe_frame(encode_frame(ids)).to_json()["tokens"] == [5, 6]
    error = Frame(Kind.ERROR, bytes(16), (), np.zeros((0, 0), np.float32), {"error": {"code": "x"}})
    report = describe_frame(encode_frame(error, dtype=DType.F16))
    assert (report.statistics, report.tokens, report.top) == (None, None, None)
