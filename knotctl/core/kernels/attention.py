"""Causal attention over a KV cache, each query row on its own: nothing depends on how a prompt was chunked.

For one query of one head, over the keys j = 0 … position in ascending order: the score is the dot product (16 lanes
by element, then by halves, as matmul.py sums a float row) times 1/sqrt(D); e = exp(score - largest score); the
denominator sums e in 16 lanes by j, then by halves; an output element sums e·v over ascending j, and is divided last.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels.addresses import address, float_bits
from knotctl.core.kernels.functions import exp
from knotctl.core.kernels.jit import Kernel, inner
from knotctl.core.kernels.lanes import largest, load_half, load_half_f32x16, total, totals
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.simd import (
    add,
    div,
    float_of,
    larger,
    load_f32,
    load_f32x16,
    load_first_f32x16,
    load_i64,
    mul,
    splat_f32x16,
    store_f32,
    store_f32x16,
    store_first_f32x16,
    sub,
    zero_f32x16,
)
from knotctl.core.kernels.threads import get_threads, run

# Bytes of scores that a thread keeps between its passes: they stay in the second-level cache.
_SCORES = 256 << 10
_KEYS = 32  # values of so many keys (16 KiB of 128 elements) stay in the first-level cache while all queries add them


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


@inner
def _sixteen_scores(q, k, step):
    """Return the dot products of a query with 16 keys, `step` bytes apart."""
    s0, s1, s2, s3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    s4, s5, s6, s7 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    s8, s9, sa, sb = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    sc, sd, se, sf = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    for i in range(0, step, 64):
        x, y = load_f32x16(q + i), k + i
        s0, s1 = add(s0, mul(x, load_f32x16(y))), add(s1, mul(x, load_f32x16(y + step)))
        s2, s3 = add(s2, mul(x, load_f32x16(y + 2 * step))), add(s3, mul(x, load_f32x16(y + 3 * step)))
        s4, s5 = add(s4, mul(x, load_f32x16(y + 4 * step))), add(s5, mul(x, load_f32x16(y + 5 * step)))
        s6, s7 = add(s6, mul(x, load_f32x16(y + 6 * step))), add(s7, mul(x, load_f32x16(y + 7 * step)))
        y += 8 * step
        s8, s9 = add(s8, mul(x, load_f32x16(y))), add(s9, mul(x, load_f32x16(y + step)))
        sa, sb = add(sa, mul(x, load_f32x16(y + 2 * step))), add(sb, mul(x, load_f32x16(y + 3 * step)))
        sc, sd = add(sc, mul(x, load_f32x16(y + 4 * step))), add(sd, mul(x, load_f32x16(y + 5 * step)))
        se, sf = add(se, mul(x, load_f32x16(y + 6 * step))), add(sf, mul(x, load_f32x16(y + 7 * step)))
    return totals((s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, sa, sb, sc, sd, se, sf))


@inner
def _add_128(out, e, v, keys, step):
    """Add e·v of so many keys to 128 elements of an output: 8 sums hide the latency of an addition."""
    a0, a1, a2, a3 = load_f32x16(out), load_f32x16(out + 64), load_f32x16(out + 128), load_f32x16(out + 192)
    a4, a5, a6, a7 = load_f32x16(out + 256), load_f32x16(out + 320), load_f32x16(out + 384), load_f32x16(out + 448)
    for j in range(keys):
        p, at = splat_f32x16(load_f32(e + 4 * j)), v + j * step
        a0, a1 = add(a0, mul(p, load_f32x16(at))), add(a1, mul(p, load_f32x16(at + 64)))
        a2, a3 = add(a2, mul(p, load_f32x16(at + 128))), add(a3, mul(p, load_f32x16(at + 192)))
        a4, a5 = add(a4, mul(p, load_f32x16(at + 256))), add(a5, mul(p, load_f32x16(at + 320)))
        a6, a7 = add(a6, mul(p, load_f32x16(at + 384))), add(a7, mul(p, load_f32x16(at + 448)))
    store_f32x16(out, a0)
    store_f32x16(out + 64, a1)
    store_f32x16(out + 128, a2)
    store_f32x16(out + 192, a3)
    store_f32x16(out + 256, a4)
    store_f32x16(out + 320, a5)
    store_f32x16(out + 384, a6)
    store_f32x16(out + 448, a7)


@inner
def _add_64(out, e, v, keys, step):
    """Add e·v of so many keys to 64 elements of an output."""
    a0, a1, a2, a3 = load_f32x16(out), load_f32x16(out + 64), load_f32x16(out + 128), load_f32x16(out + 192)
    for j in range(keys):
        p, at = splat_f32x16(load_f32(e + 4 * j)), v + j * step
        a0, a1 = add(a0, mul(p, load_f32x16(at))), add(a1, mul(p, load_f32x16(at + 64)))
        a2, a3 = add(a2, mul(p, load_f32x16(at + 128))), add(a3, mul(p, load_f32x16(at + 192)))
    store_f32x16(out, a0)
    store_f32x16(out + 64, a1)
    store_f32x16(out + 128, a2)
    store_f32x16(out + 192, a3)


@inner
def _add_values(out, e, v, keys, dim):
    """Add e·v of so many keys to an output."""
    d, step = 0, 4 * dim
    while d + 128 <= dim:
        _add_128(out + 4 * d, e, v + 4 * d, keys, step)
        d += 128
    while d + 64 <= dim:
        _add_64(out + 4 * d, e, v + 4 * d, keys, step)
        d += 64
    while d < dim:
        n = min(16, dim - d)
        a0 = load_first_f32x16(out + 4 * d, n)
        for j in range(keys):
            p = splat_f32x16(load_f32(e + 4 * j))
            a0 = add(a0, mul(p, load_first_f32x16(v + j * step + 4 * d, n)))
        store_first_f32x16(out + 4 * d, a0, n)
        d += 16


@inner
def _score_group(q, k, scores, keys, dim, scale):
    """Write the scores of up to 16 keys of a query."""
    step = 4 * dim
    if keys == 16 and dim % 16 == 0:
        store_f32x16(scores, mul(_sixteen_scores(q, k, step), splat_f32x16(scale)))
    else:
        for j in range(keys):
            store_f32(scores + 4 * j, np.float32(_dot(q, k + j * step, dim) * scale))


@inner
def _in_f32(x, size, offset, count, room):
    """Return the address of `count` numbers from number `offset` of x on as f32: where they lie, or in `room`.

    The queries of a unit share the conversion of f16.
    """
    if size == 4:
        return x + 4 * offset
    at, whole = x + 2 * offset, count // 16 * 16
    for i in range(0, whole, 16):
        store_f32x16(room + 4 * i, load_half_f32x16(at + 2 * i))
    for i in range(whole, count):
        store_f32(room + 4 * i, load_half(at + 2 * i))
    return room


@inner
def _divide(out, denominator, dim):
    by = splat_f32x16(denominator)
    for i in range(0, dim, 16):
        n = min(16, dim - i)
        store_first_f32x16(out + 4 * i, div(load_first_f32x16(out + 4 * i, n), by), n)


@Kernel
def attention_groups(args, scratch, begin, end):
    """Units are `share` heads of one KV head, for `many` tokens: their keys and values come once from far away."""
    q, k, v, out, heads, group, dim, capacity, positions, scale_bits, tokens, share, many, size = arguments(args, 14)
    position = load_i64(positions)
    scale, shares = float_of(np.uint32(scale_bits)), heads // share
    row, room = 4 * heads * dim, 4 * ((position + tokens + 15) // 16 * 16)
    denominators = scratch + many * share * room
    block = denominators + 4 * many * share
    for unit in range(begin, end):
        t0, h0 = unit // shares * many, unit % shares * share
        t1 = min(t0 + many, tokens)
        base, all_keys = (h0 // group) * capacity * dim, position + t1
        for first in range(0, all_keys, 16):
            keys = _in_f32(k, size, base + first * dim, min(16, all_keys - first) * dim, block)
            for t in range(max(t0, first - position), t1):
                for h in range(share):
                    to = scratch + ((t - t0) * share + h) * room + 4 * first
                    n = min(16, position + t + 1 - first)
                    _score_group(q + t * row + 4 * (h0 + h) * dim, keys, to, n, dim, scale)
        for t in range(t0, t1):
            for h in range(share):
                i = (t - t0) * share + h
                store_f32(denominators + 4 * i, _softmax(scratch + i * room, position + t + 1))
                to = out + t * row + 4 * (h0 + h) * dim
                for d in range(0, dim, 16):
                    store_first_f32x16(to + 4 * d, zero_f32x16(), min(16, dim - d))
        for first in range(0, all_keys, _KEYS):
            values = _in_f32(v, size, base + first * dim, min(_KEYS, all_keys - first) * dim, block)
            for t in range(max(t0, first - position), t1):
                n = min(_KEYS, position + t + 1 - first)
                for h in range(share):
                    to, e = out + t * row + 4 * (h0 + h) * dim, scratch + ((t - t0) * share + h) * room
                    _add_values(to, e + 4 * first, values, n, dim)
        for t in range(t0, t1):
            for h in range(share):
                denominator = load_f32(denominators + 4 * ((t - t0) * share + h))
                _divide(out + t * row + 4 * (h0 + h) * dim, denominator, dim)


def _row_bytes(keys: int) -> int:
    return 4 * (-(-keys // 16) * 16)


def _scratch_bytes(queries: int, keys: int, dim: int, itemsize: int) -> int:
    return queries * (_row_bytes(keys) + 4) + (4 * _KEYS * dim if itemsize == 2 else 0)


def attention_scratch_bytes(heads: int, kv_heads: int, dim: int, keys: int, itemsize: int) -> int:
    """Return the most bytes of scratch that a thread needs for attention over up to so many keys."""
    group = heads // kv_heads
    queries = group * max(1, min(16, _SCORES // (group * _row_bytes(1))))
    # The more keys, the fewer queries at once: their scores stay below _SCORES until one token's alone exceed it.
    return max(_SCORES, group * _row_bytes(keys)) + 4 * queries + _scratch_bytes(0, keys, dim, itemsize)


def attention(
    q: NDArray[np.float32],
    k: NDArray[np.float32] | NDArray[np.float16],
    v: NDArray[np.float32] | NDArray[np.float16],
    positions: NDArray[np.int64],
    out: NDArray[np.float32],
) -> None:
    """Write softmax(q·k / sqrt(D))·v to out; row t sees keys 0 … positions[t].

    Shapes: q, out f32[T, H, D]; positions i64[T], consecutive; k, v both f32 or both f16 [KVH, capacity, D]; all
    contiguous; head h reads KV head h // (H // KVH).
    """
    tokens, heads, dim = q.shape
    kv_heads, capacity, _ = k.shape
    # The launch of a single token is the same at every position, so that a program may hold it.
    group, keys = heads // kv_heads, capacity if tokens == 1 else int(positions[-1]) + 1
    run_tokens = max(1, min(16, tokens, _SCORES // (group * _row_bytes(keys))))
    # Few units and many threads: a head each.
    share = group if kv_heads * -(-tokens // run_tokens) % get_threads() == 0 or tokens > run_tokens else 1
    arrays = address(q), address(k), address(v), address(out)
    rest = address(positions), float_bits(1 / math.sqrt(dim)), tokens, share, run_tokens, k.itemsize
    units = heads // share * -(-tokens // run_tokens)
    scratch = _scratch_bytes(run_tokens * share, keys, dim, k.itemsize)
    run(attention_groups, units, 1, (*arrays, heads, group, dim, capacity, *rest), scratch)
