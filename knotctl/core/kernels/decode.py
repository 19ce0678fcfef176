"""Blocks to numbers with numpy alone: what embedding rows, norms and checks are read with (and no numba import).

Every type is first taken apart into integers and scales (`unpack_blocks`), which the kernels' oracle works on too.
Source: ggml's `block_q4_0` … `block_q6_K`; man knot(5), TYPES. Bit-equal to `gguf.quants.dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knotctl.core.errors import ModelError
from knotctl.core.qtypes import COMPUTABLE, QType

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
Buffer = bytes | bytearray | memoryview | U8


class Blocks(NamedTuple):
    """n blocks taken apart. An element is d·scale·quant, then + m (32-element types) or - dmin·min (256-element types).

    Shapes: quants i8[n, block]; d f32[n]; m f32[n] is m or dmin; scales i32[n, groups] and mins i32[n, 8]: a group is
    block // groups consecutive elements, a min belongs to 32 elements. None where the type has none.
    """

    quants: NDArray[np.int8]
    d: F32
    m: F32 | None = None
    scales: I32 | None = None
    mins: I32 | None = None


def _half(raw: U8) -> F32:
    """Return the f16 numbers of u8[n, 2] in f32."""
    return np.ascontiguousarray(raw).view("<f2")[:, 0].astype(np.float32)


def _nibbles(qs: U8, run: int) -> U8:
    """Return u8[n, 2·len]: of each run of bytes all low nibbles, then all high ones."""
    n, size = qs.shape
    q = qs.reshape(n, size // run, 1, run)
    return np.concatenate((q & 15, q >> 4), axis=2).reshape(n, 2 * size)


def _bits(qh: U8) -> U8:
    """Return u8[n, 8·len]: the bits of a little-endian bit field, lowest first."""
    return np.unpackbits(qh, axis=1, count=8 * qh.shape[1], bitorder="little")


# Q4_0: d f16 | 16 bytes: byte i holds elements i (low nibble) and i + 16; quant - 8
def _q4_0(b: U8) -> Blocks:
    return Blocks(_nibbles(b[:, 2:], 16).astype(np.int8) - np.int8(8), _half(b[:, :2]))


# Q4_1: d f16 | m f16 | 16 bytes as Q4_0; quant unsigned
def _q4_1(b: U8) -> Blocks:
    return Blocks(_nibbles(b[:, 4:], 16).astype(np.int8), _half(b[:, :2]), _half(b[:, 2:4]))


# Q5_0: d f16 | u32: bit i is bit 4 of element i | 16 bytes as Q4_0; quant - 16
def _q5_0(b: U8) -> Blocks:
    q = _nibbles(b[:, 6:], 16) | _bits(b[:, 2:6]) << 4
    return Blocks(q.astype(np.int8) - np.int8(16), _half(b[:, :2]))


# Q5_1: d f16 | m f16 | u32 and 16 bytes as Q5_0; quant unsigned
def _q5_1(b: U8) -> Blocks:
    q = _nibbles(b[:, 8:], 16) | _bits(b[:, 4:8]) << 4
    return Blocks(q.astype(np.int8), _half(b[:, :2]), _half(b[:, 2:4]))


# Q8_0: d f16 | 32 i8
def _q8_0(b: U8) -> Blocks:
    return Blocks(np.ascontiguousarray(b[:, 2:]).view(np.int8), _half(b[:, :2]))


def _scales_and_mins(s: U8) -> tuple[I32, I32]:
    """Return the eight 6-bit scales and mins of 12 bytes.

    Bytes 0-3: scales 0-3 in the low 6 bits; bytes 4-7: mins 0-3; bytes 8-11: low 4 bits of scale 4-7 and, above them,
    of min 4-7, whose upper 2 bits are the top bits of bytes 0-3 and 4-7.
    """
    a, b, c = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = np.concatenate((a & 63, c & 15 | a >> 6 << 4), axis=1)
    mins = np.concatenate((b & 63, c >> 4 | b >> 6 << 4), axis=1)
    return scales.astype(np.int32), mins.astype(np.int32)


# Q4_K: d f16 | dmin f16 | 12 bytes of 6-bit scales and mins | 4 runs of 32 bytes: 32 low nibbles, then 32 high ones
def _q4_k(b: U8) -> Blocks:
    scales, mins = _scales_and_mins(b[:, 4:16])
    return Blocks(_nibbles(b[:, 16:], 32).astype(np.int8), _half(b[:, :2]), _half(b[:, 2:4]), scales, mins)


# Q5_K: head as Q4_K | 32 bytes: bit g of byte i is bit 4 of element 32g + i | 128 bytes as Q4_K
def _q5_k(b: U8) -> Blocks:
    scales, mins = _scales_and_mins(b[:, 4:16])
    high = _bits(b[:, 16:48]).reshape(len(b), 32, 8).swapaxes(1, 2).reshape(len(b), 256)
    quants = (_nibbles(b[:, 48:], 32) | high << 4).astype(np.int8)
    return Blocks(quants, _half(b[:, :2]), _half(b[:, 2:4]), scales, mins)


# Q6_K: 128 bytes: 2 runs of 64, low 4 bits as Q4_0 nibbles | 64 bytes: 2 runs of 32, bits 2g and 2g+1 of byte i are
#       the high bits of element 32g + i of its 128 | 16 i8 scales | d f16; quant - 32
def _q6_k(b: U8) -> Blocks:
    qh = b[:, 128:192].reshape(len(b), 2, 1, 32)
    high = np.concatenate([qh >> s & 3 for s in (0, 2, 4, 6)], axis=2).reshape(len(b), 256)
    quants = (_nibbles(b[:, :128], 64) | high << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.int32)
    return Blocks(quants, _half(b[:, 208:210]), scales=scales)


_UNPACK: dict[str, Callable[[U8], Blocks]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


def check_computable(qtype: QType) -> None:
    """Refuse a type that no kernel multiplies with. Raises: ModelError unsupported-type."""
    if qtype.name not in COMPUTABLE:
        known = " ".join(sorted(COMPUTABLE))
        raise ModelError("unsupported-type", f"type {qtype.name}: no kernel computes with it; expected one of {known}")


def unpack_blocks(qtype: QType, raw: Buffer) -> Blocks:
    """Return whole blocks of a quantised type taken apart into integers and scales."""
    return _UNPACK[qtype.name](np.frombuffer(raw, np.uint8).reshape(-1, qtype.block_bytes))


def _decode_float(qtype: QType, raw: Buffer) -> F32:
    """Return F32, F16 or BF16 bytes as f32; a BF16 is the upper half of an f32."""
    if qtype.name == "F32":
        return np.frombuffer(raw, "<f4").astype(np.float32)
    if qtype.name == "F16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


def decode_rows(qtype: QType, raw: Buffer, columns: int) -> F32:
    """Return rows of blocks as numbers, bit-equal to ggml's dequantisation.

    Shapes: raw holds whole rows; f32[rows, columns].
    Raises: ModelError unsupported-type.
    """
    check_computable(qtype)
    if qtype.block == 1:
        return _decode_float(qtype, raw).reshape(-1, columns)
    b = unpack_blocks(qtype, raw)
    groups = 1 if b.scales is None else b.scales.shape[1]
    x = b.quants.astype(np.float32).reshape(len(b.d), groups, qtype.block // groups)
    # The products of ggml, in ggml's order: an f32 result depends on it.
    d = b.d[:, None] if b.scales is None else b.d[:, None] * b.scales.astype(np.float32)
    x *= d[:, :, None]
    if b.m is not None:
        x += b.m[:, None, None] if b.mins is None else -(b.m[:, None] * b.mins.astype(np.float32))[:, :, None]
    return x.reshape(-1, columns)
