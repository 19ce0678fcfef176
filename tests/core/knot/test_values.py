"""A scale is looked for where ggml has it: a NaN put there makes NaN of exactly that block's elements."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from knotctl.core.knot.values import _SCALES, ValueCheck
from knotctl.core.qtypes import QTYPES

NAN = {"<u2": b"\x00\x7e", "<u4": b"\x00\x00\xc0\x7f", "<u8": b"\0\0\0\0\0\0\xf8\x7f"}
BLOCKS = 5


def blocks_of(name: str) -> bytearray:
    """Random quants under small scales; no element is NaN."""
    scales, qtype = _SCALES[name], QTYPES[name]
    rng = np.random.default_rng(1)
    raw = bytearray(rng.integers(0, 256, BLOCKS * qtype.block_bytes, np.uint8).tobytes())
    width = np.dtype(scales.dtype).itemsize
    one = {2: b"\x00\x2c", 4: np.float32(0.1).tobytes(), 8: np.float64(0.1).tobytes()}[width]
    if name == "BF16":
        one = b"\xcc\x3d"
    for block in range(BLOCKS):
        for offset in scales.offsets:
            at = block * qtype.block_bytes + offset
            raw[at : at + width] = one
    return raw


@pytest.mark.parametrize("name", sorted(_SCALES))
def test_scales_lie_where_ggml_has_them(name: str) -> None:
    qtype, scales = QTYPES[name], _SCALES[name]
    kind = gguf.GGMLQuantizationType(qtype.ggml)
    nan = b"\xc0\x7f" if name == "BF16" else NAN[scales.dtype]
    for offset in scales.offsets:
        raw = blocks_of(name)
        at = 3 * qtype.block_bytes + offset
        raw[at : at + len(nan)] = nan
        check = ValueCheck(qtype)
        check.look(memoryview(raw), 10)
        assert (check.non_finite, check.first_non_finite, check.insane, check.all_zero) == (1, 13, 0, False)
        try:
            values = gguf.quants.dequantize(np.frombuffer(bytes(raw), np.uint8), kind)
        except (NotImplementedError, KeyError):
            continue
        broken = np.isnan(np.asarray(values, np.float64).reshape(BLOCKS, -1)).any(axis=1)
        assert broken.tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("name", sorted(set(QTYPES) - {"I8", "I16", "I32", "I64"}))
def test_every_type_of_numbers_is_looked_at_or_said_not_to_be(name: str) -> None:
    # IQ1_M spreads its scale over four places, MXFP4 and NVFP4 have eight-bit exponents: any byte is a sane scale.
    assert (name in _SCALES) == (name not in {"IQ1_M", "MXFP4", "NVFP4"})


def test_a_shifted_payload_is_told_within_a_few_blocks() -> None:
    raw = np.random.default_rng(2).integers(0, 256, 144 * 64, np.uint8).tobytes()
    check = ValueCheck(QTYPES["Q4_K"])
    check.look(memoryview(raw), 0)
    assert check.insane + check.non_finite > 10


def test_zeros_are_told_only_where_all_are() -> None:
    check = ValueCheck(QTYPES["Q8_0"])
    check.look(memoryview(bytes(34 * 4)), 0)
    assert check.all_zero
    check.look(memoryview(blocks_of("Q8_0")), 4)
    assert not check.all_zero
