from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.errors import FormatError
from knotctl.core.tensor.records import RECORD_BYTES, RecordKind, encode_record, open_record, split_records

ID, OTHER = bytes(range(16)), bytes(16)
DATA = random.Random(2).randbytes(1000)
RECORD = encode_record(RecordKind.STORED, ID, 7, DATA)


def opened(record: bytes) -> bytes | None:
    return open_record(record, RecordKind.STORED, ID, 7, len(DATA))


def test_a_record_gives_its_data_back() -> None:
    assert opened(RECORD) == DATA
    assert len(RECORD) == RECORD_BYTES + len(DATA)
    assert split_records(RECORD + RECORD, 2) == [(RecordKind.STORED, 7, RECORD)] * 2


def test_one_flipped_bit_anywhere_is_told() -> None:
    for at in [*range(RECORD_BYTES + 20), len(RECORD) - 1]:
        for bit in range(8):
            bad = bytearray(RECORD)
            bad[at] ^= 1 << bit
            assert opened(bytes(bad)) is None


def test_a_right_record_of_something_else_is_told() -> None:
    assert open_record(RECORD, RecordKind.FLOATS, ID, 7, len(DATA)) is None
    assert open_record(RECORD, RecordKind.STORED, OTHER, 7, len(DATA)) is None
    assert open_record(RECORD, RecordKind.STORED, ID, 8, len(DATA)) is None
    assert open_record(RECORD, RecordKind.STORED, ID, 7, len(DATA) - 1) is None
    for cut in (0, 1, RECORD_BYTES, len(RECORD) - 1):
        assert opened(RECORD[:cut]) is None
    assert opened(RECORD + b"\0") is None


@given(st.binary(max_size=300), st.integers(0, 300))
def test_a_reply_of_anything_is_records_or_refused(junk: bytes, cut: int) -> None:
    for body in (junk, RECORD[:cut] + junk, RECORD + junk):
        try:
            parts = split_records(body, 10)
        except FormatError as e:
            assert e.code == "bad-records"
        else:
            assert b"".join(record for _, _, record in parts) == body


def test_more_records_than_asked_for_are_refused() -> None:
    with pytest.raises(FormatError, match="at most 2"):
        split_records(RECORD * 3, 2)


def test_a_length_of_everything_allocates_nothing() -> None:
    bad = bytearray(RECORD)
    bad[32:40] = b"\xff" * 8
    with pytest.raises(FormatError):
        split_records(bytes(bad), 1)
