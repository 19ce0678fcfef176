"""Norm, rope, attention and gate: the oracle's bits, whatever chunk a token came in; close to the mathematics."""

from __future__ import annotations

import numpy as np
import pytest

from knotctl.core.kernels import oracle
from knotctl.core.kernels.attention import attention, attention_scratch_bytes
from knotctl.core.kernels.elementwise import add, add_bias, swiglu
from knotctl.core.kernels.kv import store
from knotctl.core.kernels.norm import rms_norm
from knotctl.core.kernels.rope import rope
from knotctl.core.kernels.threads import get_threads, set_threads


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def at(position: int, tokens: int) -> np.ndarray:
    return np.arange(position, position + tokens)


@pytest.mark.parametrize("columns", [1, 16, 64, 100, 576, 896])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_rms_norm_has_the_oracles_bits(tokens: int, columns: int) -> None:
    x, weight = normal(tokens, columns), normal(columns, seed=1)
    out = np.empty_like(x)
    rms_norm(x, weight, 1e-6, out)
    assert same_bits(out, oracle.rms_norm(x, weight, 1e-6))
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * weight
    assert np.allclose(out, exact, rtol=1e-6)


def test_rms_norm_works_in_place_and_head_by_head() -> None:
    x, weight = normal(3, 4, 64), normal(64, seed=1)
    expected = oracle.rms_norm(x.reshape(12, 64), weight, 1e-5)
    rms_norm(x, weight, 1e-5, x)
    assert same_bits(x.reshape(12, 64), expected)


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-86.9, 87.9, 400_001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(oracle.exp(x) - exact) / np.spacing(exact.astype(np.float32))).max() < 1.5
    edges = oracle.exp(np.array([-200, -np.inf, 200, np.inf, np.nan, 0, -0.0], np.float32))
    assert edges[:4].tolist() == [0, 0, np.inf, np.inf] and np.isnan(edges[4]) and edges[5:].tolist() == [1, 1]


@pytest.mark.parametrize("shape", [(1, 5), (1, 1024), (3, 1536), (7, 4864)])
def test_swiglu_has_the_oracles_bits(shape: tuple[int, int]) -> None:
    gate, up = normal(*shape) * 20, normal(*shape, seed=1)
    gate[0, :4] = [-90, 89, 0, -0.0]
    expected = oracle.swiglu(gate, up)
    swiglu(gate, up, gate)
    assert same_bits(gate, expected)


def test_a_nan_passes_the_gate_as_nan() -> None:
    gate = np.array([[np.nan, 1, np.inf]], np.float32)
    out = np.empty_like(gate)
    swiglu(gate, np.ones_like(gate), out)
    assert np.isnan(out[0, 0]) and np.isfinite(out[0, 1]) and out[0, 2] == np.inf


def test_residual_and_bias_are_added() -> None:
    x, y, bias = normal(5, 37), normal(5, 37, seed=1), normal(37, seed=2)
    expected = (x + y) + bias
    add(x, y)
    add_bias(x, bias)
    assert same_bits(x, expected)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotated", [64, 48])
def test_rope_has_the_oracles_bits_and_turns_by_the_angle(rotated: int, interleaved: bool) -> None:
    x = normal(6, 3, 64)
    positions = np.array([0, 1, 2, 77, 4095, 130_000], np.int64)
    inv_freq = (10000.0 ** -(np.arange(0, rotated, 2) / rotated)).astype(np.float32)
    out = x.copy()
    rope(out, positions, inv_freq, interleaved)
    assert same_bits(out, oracle.rope(x, positions, inv_freq, interleaved))
    angle = positions[:, None].astype(np.float64) * inv_freq.astype(np.float64)
    pairs = rotated // 2
    a, b = (x[..., 0:rotated:2], x[..., 1:rotated:2]) if interleaved else (x[..., :pairs], x[..., pairs:rotated])
    turned = (a + 1j * b) * np.exp(1j * angle)[:, None, :]
    first = out[..., 0:rotated:2] if interleaved else out[..., :pairs]
    assert np.allclose(first, turned.real, atol=1e-6)
    assert same_bits(out[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (6, 2, 128), (9, 3, 64), (4, 1, 80), (2, 1, 20)])
@pytest.mark.parametrize("position", [0, 1, 30])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_attention_has_the_oracles_bits(heads: int, kv_heads: int, dim: int, position: int, kind: type) -> None:
    q, k, v = normal(5, heads, dim), normal(kv_heads, 50, dim, seed=1), normal(kv_heads, 50, dim, seed=2)
    k, v = k.astype(kind), v.astype(kind)
    out = np.empty_like(q)
    attention(q, k, v, at(position, 5), out)
    k, v = k.astype(np.float32), v.astype(np.float32)
    assert same_bits(out, oracle.attention(q, k, v, position))
    scores = np.einsum("thd,hjd->thj", q.astype(np.float64), k.repeat(heads // kv_heads, 0)) / np.sqrt(dim)
    hidden = np.arange(5)[:, None, None] + position < np.arange(50)
    scores = np.where(hidden, -np.inf, scores)
    p = np.exp(scores - scores.max(2, keepdims=True))
    exact = np.einsum("thj,hjd->thd", p / p.sum(2, keepdims=True), v.repeat(heads // kv_heads, 0))
    assert np.allclose(out, exact, atol=1e-5)


def test_chunks_and_threads_change_no_bit_of_attention() -> None:
    q, k, v = normal(40, 6, 64), normal(2, 64, 64, seed=1), normal(2, 64, 64, seed=2)
    whole = np.empty_like(q)
    attention(q, k, v, at(0, 40), whole)
    before = get_threads()
    try:
        for threads, chunk in ((1, 1), (2, 7), (3, 32)):
            set_threads(threads)
            out = np.empty_like(q)
            for t in range(0, 40, chunk):
                attention(q[t : t + chunk], k, v, at(t, len(q[t : t + chunk])), out[t : t + chunk])
            assert same_bits(out, whole)
    finally:
        set_threads(before)


@pytest.mark.parametrize(("tokens", "position"), [(1, 0), (1, 40_000), (16, 3000), (40, 900), (3, 1)])
def test_attention_takes_no_more_scratch_than_foretold(
    tokens: int, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr("knotctl.core.kernels.attention.run", lambda *args: taken.append(args[-1]))
    q, k = np.empty((tokens, 6, 32), np.float32), np.empty((2, position + tokens, 32), np.float16)
    attention(q, k, k, at(position, tokens), q)
    assert 0 < taken[0] <= attention_scratch_bytes(6, 2, 32, position + tokens, 2)


def test_keys_behind_the_query_are_never_read() -> None:
    q, k, v = normal(2, 2, 32), normal(1, 20, 32, seed=1), normal(1, 20, 32, seed=2)
    k[:, 7:], v[:, 7:] = np.nan, np.nan
    out = np.empty_like(q)
    attention(q, k, v, at(5, 2), out)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_keys_go_to_their_positions_and_nowhere_else(kind: type) -> None:
    x, cache = normal(3, 2, 20), np.full((2, 9, 20), 7, kind)
    store(x, np.array([4, 0, 8]), cache)
    for t, position in enumerate((4, 0, 8)):
        assert np.array_equal(cache[:, position], x[t].astype(kind))
    assert (cache[:, [1, 2, 3, 5, 6, 7]] == 7).all()


def test_keys_are_rounded_to_half_precision_as_numpy_rounds() -> None:
    # every f16, what lies halfway to the next, and its neighbours; both signs
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = np.concatenate([(halves[:-1] + halves[1:]) / 2, np.float32([65519.996, 65520, 1e30, np.inf])])
    x = np.concatenate([halves, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e38))])
    x = np.concatenate([x, -x])
    cache = np.empty((1, 1, x.size), np.float16)
    store(x.reshape(1, 1, -1), np.zeros(1, np.int64), cache)
    with np.errstate(over="ignore"):
        assert np.array_equal(cache.reshape(-1).view(np.uint16), x.astype(np.float16).view(np.uint16))
    store(np.full((1, 1, 1), np.nan, np.float32), np.zeros(1, np.int64), cache)
    assert np.isnan(cache[0, 0, 0])
