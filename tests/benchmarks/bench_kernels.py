"""How fast kernels are: `pytest tests/benchmarks/bench_kernels.py --benchmark-only`.

`extra_info` of a product names what its time means: gops (2 · rows · columns · tokens) and gbytes (weights read) a
second, of the best round; a pure read of as many bytes stands beside them, for the machine's own limit moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from knotctl.core.kernels.addresses import address
from knotctl.core.kernels.attention import attention
from knotctl.core.kernels.elementwise import add_rows, swiglu
from knotctl.core.kernels.jit import Kernel
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.matmul import matmul, quantize
from knotctl.core.kernels.norm import rms_norm
from knotctl.core.kernels.simd import add, load_i32x16, store_i32x16, zero_i32x16
from knotctl.core.kernels.threads import get_threads, run, set_threads
from knotctl.core.qtypes import QTYPES

# Type -> rows and columns: gate and down of a 1.5B, head and gate of a 0.5B, gate of a 135M.
SHAPES = {
    "Q4_K": (8960, 1536), "Q5_K": (8960, 1536), "Q6_K": (1536, 8960), "Q8_0": (16384, 896), "Q5_0": (4864, 896),
    "Q5_1": (8960, 1536), "Q4_0": (8960, 1536), "Q4_1": (8192, 576), "F16": (4096, 1536),
}  # fmt: skip
FAR = 192 << 20  # bytes: more than a third-level cache holds, so that one token's weights come from memory


@pytest.fixture(params=[1, 2], ids=lambda n: f"threads{n}")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = get_threads()
    set_threads(request.param)
    yield request.param
    set_threads(before)


def weights(name: str, rows: int) -> tuple[np.ndarray, int, int]:
    """Blocks (of one random block's bytes: their values do not matter), rows and columns."""
    qtype, columns = QTYPES[name], SHAPES[name][1]
    rng = np.random.default_rng(0)
    block = rng.integers(0, 60, qtype.block_bytes, np.uint8)
    return np.tile(block, rows * columns // qtype.block + 1)[1:][: rows * qtype.row_bytes(columns)], rows, columns


def note(benchmark: Any, operations: float, read: float) -> None:
    if benchmark.stats is not None:
        best = benchmark.stats.stats.min
        benchmark.extra_info |= {"gops": round(operations / best / 1e9, 1), "gbytes": round(read / best / 1e9, 2)}


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 64, 512])
@pytest.mark.parametrize("name", SHAPES)
def test_matmul(benchmark: Any, name: str, tokens: int, threads: int) -> None:
    rows, columns = SHAPES[name]
    row_bytes = QTYPES[name].row_bytes(columns) or 0
    blocks, rows, _ = weights(name, rows if tokens > 16 else FAR // row_bytes)
    x = np.random.default_rng(1).standard_normal((tokens, columns)).astype(np.float32)
    acts, out = quantize(x, QTYPES[name]), np.empty((tokens, rows), np.float32)
    benchmark(matmul, QTYPES[name], blocks, columns, acts, 0, out)
    note(benchmark, 2 * tokens * rows * columns, blocks.nbytes)


@Kernel
def read_lines(args: Any, scratch: Any, begin: Any, end: Any) -> None:
    """Units are 64 KiB."""
    (at,) = arguments(args, 1)
    for unit in range(begin, end):
        a, b = zero_i32x16(), zero_i32x16()
        for i in range(unit * 65536, (unit + 1) * 65536, 128):
            a, b = add(a, load_i32x16(at + i)), add(b, load_i32x16(at + i + 64))
        store_i32x16(scratch, add(a, b))


def test_pure_read(benchmark: Any, threads: int) -> None:
    memory = np.ones(FAR, np.uint8)
    benchmark(run, read_lines, FAR // 65536, 8, (address(memory),), 64)
    note(benchmark, 0, FAR)


@pytest.mark.parametrize("tokens", [1, 512])
@pytest.mark.parametrize(("name", "columns"), [("Q4_K", 8960), ("Q8_0", 4864)])
def test_quantize(benchmark: Any, name: str, columns: int, tokens: int, threads: int) -> None:
    x = np.random.default_rng(1).standard_normal((tokens, columns)).astype(np.float32)
    benchmark(quantize, x, QTYPES[name])


@pytest.mark.parametrize(("tokens", "position"), [(1, 128), (1, 4095), (8, 4088), (512, 0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 128), (9, 3, 64)])
def test_attention(
    benchmark: Any, heads: int, kv_heads: int, dim: int, tokens: int, position: int, threads: int
) -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((tokens, heads, dim)).astype(np.float32)
    k, v = (rng.standard_normal((kv_heads, 4096, dim)).astype(np.float32) for _ in range(2))
    benchmark(attention, q, k, v, np.arange(position, position + tokens), np.empty_like(q))


@pytest.mark.parametrize("tokens", [1, 512])
def test_norm_and_gate(benchmark: Any, tokens: int, threads: int) -> None:
    x, weight = np.ones((tokens, 1536), np.float32), np.ones(1536, np.float32)
    gate = np.ones((tokens, 8960), np.float32)

    def both() -> None:
        rms_norm(x, weight, 1e-6, x)
        swiglu(gate, gate, gate)

    benchmark(both)


def test_launch(benchmark: Any, threads: int) -> None:
    x = np.zeros((2, 16), np.float32)
    benchmark(run, add_rows, 2, 1, (address(x), address(x), 16))
