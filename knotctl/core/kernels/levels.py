"""Which SIMD instructions kernels may use: chosen once, by the CPU's features or by KNOTCTL_SIMD.

`avx512` (AVX-512 with VNNI), `avxvnni` (its 256-bit form), `avx2`, `dotprod` (AArch64's signed byte products), and
`generic` (plain LLVM vectors, right on every CPU). All give the same bits. A target intrinsic on a CPU without it
aborts the process, so a level that the CPU lacks is refused here, before anything is compiled.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from typing import Any

import llvmlite.binding as llvm
from numba.core import config as numba_config

from knotctl.core.errors import UsageError

# Level -> the features of LLVM's names that it needs, the best first.
LEVELS: dict[str, tuple[str, ...]] = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    "avxvnni": ("avx2", "avxvnni"),
    "avx2": ("avx2",),
    "dotprod": ("dotprod",),
    "generic": (),
}
_AT_HWCAP, _HWCAP_ASIMDDP = 16, 1 << 20  # Source: Linux, uapi/linux/auxvec.h and arch/arm64 uapi/asm/hwcap.h


def host_features() -> dict[str, bool]:
    """Return what this CPU has, by LLVM's names."""
    features = dict(llvm.get_host_cpu_features())
    if platform.machine() == "aarch64":  # LLVM, which reads /proc/cpuinfo here, knows only some of its words
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.restype = ctypes.c_ulong
        features["dotprod"] = bool(getauxval(ctypes.c_ulong(_AT_HWCAP)) & _HWCAP_ASIMDDP)
    return features


def supported(level: str, features: Mapping[str, bool]) -> bool:
    """Return whether a CPU of these features has what a level needs."""
    if level == "avxvnni" and features.get("avx512vnni") and features.get("avx512vl"):
        return True  # the same instructions under another encoding
    return all(features.get(name, False) for name in LEVELS[level])


def _choose() -> str:
    features = host_features()
    wanted = os.environ.get("KNOTCTL_SIMD") or next(level for level in LEVELS if supported(level, features))
    if wanted not in LEVELS or not supported(wanted, features):
        able = ", ".join(level for level in LEVELS if supported(level, features))
        raise UsageError("bad-simd", f"KNOTCTL_SIMD={wanted}: expected one that this CPU has: {able}")
    config: Any = numba_config
    if wanted == "avx2":
        # Measured: under an AVX-512 target the AVX2 kernels run at half their speed; level and target go together.
        config.CPU_NAME, config.CPU_FEATURES = "haswell", ""
    if wanted == "dotprod":
        config.CPU_FEATURES = ",".join(f"{'+' if has else '-'}{name}" for name, has in features.items())
    return wanted


LEVEL = _choose()
