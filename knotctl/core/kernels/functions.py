"""exp, sine and cosine with operations of our own, so that no maths library or CPU changes a bit of a result."""

from __future__ import annotations

import numpy as np

from knotctl.core.kernels.jit import inner
from knotctl.core.kernels.simd import add, mul, power_of_two, splat_f32x16, sub, where_below

# exp(r) = 1 + r + r²·P(r) for |r| <= ln 2 / 2: Chebyshev interpolation of degree 4, relative error 1.1e-8.
EXP = (0.5, 0.16666576266288757, 0.041666556149721146, 0.008363178931176662, 0.0013926184037700295)
LOG2E = 1.44269504
# ln 2 in two parts, the first of 9 bits, so that its product with a whole number up to 2^14 is exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
MAGIC = 12582912.0  # 1.5 · 2^23: adding and subtracting it rounds to a whole number, half to even
EXP_LOWEST, EXP_HIGHEST = -87.0, 88.0

# pi / 2 in two parts, the first of 33 bits: exact times any whole number of 20 bits.
HALF_PI_HIGH, HALF_PI_LOW = 1.5707963267341256, 6.077100506506192e-11
MAGIC_64 = 6755399441055744.0  # 1.5 · 2^52


@inner
def exp(x):
    """Return e^x in 16 f32 lanes within 1.1 ulp; below -87 exactly 0, above 88 infinity, of NaN NaN."""
    magic = splat_f32x16(np.float32(MAGIC))
    n = sub(add(mul(x, splat_f32x16(np.float32(LOG2E))), magic), magic)
    r = sub(sub(x, mul(n, splat_f32x16(np.float32(LN2_HIGH)))), mul(n, splat_f32x16(np.float32(LN2_LOW))))
    p = splat_f32x16(np.float32(EXP[4]))
    p = add(mul(p, r), splat_f32x16(np.float32(EXP[3])))
    p = add(mul(p, r), splat_f32x16(np.float32(EXP[2])))
    p = add(mul(p, r), splat_f32x16(np.float32(EXP[1])))
    p = add(mul(p, r), splat_f32x16(np.float32(EXP[0])))
    y = mul(add(add(mul(p, mul(r, r)), r), splat_f32x16(np.float32(1))), power_of_two(n))
    y = where_below(x, splat_f32x16(np.float32(EXP_LOWEST)), splat_f32x16(np.float32(0)), y)
    return where_below(splat_f32x16(np.float32(EXP_HIGHEST)), x, splat_f32x16(np.float32(np.inf)), y)


# Taylor series of sin(r) = r + r·z·P(z) and cos(r) = 1 + z·P(z), z = r².
SIN = (-1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800, 1 / 6227020800)
COS = (-1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800, 1 / 479001600)


@inner
def cosine_and_sine(angle):
    """Return cos and sin of an f64 of at most 2^20, in f64 within 1e-12."""
    n = (angle * (2 / np.pi) + MAGIC_64) - MAGIC_64
    r = (angle - n * HALF_PI_HIGH) - n * HALF_PI_LOW
    z = r * r
    p = ((((SIN[5] * z + SIN[4]) * z + SIN[3]) * z + SIN[2]) * z + SIN[1]) * z + SIN[0]
    q = ((((COS[5] * z + COS[4]) * z + COS[3]) * z + COS[2]) * z + COS[1]) * z + COS[0]
    sine, cosine = r + r * z * p, 1 + z * q
    quarter = np.int64(n) & 3
    if quarter & 1:
        sine, cosine = cosine, -sine
    if quarter & 2:
        sine, cosine = -sine, -cosine
    return cosine, sine
