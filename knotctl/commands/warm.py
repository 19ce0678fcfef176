"""`knotctl warm`: compile the kernels ahead, so that the first start of a service is as quick as the next."""

from __future__ import annotations

import time

from knotctl.commands.console import print_json, say
from knotctl.commands.options import Json


def warm(json: Json = False) -> None:
    """Compile the kernels for this CPU into the cache folder, or find them there.

    Every command that computes does so at its first use; this is for images and provisioning, where the first use
    comes later and should not wait. KNOTCTL_CACHE_DIR says where they go, KNOTCTL_SIMD forces an instruction set:
    avx512, avxvnni, avx2, dotprod (ARM) or generic. A new version removes kernels that were not used for 30 days.

    \b
    Examples:
    $ knotctl warm
    $ KNOTCTL_CACHE_DIR=/tmp/knot-cache knotctl warm --json
    """
    from knotctl.commands.warming import compile_kernels
    from knotctl.core.kernels.jit import kernel_folder
    from knotctl.core.kernels.levels import LEVEL
    from knotctl.core.kernels.warm import is_warm, steps

    found, began = is_warm(), time.perf_counter()
    compile_kernels()
    seconds = round(time.perf_counter() - began, 3)
    if json:
        print_json(
            {
                "kernels": steps(),
                "level": LEVEL,
                "folder": str(kernel_folder()),
                "compiled": not found,
                "seconds": seconds,
            }
        )
    else:
        say(f"{steps()} kernels for {LEVEL} in {kernel_folder()}" + (", compiled before" if found else ""))
