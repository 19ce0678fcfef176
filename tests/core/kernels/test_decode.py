"""Decoding: ggml's numbers, bit for bit."""

from __future__ import annotations

import subprocess
import sys

import gguf
import numpy as np
import pytest
from kernel_samples import QUANTISED, TYPES, odd, random_rows

from knotctl.core.errors import ModelError
from knotctl.core.kernels.decode import decode_rows
from knotctl.core.qtypes import QTYPES, QType


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_decoding_equals_ggmls_dequantisation_bit_for_bit(qtype: QType) -> None:
    raw = random_rows(np.random.default_rng(1), qtype, 13, 512)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[qtype.name]).reshape(13, 512)
    found = decode_rows(qtype, raw, 512)
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("qtype", QUANTISED, ids=lambda t: t.name)
def test_any_bytes_decode_as_ggml_decodes_them(qtype: QType) -> None:
    raw = odd(np.random.default_rng(2).integers(0, 256, 64 * qtype.block_bytes, np.uint8))
    with np.errstate(all="ignore"):  # scales may be infinite or NaN here
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[qtype.name]).reshape(64, qtype.block)
        found = decode_rows(qtype, raw, qtype.block)
    assert np.array_equal(found, expected, equal_nan=True)


def test_bytes_and_views_decode_alike() -> None:
    raw = random_rows(np.random.default_rng(3), QTYPES["Q4_K"], 2, 256)
    assert np.array_equal(decode_rows(QTYPES["Q4_K"], raw.tobytes(), 256), decode_rows(QTYPES["Q4_K"], raw.data, 256))


def test_no_rows_are_no_rows() -> None:
    assert decode_rows(QTYPES["Q6_K"], b"", 256).shape == (0, 256)


def test_a_type_without_a_kernel_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="IQ4_XS") as e:
        decode_rows(QTYPES["IQ4_XS"], bytes(136), 256)
    assert e.value.code == "unsupported-type"


def test_decoding_needs_no_numba() -> None:
    check = "import sys, knotctl.core.kernels.decode; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
