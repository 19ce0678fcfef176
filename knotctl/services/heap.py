"""Has the C library give large blocks of memory back when they are freed, so that a service holds what it says it does.

Left alone, glibc raises its threshold for mapping a block by itself to the largest block that was ever freed, up to
32 MiB. From then on keys and values of sessions are cut from its heaps, which shrink from their ends only: after 200
streams two stations of smollm2 held 60 and 100 MiB for nobody (free by glibc's own count; malloc_trim gave them back).
"""

from __future__ import annotations

import ctypes

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Sessions' keys and values, weights and a prompt's activations are larger and mapped; one token's logits are not.
LARGE_BYTES = 1 << 20
# What the end of a heap may keep: less would have it grow and shrink with every token.
_SPARE_BYTES = 4 << 20


def give_back_large_blocks() -> None:
    """Fix the thresholds of this process; elsewhere than with glibc, do nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)
