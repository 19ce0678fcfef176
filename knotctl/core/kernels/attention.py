"""Causal attention over a KV cache, each query row on its own: nothing depends on how a prompt was chunked.

For one query of one head, over the keys j = 0 … position in ascending order: the score is the dot product (16 lanes
by element, then by halves, as matmul.py sums a float row) times 1/sqrt(D); e = exp(score - largest score); the
denominator sums e in 16 lanes by j, then by halves; an output element sums e·v over ascending j, and is divided last.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels.functions import exp
from knotctl.core.kernels.jit import Kernel, inner
from knotctl.core.kernels.lanes import largest, total
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.quantize import address, float_bits
from knotctl.core.kernels.simd import (
    add,
    div,
    float_of,
    larger,
    load_f32,
    load_f32x16,
    load_first_f32x16,
    mul,
    splat_f32x16,
    store_f32,
    store_f32x16,
    store_first_f32x16,
    sub,
    zero_f32x16,
)
from knotctl.core.kernels.threads import run


@inner
def _dot(x, y, n):
    whole = n // 16 * 16
    acc = zero_f32x16()
    for i in range(0, whole, 16):
        acc = add(acc, mul(load_f32x16(x + 4 * i), load_f32x16(y + 4 * i)))
    if whole < n:
        i, rest = 4 * whole, n - whole
        acc = add(acc, mul(load_first_f32x16(x + i, rest), load_first_f32x16(y + i, rest)))
    return total(acc)


@inner
def _softmax(scores, n):
    """Replace n scores by e^(score - largest) and return their sum; the scores behind n, to a full vector, are lost."""
    lowest = np.float32(-np.inf)
    for j in range(n, (n + 15) // 16 * 16):
        store_f32(scores + 4 * j, lowest)
    most = splat_f32x16(lowest)
    for j in range(0, n, 16):
        most = larger(load_f32x16(scores + 4 * j), most)
    top = splat_f32x16(largest(most))
    acc = zero_f32x16()
    for j in range(0, n, 16):
        e = exp(sub(load_f32x16(scores + 4 * j), top))
        store_f32x16(scores + 4 * j, e)
        acc = add(acc, e)
    return total(acc)


@Kernel
def attention_heads(args, scores, begin, end):
    """Units are heads of tokens."""
    q, k, v, out, heads, group, dim, capacity, position, scale_bits = arguments(args, 10)
    scale = float_of(np.uint32(scale_bits))
    whole = dim // 16 * 16
    rest = dim - whole
    for unit in range(begin, end):
        t, h = unit // heads, unit % heads
        n = position + t + 1
        query, to = q + 4 * unit * dim, out + 4 * unit * dim
        base = 4 * (h // group) * capacity * dim
        for j in range(n):
            store_f32(scores + 4 * j, np.float32(_dot(query, k + base + 4 * j * dim, dim) * scale))
        denominator = splat_f32x16(_softmax(scores, n))
        for i in range(0, whole, 16):
            acc = zero_f32x16()
            at = v + base + 4 * i
            for j in range(n):
                acc = add(acc, mul(splat_f32x16(load_f32(scores + 4 * j)), load_f32x16(at + 4 * j * dim)))
            store_f32x16(to + 4 * i, div(acc, denominator))
        if rest:
            acc = zero_f32x16()
            at = v + base + 4 * whole
            for j in range(n):
                acc = add(acc, mul(splat_f32x16(load_f32(scores + 4 * j)), load_first_f32x16(at + 4 * j * dim, rest)))
            store_first_f32x16(to + 4 * whole, div(acc, denominator), rest)


def attention(
    q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float32], position: int, out: NDArray[np.float32]
) -> None:
    """Write softmax(q·k / sqrt(D))·v to out; row t, at position + t, sees keys 0 … position + t.

    Shapes: q, out f32[T, H, D]; k, v f32[KVH, capacity, D]; all contiguous; head h reads KV head h // (H // KVH).
    """
    tokens, heads, dim = q.shape
    kv_heads, capacity, _ = k.shape
    arrays = address(q), address(k), address(v), address(out)
    shape = heads, heads // kv_heads, dim, capacity, position, float_bits(1 / math.sqrt(dim))
    scores = 4 * (-(-(position + tokens) // 16) * 16)
    run(attention_heads, tokens * heads, 1, (*arrays, *shape), scores)


def store_kv(
    new_k: NDArray[np.float32], new_v: NDArray[np.float32], position: int,
    k: NDArray[np.float32], v: NDArray[np.float32],
) -> None:  # fmt: skip
    """Write the keys and values of T tokens at positions from `position` on into the cache.

    Shapes: new_k, new_v f32[T, KVH, D]; k, v f32[KVH, capacity, D].
    """
    end = position + len(new_k)
    k[:, position:end] = new_k.swapaxes(0, 1)
    v[:, position:end] = new_v.swapaxes(0, 1)
