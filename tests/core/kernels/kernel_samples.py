"""Random blocks of every type, at an odd address, and random activations: what the kernel tests feed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from knotctl.core.qtypes import COMPUTABLE, QTYPES, QType

TYPES = [QTYPES[name] for name in QTYPES if name in COMPUTABLE]
QUANTISED = [t for t in TYPES if t.block > 1]
# Where the f16 scales of a block lie; all other bytes may be anything.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def odd(raw: NDArray[np.uint8], shift: int = 1) -> NDArray[np.uint8]:
    """The same bytes at an address of `shift` modulo 64: how a knot's payload arrives."""
    room = np.empty(raw.size + 128, np.uint8)
    start = (shift - room.ctypes.data) % 64
    room[start : start + raw.size] = raw.reshape(-1)
    return room[start : start + raw.size]


def random_rows(rng: np.random.Generator, qtype: QType, rows: int, columns: int) -> NDArray[np.uint8]:
    """Whole rows of random blocks whose scales are finite and of either sign, subnormal ones among them."""
    n = rows * columns // qtype.block
    if qtype.block == 1:
        x = rng.standard_normal(n).astype(np.float32)
        as_type = {
            "F32": x,
            "F16": x.astype(np.float16),
            "BF16": (x.view(np.uint32) >> 16).astype(np.uint16),
        }
        return odd(as_type[qtype.name].view(np.uint8))
    raw = rng.integers(0, 256, (n, qtype.block_bytes), np.uint8)
    for at in SCALES[qtype.name]:
        d = rng.uniform(-0.01, 0.01, n).astype(np.float16)
        d[rng.random(n) < 0.05] = 3e-6
        raw[:, at : at + 2] = d.view(np.uint8).reshape(n, 2)
    return odd(raw)


def random_activations(rng: np.random.Generator, tokens: int, columns: int) -> NDArray[np.float32]:
    """Rows with outliers, a token of zeros and a block of zeros."""
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    x[rng.random(x.shape) < 0.01] *= 50
    if tokens > 2:
        x[1] = 0
        x[2, : min(256, columns)] = 0
    return x
