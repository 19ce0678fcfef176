"""Matrix times activations: the oracle's bits, whatever is computed together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from kernel_samples import QUANTISED, TYPES, odd, random_activations, random_rows

from knotctl.core.errors import CheckFailed, ModelError
from knotctl.core.kernels import oracle
from knotctl.core.kernels.decode import decode_rows
from knotctl.core.kernels.matmul import activation_kind, matmul, quantize
from knotctl.core.kernels.threads import get_threads, set_threads
from knotctl.core.qtypes import QTYPES, QType


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = get_threads()
    set_threads(request.param)
    yield request.param
    set_threads(before)


def product(qtype: QType, raw: np.ndarray, x: np.ndarray) -> np.ndarray:
    columns = x.shape[1]
    out = np.full((len(x), raw.size // (qtype.row_bytes(columns) or 1)), np.nan, np.float32)
    matmul(qtype, raw, columns, quantize(x, qtype), 0, out)
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 8, 9, 33])
@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_a_product_has_the_oracles_bits(qtype: QType, tokens: int, threads: int) -> None:
    rng = np.random.default_rng(tokens)
    raw, x = random_rows(rng, qtype, 37, 768), random_activations(rng, tokens, 768)
    assert same_bits(product(qtype, raw, x), oracle.matmul(qtype, raw, 768, x))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("qtype", QUANTISED, ids=lambda t: t.name)
def test_a_product_with_one_towering_block_or_none_has_the_oracles_bits(qtype: QType, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    raw, x = random_rows(rng, qtype, 37, 1280), rng.standard_normal((tokens, 1280)).astype(np.float32)
    assert same_bits(product(qtype, raw, x), oracle.matmul(qtype, raw, 1280, x))
    x[-1, 1000] = 400
    assert same_bits(product(qtype, raw, x), oracle.matmul(qtype, raw, 1280, x))


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_tokens_tilings_and_threads_change_no_bit(qtype: QType, threads: int) -> None:
    rng = np.random.default_rng(7)
    raw, x = random_rows(rng, qtype, 101, 512), random_activations(rng, 21, 512)
    whole = product(qtype, raw, x)
    assert same_bits(np.concatenate([product(qtype, raw, x[t : t + 1]) for t in range(21)]), whole)
    row_bytes = raw.size // 101
    for cuts in ([0, 1, 101], [0, 16, 32, 48, 101], [0, 50, 67, 68, 85, 101]):
        tiled = np.full_like(whole, np.nan)
        for a, b in itertools.pairwise(cuts):
            matmul(qtype, odd(raw[a * row_bytes : b * row_bytes], 3), 512, quantize(x, qtype), a, tiled)
        assert same_bits(tiled, whole)


@pytest.mark.parametrize("qtype", QUANTISED, ids=lambda t: t.name)
def test_the_largest_quants_scales_and_activations_do_not_overflow(qtype: QType) -> None:
    raw = np.full((3, qtype.block_bytes), 255, np.uint8)
    raw[1] = 0x80
    raw[2] = 0x7F
    for at in {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(qtype.name, (0, 2)):
        raw[:, at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    for sign in (1, -1):
        x = np.full((2, qtype.block), sign * 3.0, np.float32)
        assert same_bits(product(qtype, odd(raw), x), oracle.matmul(qtype, raw, qtype.block, x))


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_the_product_is_close_to_that_of_the_decoded_numbers(qtype: QType) -> None:
    rng = np.random.default_rng(11)
    raw, x = random_rows(rng, qtype, 64, 1024), rng.standard_normal((4, 1024)).astype(np.float32)
    exact = x.astype(np.float64) @ decode_rows(qtype, raw, 1024).T.astype(np.float64)
    error = np.sqrt(((product(qtype, raw, x) - exact) ** 2).mean() / (exact**2).mean())
    assert error < (1e-6 if qtype.block == 1 else 1e-2)


@pytest.mark.parametrize("columns", [1, 15, 17, 100])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_rows_need_no_grid(name: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    raw, x = random_rows(rng, QTYPES[name], 5, columns), rng.standard_normal((3, columns)).astype(np.float32)
    assert same_bits(product(QTYPES[name], raw, x), oracle.matmul(QTYPES[name], raw, columns, x))


def test_f16_covers_every_bit_pattern() -> None:
    bits = np.arange(65536, dtype=np.uint16).reshape(-1, 1)
    x = np.ones((1, 1), np.float32)
    out = product(QTYPES["F16"], bits.view(np.uint8).reshape(-1), x)
    assert np.array_equal(out[0], bits.view(np.float16)[:, 0].astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("columns", [32, 576, 896])
def test_rows_off_the_256_grid_work_where_their_type_allows(columns: int) -> None:
    rng = np.random.default_rng(columns)
    raw, x = random_rows(rng, QTYPES["Q5_0"], 9, columns), random_activations(rng, 3, columns)
    assert same_bits(product(QTYPES["Q5_0"], raw, x), oracle.matmul(QTYPES["Q5_0"], raw, columns, x))


def test_only_the_rows_given_are_written() -> None:
    rng = np.random.default_rng(5)
    qtype = QTYPES["Q4_K"]
    out = np.full((3, 60), np.nan, np.float32)
    matmul(qtype, random_rows(rng, qtype, 20, 256), 256, quantize(random_activations(rng, 3, 256), qtype), 30, out)
    assert np.isnan(out[:, :30]).all() and np.isnan(out[:, 50:]).all() and not np.isnan(out[:, 30:50]).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "F16"])
def test_a_number_that_is_not_finite_is_refused_and_its_row_named(name: str, poison: float) -> None:
    x = np.ones((4, 512), np.float32)
    x[2, 300] = poison
    with pytest.raises(CheckFailed, match="row 2") as e:
        quantize(x, QTYPES[name])
    assert e.value.code == "bad-activation"


@pytest.mark.parametrize("largest", [0.0, 1e-45, 9e-31, 1.1e-30, 1e15])
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_tiny_and_huge_activations_have_the_oracles_bits(name: str, largest: float) -> None:
    raw = random_rows(np.random.default_rng(1), QTYPES[name], 16, 512)
    x = np.linspace(-1, 1, 1024, dtype=np.float32).reshape(2, 512) * np.float32(largest)
    x[1, 77] *= 1000
    assert same_bits(product(QTYPES[name], raw, x), oracle.matmul(QTYPES[name], raw, 512, x))


@pytest.mark.parametrize("qtype", QUANTISED, ids=lambda t: t.name)
def test_a_block_that_towers_over_its_row_does_not_drown_it(qtype: QType) -> None:
    rng = np.random.default_rng(3)
    raw, x = random_rows(rng, qtype, 48, 1024), rng.standard_normal((5, 1024)).astype(np.float32)
    x[2:4, 700] = 3000
    found = product(qtype, raw, x)
    assert same_bits(found, oracle.matmul(qtype, raw, 1024, x))
    weights = decode_rows(qtype, raw, 1024).astype(np.float64)
    # what the outlier leaves of the others: with one plane its block's rounding alone is several times as much
    rest = np.abs(found[2] - weights @ x[2].astype(np.float64))
    assert rest.mean() < 0.05 * np.abs(weights[:, :512] @ x[2, :512]).mean()


def test_more_tokens_than_a_part_holds_are_multiplied_in_parts() -> None:
    rng = np.random.default_rng(4)
    qtype = QTYPES["Q4_K"]
    raw, x = random_rows(rng, qtype, 20, 256), random_activations(rng, 1030, 256)
    found = product(qtype, raw, x)
    for t in (0, 511, 512, 1023, 1029):
        assert same_bits(product(qtype, raw, x[t : t + 1])[0], found[t])


def test_activations_serve_every_type_of_their_kind() -> None:
    assert activation_kind(QTYPES["Q4_K"]) == activation_kind(QTYPES["Q6_K"]) != activation_kind(QTYPES["Q8_0"])
    assert activation_kind(QTYPES["Q5_1"]) == activation_kind(QTYPES["Q8_0"]) != activation_kind(QTYPES["F16"])


def test_a_type_without_a_kernel_is_refused() -> None:
    with pytest.raises(ModelError) as e:
        quantize(np.ones((1, 256), np.float32), QTYPES["IQ2_S"])
    assert e.value.code == "unsupported-type"
