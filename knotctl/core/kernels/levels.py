"""Which SIMD instructions kernels may use: chosen once, by the CPU's features or by KNOTCTL_SIMD.

`avx512` (AVX-512 with VNNI), `avxvnni` (its 256-bit form), `avx2`, and `generic` (plain LLVM vectors, right on every
CPU). All give the same bits. A target intrinsic on a CPU without it aborts the process, so a level that the CPU lacks
is refused here, before anything is compiled.
"""

from __future__ import annotations

import os
from typing import Any

import llvmlite.binding as llvm
from numba.core import config as numba_config

from knotctl.core.errors import UsageError

# Level -> the features of LLVM's names that it needs, the best first.
LEVELS: dict[str, tuple[str, ...]] = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    "avxvnni": ("avx2", "avxvnni"),
    "avx2": ("avx2",),
    "generic": (),
}


def supported(level: str, features: Any) -> bool:
    """Return whether a CPU of these features has what a level needs."""
    if level == "avxvnni" and features.get("avx512vnni") and features.get("avx512vl"):
        return True  # the same instructions under another encoding
    return all(features.get(name, False) for name in LEVELS[level])


def _choose() -> str:
    features = llvm.get_host_cpu_features()
    wanted = os.environ.get("KNOTCTL_SIMD") or next(level for level in LEVELS if supported(level, features))
    if wanted not in LEVELS or not supported(wanted, features):
        able = ", ".join(level for level in LEVELS if supported(level, features))
        raise UsageError("bad-simd", f"KNOTCTL_SIMD={wanted}: expected one that this CPU has: {able}")
    if wanted == "avx2":
        # Measured: under an AVX-512 target the AVX2 kernels run at half their speed; level and target go together.
        config: Any = numba_config
        config.CPU_NAME, config.CPU_FEATURES = "haswell", ""
    return wanted


LEVEL = _choose()
