"""Prints a digest of what kernels compute from fixed inputs: run at each SIMD level by test_levels.py."""

from __future__ import annotations

import hashlib

import numpy as np
from kernel_samples import random_activations, random_rows

from knotctl.core.kernels.attention import attention
from knotctl.core.kernels.elementwise import swiglu
from knotctl.core.kernels.matmul import matmul, quantize
from knotctl.core.kernels.norm import rms_norm
from knotctl.core.qtypes import QTYPES


def main() -> None:
    digest = hashlib.sha256()
    rng = np.random.default_rng(1)
    # one kernel for each way in which integers are multiplied
    ways = (
        ("Q4_K", 1),
        ("Q5_K", 1),
        ("Q5_0", 1),
        ("Q8_0", 1),
        ("Q4_K", 3),
        ("Q6_K", 4),
        ("Q4_K", 6),
        ("Q6_K", 6),
        ("Q8_0", 6),
    )
    for name, tokens in ways:
        raw, x = random_rows(rng, QTYPES[name], 40, 512), random_activations(rng, tokens, 512)
        out = np.empty((tokens, 40), np.float32)
        matmul(QTYPES[name], raw, 512, quantize(x, QTYPES[name]), 0, out)
        digest.update(out.tobytes())
        matmul(QTYPES[name], raw, 512, quantize(np.sin(x), QTYPES[name]), 0, out)  # nothing towers
        digest.update(out.tobytes())
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4, 64), (2, 40, 64), (2, 40, 64)))
    mixed = np.empty_like(q)
    attention(q, k, v, np.arange(30, 33), mixed)
    swiglu(q, mixed, q)
    rms_norm(q, np.ones(64, np.float32), 1e-6, q)
    digest.update(mixed.tobytes() + q.tobytes())
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
