"""Every kernel again in plain numpy, operation for operation: the definition that tests hold kernels to, bit by bit.

Each numpy step on f32 arrays is one rounded operation, so equality is exact. Slow; used by tests and nothing else.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels import functions as fn
from knotctl.core.kernels.decode import Buffer, decode_rows, unpack_blocks
from knotctl.core.kernels.quantize import TINY, TOWERS
from knotctl.core.qtypes import QType

F32 = NDArray[np.float32]
f32 = np.float32


def lane_sum(x: F32) -> F32:
    """Return the sum over the last axis: 16 lanes by index, ascending, then lanes by halves."""
    lanes = np.zeros((*x.shape[:-1], 16), f32)
    for i in range(0, x.shape[-1], 16):
        part = x[..., i : i + 16]
        lanes[..., : part.shape[-1]] += part
    for n in (8, 4, 2, 1):
        lanes = lanes[..., :n] + lanes[..., n : 2 * n]
    return lanes[..., 0]


def quantize(x: F32, block: int) -> list[tuple[NDArray[np.int8], F32]]:
    """Return two planes, each quants i8[T, K / block, block] and scales f32[T, K / block]; 0 where there is none."""
    blocks = x.reshape(len(x), -1, block)
    most = np.abs(blocks).max(axis=2)
    used = most >= f32(TINY)
    scales = np.where(used, most / f32(127), f32(0))
    inverse = np.where(used, f32(127) / np.where(used, most, f32(1)), f32(0))
    quants = np.rint(blocks * inverse[:, :, None])
    limit = np.sqrt(lane_sum(x * x) / f32(x.shape[1])) * f32(TOWERS)
    towers = used & (most > limit[:, None])
    rest = blocks - scales[:, :, None] * quants
    quants2 = np.where(towers[:, :, None], np.rint(rest * (inverse * f32(254))[:, :, None]), f32(0))
    assert np.abs(quants2).max(initial=0) <= 127
    scales2 = np.where(towers, scales / f32(254), f32(0))
    return [(quants.astype(np.int8), scales), (quants2.astype(np.int8), scales2)]


def matmul(qtype: QType, raw: Buffer, columns: int, x: F32) -> F32:
    """Return f32[T, rows]. Shapes: x f32[T, columns]."""
    if qtype.block == 1:
        w = decode_rows(qtype, raw, columns)
        return np.stack([lane_sum(w * row) for row in x])
    n = columns // qtype.block
    taken = unpack_blocks(qtype, raw)
    rows = len(taken.d) // n
    groups = 1 if taken.scales is None else taken.scales.shape[1]
    wq = taken.quants.astype(np.int64).reshape(rows, n, groups, -1)
    if taken.scales is not None:
        wq = wq * taken.scales.reshape(rows, n, groups, 1)
    d = taken.d.reshape(rows, n).T
    m = None if taken.m is None else taken.m.reshape(rows, n).T
    mins = None if taken.mins is None else taken.mins.reshape(rows, n, 8)
    sums = []
    for quants, scales in quantize(x, qtype.block):
        f = np.zeros((len(x), rows), f32)
        for b in range(n):
            q, a = quants[:, b].astype(np.int64), scales[:, b, None]
            isum = q @ wq[:, b].reshape(rows, qtype.block).T
            assert np.abs(isum).max(initial=0) < 2**31
            y = f + isum.astype(f32) * (d[b] * a)
            if m is not None and mins is not None:
                msum = q.reshape(len(x), 8, 32).sum(2) @ mins[:, b].T
                y = y - msum.astype(f32) * (m[b] * a)
            elif m is not None:
                y = y + m[b] * (a * q.sum(1)[:, None].astype(f32))
            f = np.where(a != 0, y, f)
        sums.append(f)
    return sums[0] + sums[1]


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Return the norm of each row. Shapes: x f32[T, K]."""
    mean = lane_sum(x * x) / f32(x.shape[1])
    return x * (f32(1) / np.sqrt(mean + f32(eps)))[:, None] * weight


def exp(x: F32) -> F32:
    """Return e^x as the kernels compute it."""
    magic = f32(fn.MAGIC)
    with np.errstate(invalid="ignore", over="ignore"):
        n = x * f32(fn.LOG2E) + magic - magic
        r = x - n * f32(fn.LN2_HIGH) - n * f32(fn.LN2_LOW)
        p = np.full_like(x, fn.EXP[4])
        for c in fn.EXP[3::-1]:
            p = p * r + f32(c)
        power = ((n + magic).view(np.int32) + np.int32(127) << 23).view(f32)
        y = (p * (r * r) + r + f32(1)) * power
    y = np.where(x < f32(fn.EXP_LOWEST), f32(0), y)
    return np.where(x > f32(fn.EXP_HIGHEST), f32(np.inf), y)


def swiglu(gate: F32, up: F32) -> F32:
    """Return silu(gate)·up."""
    return gate / (f32(1) + exp(f32(0) - gate)) * up


def cosine_and_sine(angle: NDArray[np.float64]) -> tuple[F32, F32]:
    """Return cos and sin in f32."""
    n = angle * (2 / np.pi) + fn.MAGIC_64 - fn.MAGIC_64
    r = angle - n * fn.HALF_PI_HIGH - n * fn.HALF_PI_LOW
    z = r * r
    p, q = np.full_like(z, fn.SIN[5]), np.full_like(z, fn.COS[5])
    for s, c in zip(fn.SIN[4::-1], fn.COS[4::-1], strict=True):
        p, q = p * z + s, q * z + c
    sine, cosine = r + r * z * p, 1 + z * q
    quarter = n.astype(np.int64) & 3
    sine, cosine = np.where(quarter & 1, cosine, sine), np.where(quarter & 1, -sine, cosine)
    sign = np.where(quarter & 2, -1.0, 1.0)
    return (cosine * sign).astype(f32), (sine * sign).astype(f32)


def rope(x: F32, positions: NDArray[np.int64], inv_freq: F32, interleaved: bool) -> F32:
    """Return f32[T, H, D] turned."""
    out = x.copy()
    pairs = len(inv_freq)
    cosine, sine = cosine_and_sine(positions[:, None].astype(np.float64) * inv_freq.astype(np.float64))
    c, s = cosine[:, None, :], sine[:, None, :]
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * c - b * s, a * s + b * c
    return out


def attention(q: F32, k: F32, v: F32, position: int) -> F32:
    """Return f32[T, H, D]."""
    out = np.empty_like(q)
    tokens, heads, dim = q.shape
    group = heads // len(k)
    for t in range(tokens):
        for h in range(heads):
            n = position + t + 1
            keys, values = k[h // group, :n], v[h // group, :n]
            scores = lane_sum(keys * q[t, h]) * f32(1 / math.sqrt(dim))
            e = exp(scores - scores.max())
            acc = np.zeros(dim, f32)
            for j in range(n):
                acc = acc + e[j] * values[j]
            out[t, h] = acc / lane_sum(e)
    return out
